"""Typed description of a run.

Experiments are written as `ConfigDict`s in `configs/`; everything inside the
package receives the frozen dataclasses below. `from_config_dict` is the only
bridge between the two, and reports every problem at once. No field is
optional: what is not set in the ConfigDict (missing, or `None`) takes the
value of the recipe, then the default written here.

The bridge itself is `jaxrl_llm/config_bridge.py`; this file holds the nouns and
their rules. What the policy network is stands in `config_model.py`; speculation in
`config_rollout.py`; checkpoints, metrics, profiles and alerts in `config_records.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from jaxrl_llm.config_model import LoraConfig, ModelConfig
from jaxrl_llm.config_records import AlertsConfig, CheckpointConfig, MetricsConfig, ProfilerConfig
from jaxrl_llm.config_rollout import NO_SPECULATION, SpeculationConfig
from jaxrl_llm.errors import Problem, UserError
from jaxrl_llm.placement import PlacementConfig
from jaxrl_llm.recipes import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    RECIPES,
    REJECTIONS,
)


class ConfigError(UserError, ValueError):
    """A run description that cannot work; the message lists every problem."""

    def __init__(self, problems: Sequence[str]):
        """Makes the message of `problems`, one line each, and keeps them."""
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in this config:", *(f"  {p}" for p in problems)]))


GROUP_ADVANTAGES = (
    "grpo",
    "grpo_passk",
    "gdpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)


def is_import_path(name: str) -> bool:
    """Returns whether `name` points at a user's function: `package.module:f` or `file.py:f`."""
    return ":" in name


