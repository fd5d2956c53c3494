"""What every optimizer of a run is: AdamW, its schedule and its bounds."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxrl_llm.errors import Problem


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
