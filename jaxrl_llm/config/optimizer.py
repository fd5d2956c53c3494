"""The optimizer of a network: its name, its numbers, its learning rates, and what it goes with."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from jaxrl_llm.config.validation import ConfigGroup, Every, Problems, Range

_FACTORS = Range("[0, 1000]")


class RateFactor(NamedTuple):
    """The learning rate of some parameters, relative to that of the optimizer."""

    pattern: re.Pattern[str]
    factor: float


class OptimizerConfig(ConfigGroup):
    """An optimizer with warm-up, decay and clipping of the global gradient norm."""

    # "muon" orthogonalizes the momentum of the matrices in layers (arXiv:2502.16982); all else has
    # AdamW. "schedule_free" averages instead of decaying the rate (arXiv:2405.15682).
    name: Literal["adamw", "muon", "schedule_free"] = "adamw"
    learning_rate: Annotated[float, Range("[0, 1000]")] = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Every = 0  # optimizer updates, not RL steps
    # Lowest value of the decay, relative to learning_rate.
    min_lr_ratio: Annotated[float, Range("[0, 1]")] = 0.0
    # "PATTERN=FACTOR": parameters in whose path the regular expression is found learn at FACTOR
    # times the rate, for example "embed=0.1", "layers/.*/mlp/=0.5"; the first that matches counts.
    rates: tuple[str, ...] = ()
    weight_decay: Annotated[float, Range("[0, 1000]")] = 0.01
    # "matrices": biases and the scales of norms do not decay.
    weight_decay_on: Literal["all", "matrices"] = "all"
    # 1 - beta must be larger than the rounding error of float32.
    beta1: Annotated[float, Range("[0, 0.999999]")] = 0.9
    beta2: Annotated[float, Range("[0, 0.999999]")] = 0.999
    muon_beta: Annotated[float, Range("[0, 0.999999]")] = 0.95  # of muon's momentum
    # With a smaller eps, a gradient whose square is 0 in float32 could make a step of any size.
    eps: Annotated[float, Range("[1e-18, 1000]")] = 1e-8
    max_grad_norm: Annotated[float, Range("(0, inf]", "inf: off")] = 1.0
    # Of the first moment; "int8" keeps both moments of matrices in 8 bits (arXiv:2110.02861).
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"

    @property
    def rate_factors(self) -> list[RateFactor]:
        """The entries of `rates`, parsed."""
        parts = (text.rpartition("=") for text in self.rates)
        return [RateFactor(re.compile(pattern), float(factor)) for pattern, _, factor in parts]

    def rules(self) -> Problems:
        for i, text in enumerate(self.rates):
            if problem := _rate_problem(text):
                yield f"rates[{i}]", f"{text!r} is not 'PATTERN=FACTOR': {problem}"
        if self.name == "schedule_free" and self.schedule != "constant":
            message = f"{self.schedule!r}, but schedule_free averages instead; use 'constant'"
            yield "schedule", message
        if self.name == "schedule_free" and self.moment_dtype != "float32":
            message = f"{self.moment_dtype!r}, but schedule_free has no first moment; use 'float32'"
            yield "moment_dtype", message

    def network_rules(self, param_dtype: str, lora_rank: int, bias_rate: float) -> Problems:
        """Yields what the network that it trains cannot have; "" is the field of the optimizer."""
        if self.name == "muon" and lora_rank:
            message = f"'muon' is for whole matrices, not the factors of lora.rank={lora_rank}"
            yield "name", f"{message}; use 'adamw'"
        if self.name == "schedule_free" and param_dtype != "float32":
            message = (
                f"'schedule_free' averages weights, which needs more digits than {param_dtype}"
            )
            yield "name", f"{message}; set model.param_dtype='float32'"
        if self.name == "schedule_free" and bias_rate:
            message = (
                f"'schedule_free' averages weights, but router.bias_rate={bias_rate} moves them"
            )
            yield "name", f"{message} otherwise; set one of them aside"


def _rate_problem(text: str) -> str:
    """The problem of an entry of `rates`; "" if there is none."""
    pattern, equals, factor = text.rpartition("=")
    if not equals or not pattern:
        return "use for example 'embed=0.1'"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"the pattern is no regular expression, {error}"
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    return "" if value in _FACTORS else f"the factor must be {_FACTORS}"


def unmatched_rates(config: OptimizerConfig, paths: Sequence[str]) -> list[str]:
    """The entries of `rates` that no parameter follows."""
    return [
        text
        for text, (pattern, _) in zip(config.rates, config.rate_factors, strict=True)
        if not any(pattern.search(path) for path in paths)
    ]
