"""What a response is worth."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import Folder, Group, Name, Range, Real
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig(Group):
    """One reward function and its share of the score."""

    function: str = ""  # arithmetic, gsm8k, math, format, length; or an import or file path
    weight: Real = 1.0
    data_source: Name = "*"  # rows it applies to; "*": all

    def rules(self) -> Iterator[Problem]:
        if not self.function:
            yield "function", "required: a built-in name or 'path/file.py:function'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Group):
    """One reward (or cost) model on the mesh and its share of the score."""

    path: Folder = ""  # Hugging Face one-label classifier; "": the one trained by `preference`
    weight: Real = 1.0
    data_source: Name = "*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig(Group):
    """What a response is worth: the weighted sum of all terms that apply to its data source."""

    functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    models: Mapping[str, RewardModelConfig] = dataclasses.field(default_factory=dict)
    cost_functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    cost_models: Mapping[str, RewardModelConfig] = dataclasses.field(default_factory=dict)
    num_workers: Annotated[int, Range("[1, 1024]")] = 2  # processes
    timeout_s: Annotated[float, Range("[0.01, 1000000]")] = 10.0  # of one call
    # Address space of a process.
    memory_gib: Annotated[float, Range("[0.5, 1000000] or inf", "inf: no limit")] = 16.0
    environment: tuple[Name, ...] = ()  # variables of the run that the processes may see
    on_failure: Literal["stop", "score"] = "stop"
    failure_score: Annotated[float, Range("[-3.4e38, 3.4e38]")] = 0.0  # what float32 holds

    def rules(self) -> Iterator[Problem]:
        if not self.functions and not self.models:
            yield "functions", "no reward at all; add rewards.functions or rewards.models"
        if shared := set(self.functions) & set(self.models):
            yield "models", f"names used twice: {', '.join(sorted(shared))}"