def _known(name: str, known: tuple[str, ...], what: str) -> Iterator[str]:
    if name not in known and not is_import_path(name):
        yield (
            f"unknown {what} {name!r}; known: {', '.join(known)}; "
            "or your own function as 'package.module:function' or 'path/file.py:function'"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up, decay and a bound on the global gradient norm."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0  # optimizer updates, not RL steps
    min_lr_ratio: float = 0.0  # floor of the decay, as a share of learning_rate
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # inf: no clipping
    moment_dtype: Literal["float32", "bfloat16"] = "float32"

    def problems(self) -> Iterator[Problem]:
        if not self.learning_rate >= 0:
            yield "learning_rate", f"must not be negative, got {self.learning_rate}"
        if self.warmup_steps < 0:
            yield "warmup_steps", f"must not be negative, got {self.warmup_steps}"
        if not self.max_grad_norm > 0:
            yield "max_grad_norm", f"must be positive (inf: no clipping), got {self.max_grad_norm}"
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield name, f"must lie in [0, 1), got {getattr(self, name)}"
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            yield "min_lr_ratio", f"must lie in [0, 1], got {self.min_lr_ratio}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """One point in the space spanned by the published algorithms; `recipe` names a row of it."""

    recipe: str = "grpo"
    samples_per_prompt: int = 8
    # Advantage.
    advantage: str = "grpo"
    gamma: float = 1.0
    gae_lambda: float = 1.0
    group_std: bool = True  # divide group advantages by the group's standard deviation
    # Policy loss.
    policy_loss: str = "vanilla"
    aggregation: str = "token-mean"
    loss_scale: float = 0.0  # divisor of seq-mean-token-sum-norm; 0 is rollout.max_response_tokens
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0  # inf: off; the cap of the ratio in dppo_tv and dppo_kl
    entropy_coef: float = 0.0
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    dro_beta: float = 0.1
    clip_cov_share: float = 0.0002
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_share: float = 0.0002
    kl_cov_coef: float = 0.1
    # KL control against the reference policy.
    kl_in: Literal["none", "reward", "loss"] = "none"
    kl_estimator: str = "k3"
    kl_coef: float = 0.001
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    kl_target: float = 0.1
    kl_horizon: int = 10_000  # sequences
    # Critic.
    value_clip: float = 0.5  # inf: off
    critic_warmup_steps: int = 0  # RL steps that train the critic alone
    # Sampling of DAPO (arXiv:2503.14476).
    dynamic_sampling: bool = False  # drop groups of equal reward and sample again
    max_sampling_waves: int = 10
    overlong_buffer_tokens: int = 0  # soft length penalty begins that far before the cap; 0: off
    overlong_penalty: float = 1.0
    # Off-policy correction between rollout and training log-probs.
    correction: Literal["none", "token", "sequence"] = "none"
    correction_mode: Literal["truncate", "mask"] = "truncate"
    correction_low: float = 0.0  # mask mode: weights below become zero
    correction_high: float = 2.0
    correction_normalize: bool = False
    rejections: tuple[str, ...] = ()  # e.g. ("token_k1", "seq_mean_k3")
    rejection_lows: tuple[float, ...] = ()  # k1 only: ratio below which to reject
    rejection_highs: tuple[float, ...] = ()
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    # Safe-RLHF (arXiv:2310.12773).
    safe: bool = False
    cost_limit: float = 0.0
    multiplier_init: float = 1.0
    multiplier_lr: float = 0.1
    multiplier_max: float = 100.0

    def problems(self) -> Iterator[Problem]:
        if self.recipe not in RECIPES:
            yield "recipe", f"unknown recipe {self.recipe!r}; known: {', '.join(RECIPES)}"
        for field, known, what in (
            ("advantage", ADVANTAGES, "advantage estimator"),
            ("policy_loss", POLICY_LOSSES, "policy loss"),
        ):
            for message in _known(getattr(self, field), known, what):
                yield field, message
        if self.aggregation not in AGGREGATIONS:
            yield (
                "aggregation",
                (f"unknown aggregation {self.aggregation!r}; known: {', '.join(AGGREGATIONS)}"),
            )
        if self.kl_estimator not in KL_ESTIMATORS:
            yield (
                "kl_estimator",
                (f"unknown KL estimator {self.kl_estimator!r}; known: {', '.join(KL_ESTIMATORS)}"),
            )
        if self.samples_per_prompt < 1:
            yield "samples_per_prompt", f"must be at least 1, got {self.samples_per_prompt}"
        elif self.advantage in GROUP_ADVANTAGES and self.samples_per_prompt < 2:
            yield (
                "samples_per_prompt",
                (
                    f"advantage={self.advantage!r} compares samples of one prompt and needs at"
                    f" least 2, got {self.samples_per_prompt}; set it to 8 or use advantage='gae'"
                ),
            )
        for name in ("gamma", "gae_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                yield name, f"must lie in [0, 1], got {getattr(self, name)}"
        if not 0.0 < self.clip_low <= 1.0:
            yield "clip_low", f"must lie in (0, 1], got {self.clip_low}"
        if not self.clip_high > 0.0:
            yield "clip_high", f"must be positive, got {self.clip_high}"
        if not self.dual_clip > 1.0:
            yield "dual_clip", f"must exceed 1 (inf: off), got {self.dual_clip}"
        if self.kl_coef < 0 or math.isnan(self.kl_coef):
            yield "kl_coef", f"must not be negative, got {self.kl_coef}"
        if self.kl_controller == "adaptive" and self.kl_in != "reward":
            yield (
                "kl_controller",
                (
                    "adaptive control needs the KL that kl_in='reward' measures,"
                    f" got kl_in={self.kl_in!r}"
                ),
            )
        if self.kl_horizon < 1 or self.kl_target <= 0:
            yield (
                "kl_horizon",
                (
                    "kl_horizon and kl_target must be positive,"
                    f" got {self.kl_horizon}, {self.kl_target}"
                ),
            )
        if self.policy_loss == "dro" and not self.dro_beta > 0:
            yield "dro_beta", f"must be positive for policy_loss='dro', got {self.dro_beta}"
        if not self.value_clip > 0:
            yield "value_clip", f"must be positive (inf: off), got {self.value_clip}"
        if self.dynamic_sampling and self.samples_per_prompt < 2:
            yield "dynamic_sampling", "drops groups of equal reward; needs samples_per_prompt >= 2"
        if self.dynamic_sampling and self.advantage == "remax":
            yield "dynamic_sampling", "not defined with advantage='remax' (groups of one)"
        if self.max_sampling_waves < 1:
            yield "max_sampling_waves", f"must be at least 1, got {self.max_sampling_waves}"
        if self.overlong_buffer_tokens < 0:
            yield "overlong_buffer_tokens", "must not be negative (0: off)"
        if not 0 <= self.correction_low <= self.correction_high:
            yield (
                "correction_low",
                (
                    f"needs 0 <= correction_low <= correction_high, got {self.correction_low},"
                    f" {self.correction_high}"
                ),
            )
        for name in self.rejections:
            if name not in REJECTIONS:
                yield "rejections", f"unknown option {name!r}; known: {', '.join(REJECTIONS)}"
        if len(set(self.rejections)) != len(self.rejections):
            yield "rejections", f"each option at most once, got {self.rejections}"
        for name in ("rejection_lows", "rejection_highs"):
            if len(getattr(self, name)) != len(self.rejections):
                yield (
                    name,
                    (
                        f"needs one number for each of the {len(self.rejections)} rejections,"
                        f" got {len(getattr(self, name))}"
                    ),
                )
        bounds = zip(self.rejections, self.rejection_lows, self.rejection_highs, strict=False)
        for name, low, high in bounds:
            if not 0 <= low <= high or high == 0:
                yield (
                    "rejection_highs",
                    (f"{name} needs 0 <= low <= high and high > 0, got {low}, {high}"),
                )
        if self.safe and self.advantage != "gae":
            yield "safe", "Safe-RLHF estimates reward and cost with critics; set advantage='gae'"
        if self.safe and not self.multiplier_init >= 0:
            yield "multiplier_init", f"must not be negative, got {self.multiplier_init}"
        if self.safe and not self.multiplier_max > 0:
            yield "multiplier_max", f"must be positive, got {self.multiplier_max}"

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.kl_in != "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value network of PPO; used when the advantage is `gae`."""

    path: str = ""  # Hugging Face folder (one-label classifier or causal LM); "": policy's weights
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)

    def problems(self) -> Iterator[Problem]:
        yield from ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen policy of the KL terms."""

    path: str = ""  # "": the policy's weights when RL begins

    def problems(self) -> Iterator[Problem]:
        yield from ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from."""

    task: Literal["arithmetic", "gsm8k", "files"] = "arithmetic"
    train_files: tuple[str, ...] = ()  # parquet or jsonl
    eval_files: tuple[str, ...] = ()
    prompt_column: str = "prompt"
    max_prompt_tokens: int = 256
    filter_long_prompts: bool = True  # False: a longer prompt is an error
    shuffle: bool = True
    chat_template: bool = True  # False: message contents are joined as plain text
    num_workers: int = 0
    # The built-in task: sums of digits, worked step by step.
    arithmetic_terms: int = 3
    arithmetic_train_prompts: int = 512
    arithmetic_eval_prompts: int = 128
    arithmetic_errors: float = 0.0  # share of worked examples that are wrong

    def problems(self) -> Iterator[Problem]:
        if self.task != "arithmetic" and not self.train_files:
            yield "train_files", f"task={self.task!r} reads files, none given"
        if self.max_prompt_tokens < 1:
            yield "max_prompt_tokens", f"must be at least 1, got {self.max_prompt_tokens}"
        if not 2 <= self.arithmetic_terms <= 16:
            yield "arithmetic_terms", f"must lie in [2, 16], got {self.arithmetic_terms}"
        for name in ("arithmetic_train_prompts", "arithmetic_eval_prompts"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if not 0.0 <= self.arithmetic_errors < 1.0:
            yield "arithmetic_errors", f"must lie in [0, 1), got {self.arithmetic_errors}"
        wanted = self.arithmetic_train_prompts + self.arithmetic_eval_prompts
        if self.task == "arithmetic" and 10**self.arithmetic_terms < wanted:
            yield (
                "arithmetic_train_prompts",
                f"{self.arithmetic_train_prompts} and arithmetic_eval_prompts="
                f"{self.arithmetic_eval_prompts} are {wanted} different prompts, but"
                f" arithmetic_terms={self.arithmetic_terms} digits make only"
                f" {10**self.arithmetic_terms} sums; use fewer prompts or more terms",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    max_response_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()  # beside the tokenizer's end of sequence
    num_slots: int = 0  # 0: chosen from the work and the memory
    chunk_steps: int = 16  # decode steps between two looks of the host
    dtype: Literal["compute", "float32", "bfloat16"] = "compute"
    speculation: SpeculationConfig = NO_SPECULATION

    def problems(self) -> Iterator[Problem]:
        if self.max_response_tokens < 1:
            yield "max_response_tokens", f"must be at least 1, got {self.max_response_tokens}"
        if not 0.0 <= self.temperature < math.inf:
            yield "temperature", f"must be finite and not negative, got {self.temperature}"
        if self.top_k < 0:
            yield "top_k", f"must not be negative (0: off), got {self.top_k}"
        if not 0.0 < self.top_p <= 1.0:
            yield "top_p", f"must lie in (0, 1], got {self.top_p}"
        if not 0.0 <= self.min_p < 1.0:
            yield "min_p", f"must lie in [0, 1), got {self.min_p}"
        if len(self.stop_tokens) > 8:
            yield "stop_tokens", f"at most 8, got {len(self.stop_tokens)}"
        if self.num_slots < 0:
            yield "num_slots", f"must not be negative (0: chosen), got {self.num_slots}"
        if not 1 <= self.chunk_steps <= 128:
            yield "chunk_steps", f"must lie in [1, 128], got {self.chunk_steps}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One reward function and its share of the score."""

    function: str = ""  # arithmetic, gsm8k, math, format, length; or an import or file path
    weight: float = 1.0
    data_source: str = "*"  # rows it applies to; "*": all

    def problems(self) -> Iterator[Problem]:
        if not self.function:
            yield "function", "required: a built-in name or 'path/file.py:function'"
        if not math.isfinite(self.weight):
            yield "weight", f"must be finite, got {self.weight}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """One reward (or cost) model on the mesh and its share of the score."""

    path: str = ""  # Hugging Face one-label classifier; "": the one trained by `preference`
    weight: float = 1.0
    data_source: str = "*"

    def problems(self) -> Iterator[Problem]:
        if not math.isfinite(self.weight):
            yield "weight", f"must be finite, got {self.weight}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """What a response is worth: the weighted sum of all terms that apply to its data source."""

    functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    models: Mapping[str, RewardModelConfig] = dataclasses.field(default_factory=dict)
    cost_functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    cost_models: Mapping[str, RewardModelConfig] = dataclasses.field(default_factory=dict)
    num_workers: int = 2  # processes
    timeout_s: float = 10.0
    memory_gib: float = 16.0  # address space of a process; inf: no limit
    environment: tuple[str, ...] = ()  # variables of the run that the processes may see
    on_failure: Literal["stop", "score"] = "stop"
    failure_score: float = 0.0

    def problems(self) -> Iterator[Problem]:
        if not self.functions and not self.models:
            yield "functions", "no reward at all; add rewards.functions or rewards.models"
        if shared := set(self.functions) & set(self.models):
            yield "models", f"names used twice: {', '.join(sorted(shared))}"
        if self.num_workers < 1:
            yield "num_workers", f"must be at least 1, got {self.num_workers}"
        if not self.timeout_s > 0:
            yield "timeout_s", f"must be positive, got {self.timeout_s}"
        if not self.memory_gib >= 0.5:
            yield "memory_gib", f"must be at least 0.5 (inf: no limit), got {self.memory_gib}"
        if not math.isfinite(self.failure_score):
            yield "failure_score", f"must be finite, got {self.failure_score}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Sizes of a step. Prompts x samples make a step, cut into minibatches (one update each)."""

    num_steps: int = 100
    prompts_per_step: int = 8
    minibatch_size: int = 0  # sequences; 0: the whole step
    epochs: int = 1
    max_tokens_per_microbatch: int = 16_384  # per device, padding included; a hard cap
    shared_prompts: Literal["auto", "off"] = "auto"  # learners read a group's prompt once
    optimizer: OptimizerConfig = OptimizerConfig()

    def problems(self) -> Iterator[Problem]:
        for name in ("num_steps", "prompts_per_step", "epochs", "max_tokens_per_microbatch"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if self.minibatch_size < 0:
            yield (
                "minibatch_size",
                f"must not be negative (0: whole step), got {self.minibatch_size}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """A supervised stage before RL: warm start of the policy, or a reward model's training."""

    num_steps: int = 0  # 0: no such stage
    batch_size: int = 64
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)

    def problems(self) -> Iterator[Problem]:
        if self.num_steps < 0:
            yield "num_steps", f"must not be negative (0: no such stage), got {self.num_steps}"
        if self.batch_size < 1:
            yield "batch_size", f"must be at least 1, got {self.batch_size}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: mean@k, pass@k and maj@k per data source."""

    # What an answer is worth here. Empty: `rewards`; a reward model's score is no accuracy.
    functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    every: int = 0  # RL steps; 0: only before and after
    before: bool = True
    after: bool = True
    num_prompts: int = 0  # 0: all
    samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0

    def problems(self) -> Iterator[Problem]:
        if self.every < 0 or self.num_prompts < 0:
            yield "every", "every and num_prompts must not be negative"
        if self.samples_per_prompt < 1:
            yield "samples_per_prompt", f"must be at least 1, got {self.samples_per_prompt}"
        if self.samples_per_prompt > 1 and self.temperature == 0:
            yield (
                "samples_per_prompt",
                (
                    f"{self.samples_per_prompt} greedy samples are all the same;"
                    " set evaluation.temperature above 0"
                ),
            )
        if not 0.0 <= self.temperature < math.inf:
            yield "temperature", f"must be finite and not negative, got {self.temperature}"
        if not 0.0 < self.top_p <= 1.0:
            yield "top_p", f"must lie in (0, 1], got {self.top_p}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; one of them may be -1, the rest of the devices."""

    data: int = 1
    fsdp: int = -1
    sequence: int = 1
    tensor: int = 1
    # How devices that share a row's length attend: swap length for heads, or pass keys around.
    sequence_attention: Literal["all_to_all", "ring"] = "all_to_all"
    # Rollout weights: split by tensor; as in training; over all model axes; whole on each device.
    rollout: Literal["tensor", "train", "all_tensor", "replicas"] = "tensor"
    on_host: tuple[str, ...] = ()  # rests in host memory between uses: "optimizer", "reference"

    def problems(self) -> Iterator[Problem]:
        sizes = {name: getattr(self, name) for name in ("data", "fsdp", "sequence", "tensor")}
        if sum(size == -1 for size in sizes.values()) > 1:
            yield "fsdp", f"at most one axis may be -1 (the rest), got {sizes}"
        for name, size in sizes.items():
            if size != -1 and size < 1:
                yield name, f"must be positive or -1 (the rest), got {size}"
        if unknown := set(self.on_host) - {"optimizer", "reference"}:
            yield "on_host", f"unknown {sorted(unknown)}; known: 'optimizer', 'reference'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One run."""

    seed: int = 0
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    trainer: TrainerConfig = TrainerConfig()
    warm_start: SupervisedConfig = SupervisedConfig()
    preference: SupervisedConfig = SupervisedConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    alerts: AlertsConfig = dataclasses.field(default_factory=AlertsConfig)
    profiler: ProfilerConfig = dataclasses.field(default_factory=ProfilerConfig)
    mesh: MeshConfig = MeshConfig()
    placement: PlacementConfig = dataclasses.field(default_factory=PlacementConfig)

    @property
    def sequences_per_step(self) -> int:
        return self.trainer.prompts_per_step * self.algorithm.samples_per_prompt

    @property
    def minibatch_size(self) -> int:
        return self.trainer.minibatch_size or self.sequences_per_step

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def evaluation_rewards(self) -> RewardsConfig:
        """What held-out answers are judged by: `evaluation.functions`, or all that RL uses."""
        if not self.evaluation.functions:
            return self.rewards
        return dataclasses.replace(
            self.rewards,
            functions=self.evaluation.functions,
            models={},
            cost_functions={},
            cost_models={},
        )

    def problems(self) -> Iterator[Problem]:
        if not 0 <= self.seed < 2**32:
            yield "seed", f"must lie in [0, 2**32), got {self.seed}"
        sequences = self.sequences_per_step
        if sequences > 0 < self.minibatch_size and sequences % self.minibatch_size:
            near = [n for n in range(1, sequences + 1) if sequences % n == 0]
            near = sorted(sorted(near, key=lambda n: abs(n - self.minibatch_size))[:2])
            yield (
                "trainer.minibatch_size",
                f"{self.minibatch_size} does not divide the {sequences} sequences of a step"
                f" ({self.trainer.prompts_per_step} prompts x"
                f" {self.algorithm.samples_per_prompt} samples);"
                f" use {' or '.join(map(str, near))}",
            )
        shards = self.mesh.sequence  # -1: known when the devices are
        if self.max_sequence_tokens > self.trainer.max_tokens_per_microbatch * shards > 0:
            yield (
                "trainer.max_tokens_per_microbatch",
                f"{self.trainer.max_tokens_per_microbatch} cannot hold one sequence of"
                f" data.max_prompt_tokens + rollout.max_response_tokens ="
                f" {self.max_sequence_tokens}; use at least that",
            )
        if self.algorithm.overlong_buffer_tokens > self.rollout.max_response_tokens:
            yield (
                "algorithm.overlong_buffer_tokens",
                f"{self.algorithm.overlong_buffer_tokens} exceeds"
                f" rollout.max_response_tokens={self.rollout.max_response_tokens}",
            )
        if self.rollout.temperature == 0 and self.algorithm.samples_per_prompt > 1:
            yield (
                "rollout.temperature",
                "0 (greedy) makes all samples of a prompt the same; set it above 0",
            )
        costs = bool(self.rewards.cost_functions or self.rewards.cost_models)
        if self.algorithm.safe and not costs:
            yield (
                "rewards.cost_models",
                "algorithm.safe needs a cost: add cost_models or cost_functions",
            )
        untrained = [
            f"{group}.{name}"
            for group in ("models", "cost_models")
            for name, model in getattr(self.rewards, group).items()
            if not model.path
        ]
        if untrained and not self.preference.num_steps:
            yield (
                f"rewards.{untrained[0]}.path",
                "required: a folder, or preference.num_steps > 0 to train one first",
            )
        if self.warm_start.num_steps and self.data.task == "files":
            yield (
                "warm_start.num_steps",
                "needs worked examples; data.task='files' has none, use 'arithmetic' or 'gsm8k'",
            )
        if self.preference.num_steps and self.data.task != "arithmetic":
            yield (
                "preference.num_steps",
                f"needs preference pairs; data.task={self.data.task!r} has none, use 'arithmetic'",
            )

    def warnings(self) -> Iterator[str]:
        """Yields settings that have no effect in this run."""
        algorithm = self.algorithm
        if algorithm.kl_in == "none" and self.reference.path:
            yield "config.reference.path: no effect, algorithm.kl_in is 'none'"
        if not algorithm.needs_critic and self.critic.path:
            yield f"config.critic.path: no effect, advantage={algorithm.advantage!r} has no critic"
        if not algorithm.needs_critic and algorithm.critic_warmup_steps:
            yield "config.algorithm.critic_warmup_steps: no effect without a critic"
        costs = sorted({**self.rewards.cost_functions, **self.rewards.cost_models})
        if costs and not algorithm.safe:
            yield f"config.rewards: costs {costs} have no effect, algorithm.safe is off"
        if algorithm.old_log_probs == "rollout" and algorithm.correction != "none":
            yield "config.algorithm.correction: weights are all 1, old_log_probs is 'rollout'"
