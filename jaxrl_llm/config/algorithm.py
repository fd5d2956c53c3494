"""What is learned from the samples: advantage, policy loss, KL control, corrections."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from jaxrl_llm.config.recipes import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    RECIPES,
    REJECTIONS,
)
from jaxrl_llm.errors import Problem

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
