"""What every optimizer of a run is: AdamW, its schedule and its bounds."""

import dataclasses
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import Bound, Every, Group, Range, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Group):
    """AdamW with warm-up, decay and a bound on the global gradient norm."""

    learning_rate: Annotated[float, Range("[0, 1000]")] = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Every = 0  # optimizer updates, not RL steps
    min_lr_ratio: Share = 0.0  # floor of the decay, as a share of learning_rate
    weight_decay: Annotated[float, Range("[0, 1000]")] = 0.01
    # 1 - beta must be more than the rounding of float32.
    beta1: Annotated[float, Range("[0, 0.999999]")] = 0.9
    beta2: Annotated[float, Range("[0, 0.999999]")] = 0.999
    # Below, a gradient whose square is 0 in float32 would take a step of any length.
    eps: Annotated[float, Range("[1e-18, 1000]")] = 1e-8
    max_grad_norm: Bound = 1.0
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
