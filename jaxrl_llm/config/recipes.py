"""Published algorithms as rows of `AlgorithmConfig` fields, and the names of all choices."""

from collections.abc import Mapping
from typing import Any

# Advantages that compare the samples of a prompt.
GROUP_ADVANTAGES = (
    "grpo", "grpo_passk", "grpo_turns", "maxrl", "lite_ppo", "batch_std", "gdpo", "rloo",
    "reinforce_plus_plus_baseline", "opo", "gpg", "optimal_token_baseline",
    "tir_optimal_token_baseline", "online_dpo", "xpo", "nash_md",
)  # fmt: skip
ADVANTAGES = ("gae", *GROUP_ADVANTAGES, "remax", "reinforce_plus_plus")
# Settings of advantages of pairs, and those that read them.
PREFERENCE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "dpo_beta": ("online_dpo", "xpo"),
    "exploration_coef": ("xpo",),
    "mixture_coef": ("nash_md",),
}
POLICY_LOSSES = (
    "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl", "dro",
    "cispo", "vespo", "m2po", "reinforce",
)  # fmt: skip
AGGREGATIONS = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)  # fmt: skip
# Of pairs, and of single answers with a label.
PAIR_LOSSES = (
    "sigmoid", "robust", "ipo", "hinge", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair",
    "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "cpo", "simpo",
    "orpo",
)  # fmt: skip
LABEL_LOSSES = ("kto", "apo_zero_unpaired", "bco")
REFERENCE_FREE_LOSSES = ("sft", "cpo", "simpo", "orpo")
SMOOTHED_LOSSES = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "cpo", "simpo")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")
_LEVELS = ("token", "seq_sum", "seq_mean")
REJECTIONS = (
    *(f"{level}_{estimator}" for level in _LEVELS for estimator in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
    "token_binary_kl",
)


def rejection_parts(option: str) -> tuple[str, str]:
    """The level and the estimator of an option of `REJECTIONS`.

    >>> rejection_parts("seq_mean_k1"), rejection_parts("token_binary_kl")
    (('seq_mean', 'k1'), ('token', 'binary_kl'))
    """
    level = next(each for each in (*_LEVELS, "seq_max") if option.startswith(f"{each}_"))
    return level, option.removeprefix(f"{level}_")


_SEQ_MEAN = dict(aggregation="seq-mean-token-mean")
_KL_IN_REWARD = dict(kl_in="reward", kl_estimator="k1", kl_coef=0.001)
_PAIRS = dict(policy_loss="reinforce", aggregation="seq-mean-token-sum")
_PPO = dict(_KL_IN_REWARD, advantage="gae", samples_per_prompt=1)
RECIPES: Mapping[str, Mapping[str, Any]] = {
    # Schulman et al., arXiv:1707.06347; KL in the reward as in arXiv:2203.02155.
    "ppo": dict(_PPO),
    # Shao et al., arXiv:2402.03300.
    "grpo": dict(_SEQ_MEAN, advantage="grpo", kl_in="loss", kl_coef=0.04),
    # Liu et al., arXiv:2503.20783.
    "dr_grpo": dict(advantage="grpo", group_std=False, aggregation="seq-mean-token-sum-norm"),
    # Yu et al., arXiv:2503.14476.
    "dapo": dict(
        advantage="grpo", clip_high=0.28, loss_args={"dual_clip": 10.0}, dynamic_sampling=True
    ),
    # Zheng et al., arXiv:2507.18071.
    "gspo": dict(_SEQ_MEAN, advantage="grpo", policy_loss="gspo", clip_low=3e-4, clip_high=4e-4),
    # Ahmadian et al., arXiv:2402.14740.
    "rloo": dict(_KL_IN_REWARD, advantage="rloo", policy_loss="reinforce", kl_coef=0.03),
    # Li et al., arXiv:2310.10505.
    "remax": dict(_KL_IN_REWARD, advantage="remax", samples_per_prompt=1, policy_loss="reinforce"),
    # Hu et al., arXiv:2501.03262.
    "reinforce_pp": dict(_KL_IN_REWARD, advantage="reinforce_plus_plus", samples_per_prompt=1),
    # Hao et al., arXiv:2505.23585.
    "opo": dict(advantage="opo", policy_loss="reinforce"),
    # MiniMax, arXiv:2506.13585.
    "cispo": dict(advantage="grpo", policy_loss="cispo", clip_low=1.0, clip_high=4.0),
    # Gao et al., arXiv:2511.20347.
    "sapo": dict(_SEQ_MEAN, advantage="grpo", policy_loss="sapo"),
    # Zhao et al., arXiv:2507.20673.
    "gmpo": dict(_SEQ_MEAN, advantage="grpo", policy_loss="geo_mean", clip_low=0.4, clip_high=0.4),
    # Tajwar et al., arXiv:2602.02710.
    "maxrl": dict(advantage="maxrl"),
    # arXiv:2602.05261: GSPO whose sequences weigh as much as they have tokens.
    "luspo": dict(
        advantage="grpo",
        policy_loss="gspo",
        aggregation="seq-mean-token-sum",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    # arXiv:2602.10693.
    "vespo": dict(advantage="grpo", policy_loss="vespo"),
    # Zheng et al., arXiv:2510.01161; its ratio is to the policy that sampled.
    "m2po": dict(advantage="grpo", policy_loss="m2po", old_log_probs="rollout"),
    # Liu et al., arXiv:2508.08221.
    "lite_ppo": dict(advantage="lite_ppo"),
    # arXiv:2510.00977.
    "2_grpo": dict(_SEQ_MEAN, advantage="grpo", samples_per_prompt=2),
    # Wang et al., arXiv:2506.01939, on the settings of DAPO.
    "high_entropy": dict(
        advantage="grpo",
        clip_high=0.28,
        loss_args={"dual_clip": 10.0},
        dynamic_sampling=True,
        entropy_share=0.2,
    ),
    # DeepSeek-AI, arXiv:2512.02556, Sec. 3.1.
    "deepseek_v3_2": dict(
        _SEQ_MEAN,
        advantage="grpo",
        group_std=False,
        kl_in="loss",
        kl_coef=0.001,
        kl_unbiased=True,
        off_policy_threshold=0.05,
    ),
    # Khatri et al., arXiv:2510.13786; docs/algorithms.md has what is set beside the algorithm.
    "scale_rl": dict(
        advantage="batch_std",
        policy_loss="cispo",
        clip_low=1.0,
        clip_high=4.0,
        mask_uniform_groups=True,
    ),
    # Shrivastava et al., arXiv:2605.24517.
    "echo": dict(_SEQ_MEAN, advantage="grpo", observation_coef=0.05),
    # Guo et al., arXiv:2402.04792; on one update a step its gradient is DPO's.
    "online_dpo": dict(_PAIRS, advantage="online_dpo", samples_per_prompt=2),
    # Xie et al., arXiv:2405.21046.
    "xpo": dict(_PAIRS, advantage="xpo"),
    # Munos et al., arXiv:2312.00886.
    "nash_md": dict(_PAIRS, advantage="nash_md", kl_in="loss", kl_estimator="k1+", kl_coef=0.1),
    # Chu et al., arXiv:2504.02546.
    "gpg": dict(advantage="gpg", policy_loss="gpg"),
    # Dai et al., arXiv:2310.12773.
    "safe_rlhf": dict(_PPO, kl_coef=0.01, gae_lambda=0.95, safe=True),
}
