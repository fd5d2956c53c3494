"""The algorithm: advantage, policy loss, KL control, corrections."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from jaxrl_llm.config import recipes
from jaxrl_llm.config.validation import (
    Bound,
    Coefficient,
    ConfigGroup,
    Name,
    Problems,
    Range,
    Real,
    Share,
)

# Inputs of built-in advantages besides rewards; `algorithms/requirements.py` checks a user's own.
_MODELS_READ = {"gae": ("values",), "remax": ("baselines",)}


def is_import_path(name: str) -> bool:
    """Whether `name` is a path to a function: `package.module:f` or `file.py:f`."""
    return ":" in name


class PreferenceLossConfig(ConfigGroup):
    """The loss of preference optimization (docs/jobs.md)."""

    loss: Name = "sigmoid"
    # Hyperparameters of the loss, as `AlgorithmConfig.loss_args` are.
    loss_args: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    beta: Annotated[float, Range("(0, 1000]")] = 0.1  # pull to the reference
    # Share of pairs that are taken to be the wrong way round, for losses that smooth.
    label_smoothing: Annotated[float, Range("[0, 0.5)")] = 0.0

    @property
    def reads_labels(self) -> bool:
        """Whether rows are single answers with a label, not pairs."""
        return self.loss in recipes.LABEL_LOSSES

    @property
    def reads_reference(self) -> bool:
        """Whether the loss compares the policy with a reference; a user's own loss may."""
        return self.loss not in recipes.REFERENCE_FREE_LOSSES

    def rules(self) -> Problems:
        known = *recipes.PAIR_LOSSES, *recipes.LABEL_LOSSES
        own = is_import_path(self.loss)
        if self.loss not in known and not own:
            remedy = "; or your own as 'package.module:function' or 'path/file.py:function'"
            yield "loss", f"unknown loss {self.loss!r}; known: {', '.join(known)}{remedy}"
        smooths = own or self.loss in recipes.SMOOTHED_LOSSES
        if self.label_smoothing and not smooths:
            use = ", ".join(map(repr, recipes.SMOOTHED_LOSSES))
            message = f"no effect on loss={self.loss!r}; set it to 0, or use one of {use}"
            yield "label_smoothing", message
        if self.loss == "exo_pair" and not self.label_smoothing:
            message = "0, but loss='exo_pair' divides by it; set it above 0 (the paper: 0.001)"
            yield "label_smoothing", message

    def batch_rules(self, batch_size: int) -> Problems:
        """Yields a batch size, of the trainer, that the loss cannot use."""
        if self.loss == "kto" and batch_size < 2:
            message = f"{batch_size}, but dpo.loss='kto' needs the answers of two prompts; use 2"
            yield "trainer.batch_size", f"{message} or more"


