"""What a response is worth."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Literal

from jaxrl_llm.errors import Problem


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