class AlgorithmConfig(ConfigGroup):
    """The choices of an algorithm; `recipe` names a published row of them."""

    recipe: Name = "grpo"
    samples_per_prompt: Annotated[int, Range("[1, 65536]")] = 8
    # Advantage.
    advantage: Name = "grpo"
    gamma: Share = 1.0
    gae_lambda: Share = 1.0
    group_std: bool = True  # divide group advantages by the group's standard deviation
    # Of the advantages "online_dpo", "xpo" and "nash_md".
    dpo_beta: Annotated[float, Range("(0, 1000]")] = 0.1  # pull to the reference
    exploration_coef: Coefficient = 1e-5  # of "xpo": its bonus for leaving the reference
    mixture_coef: Share = 0.5  # of "nash_md": the reference's part in the opponents' policy
    # Policy loss.
    policy_loss: Name = "vanilla"
    # Hyperparameters of the policy loss: parameters of its function, checked against their ranges
    # by `algorithms/requirements.py`. Not hashed: a mapping has no hash.
    loss_args: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    aggregation: Name = "token-mean"
    # The divisor of seq-mean-token-sum-norm, in tokens.
    loss_scale: Annotated[
        float, Range("0 or [1, 1000000000]", "0: rollout.max_response_tokens")
    ] = 0.0
    clip_low: Annotated[float, Range("(0, 1]")] = 0.2
    clip_high: Bound = 0.2
    entropy_coef: Annotated[float, Range("[-1000, 1000]")] = 0.0
    # Share of a step's tokens, those of highest entropy, that the policy loss learns from
    # (arXiv:2506.01939).
    entropy_share: Annotated[float, Range("(0, 1]", "1: off")] = 1.0
    # Cross-entropy of tool results and other observations (ECHO, arXiv:2605.24517).
    observation_coef: Coefficient = 0.0
    # KL control against the reference policy.
    kl_in: Literal["none", "reward", "loss"] = "none"
    kl_estimator: Name = "k3"
    kl_coef: Annotated[float, Range("[0, 1000]")] = 0.001
    kl_unbiased: bool = False  # weigh the KL in the loss by the ratio (arXiv:2512.02556)
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    kl_target: Annotated[float, Range("(0, 1000]")] = 0.1
    kl_horizon: Annotated[int, Range("[1, 2147483647]")] = 10_000  # sequences
    # Critic.
    value_clip: Bound = 0.5
    # First RL steps, which train only the critic.
    critic_warmup_steps: Annotated[int, Range("[0, 2147483647]", "0: never")] = 0
    # Sampling of DAPO (arXiv:2503.14476).
    dynamic_sampling: bool = False  # drop groups with equal scores and sample other prompts
    # The reward term whose values are compared; "": the whole score.
    dynamic_sampling_term: Name = ""
    max_sampling_waves: Annotated[int, Range("[1, 2147483647]")] = 10
    # Leave groups with equal scores out of the losses and their counts; nothing is sampled anew.
    mask_uniform_groups: bool = False
    # The length penalty begins this many tokens before the limit.
    overlong_buffer_tokens: Annotated[int, Range("[0, 2147483647]", "0: off")] = 0
    overlong_penalty: Coefficient = 1.0
    # DAPO's overlong filter: a response that the length limit cut bears no loss. Its score still
    # counts in the baseline of its group.
    mask_truncated: bool = False
    # Correction of the difference between rollout and training log-probs.
    correction: Literal["none", "token", "sequence"] = "none"
    correction_mode: Literal["truncate", "mask"] = "truncate"
    correction_low: Coefficient = 0.0  # "mask": smaller weights become 0
    correction_high: Annotated[float, Range("[0, inf]", "inf: no bound")] = 2.0
    correction_normalize: bool = False
    rejections: tuple[Name, ...] = ()  # e.g. ("token_k1", "seq_mean_k3")
    rejection_lows: tuple[Coefficient, ...] = ()  # k1 only: rejects smaller ratios
    rejection_highs: tuple[Bound, ...] = ()
    # Of the policy when the step begins: by a pass, those of the engine, or without a pass
    # interpolated between the engine's and those of the update by the age of each token.
    old_log_probs: Literal["recompute", "rollout", "interpolate"] = "recompute"
    # Nats per token by which a sequence may have become unlikelier since it was sampled; beyond,
    # one of negative advantage has no policy loss (arXiv:2512.02556).
    off_policy_threshold: Bound = math.inf
    # Safe-RLHF (arXiv:2310.12773).
    safe: bool = False
    cost_limit: Real = 0.0
    multiplier_init: Coefficient = 1.0
    multiplier_lr: Annotated[float, Range("[0, 1000]")] = 0.1
    multiplier_max: Bound = 100.0

    @property
    def corrects(self) -> bool:
        """Whether anything makes up for samples that the trained policy did not draw."""
        return self.correction != "none" or bool(self.rejections)

    def rules(self) -> Problems:
        for field, names, what, own in (
            ("advantage", recipes.ADVANTAGES, "advantage estimator", True),
            ("policy_loss", recipes.POLICY_LOSSES, "policy loss", True),
            ("recipe", recipes.RECIPES, "recipe", False),
            ("aggregation", recipes.AGGREGATIONS, "aggregation", False),
            ("kl_estimator", recipes.KL_ESTIMATORS, "KL estimator", False),
        ):
            found = getattr(self, field)
            if found not in names and not (own and is_import_path(found)):
                message = f"unknown {what} {found!r}; known: {', '.join(names)}"
                remedy = "; or your own as 'package.module:function' or 'path/file.py:function'"
                yield field, message + (remedy if own else "")
        if not is_import_path(self.advantage):
            yield from self.advantage_rules(_MODELS_READ.get(self.advantage, ()))
        if self.advantage in recipes.GROUP_ADVANTAGES and self.samples_per_prompt < 2:
            yield (
                "samples_per_prompt",
                f"advantage={self.advantage!r} compares samples of one prompt and needs at"
                f" least 2, got {self.samples_per_prompt}; set it to 8 or use advantage='gae'",
            )
        if self.advantage == "nash_md" and self.samples_per_prompt == 2 and self.mixture_coef:
            message = (
                "2, but nash_md weighs the other samples of a prompt: of one, no weight matters"
            )
            yield "samples_per_prompt", f"{message}; use 3 or more, or mixture_coef=0"
        if self.kl_controller == "adaptive" and self.kl_in != "reward":
            message = f"the KL that kl_in='reward' measures, got kl_in={self.kl_in!r}"
            yield "kl_controller", f"adaptive control needs {message}"
        for name in ("dynamic_sampling", "mask_uniform_groups"):
            if getattr(self, name) and self.samples_per_prompt < 2:
                yield name, "drops groups of equal reward; needs samples_per_prompt >= 2"
        if self.old_log_probs == "interpolate":
            for name, needs in (
                ("correction_normalize", self.correction_normalize),
                ("rejections", bool(self.rejections)),
                ("entropy_share", self.entropy_share < 1),
                ("kl_in", self.kl_in == "reward"),
            ):
                if needs:
                    message = "reads log-probs or entropies from before the update, which"
                    yield name, f"{message} old_log_probs='interpolate' has none of; 'recompute'"
        if self.correction_low > self.correction_high:
            message = f"got {self.correction_low}, {self.correction_high}"
            yield "correction_low", f"needs correction_low <= correction_high, {message}"
        for name in self.rejections:
            if name not in recipes.REJECTIONS:
                known = ", ".join(recipes.REJECTIONS)
                yield "rejections", f"unknown option {name!r}; known: {known}"
        if len(set(self.rejections)) != len(self.rejections):
            yield "rejections", f"each option at most once, got {self.rejections}"
        for name in ("rejection_lows", "rejection_highs"):
            wanted, given = len(self.rejections), len(getattr(self, name))
            if given != wanted:
                yield name, f"needs one number for each of the {wanted} rejections, got {given}"
        bounds = zip(self.rejections, self.rejection_lows, self.rejection_highs, strict=False)
        for name, low, high in bounds:
            if low > high:
                yield "rejection_highs", f"{name} needs low <= high, got {low}, {high}"

    def advantage_rules(self, reads: Collection[str]) -> Problems:
        """Yields settings that contradict the inputs of the advantage estimator."""
        if self.safe and "values" not in reads:
            yield "safe", "Safe-RLHF estimates reward and cost with critics; set advantage='gae'"
        if self.dynamic_sampling and "baselines" in reads:
            message = f"not defined with advantage={self.advantage!r}: its groups are of one sample"
            yield "dynamic_sampling", message
