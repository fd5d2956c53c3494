"""Scores of responses: reward functions, reward models and costs."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import Folder, Group, Name, Range, Real
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig(Group):
    """One reward function and its weight in the score."""

    function: str = ""  # arithmetic, gsm8k, math, code, format, length; or an import or file path
    weight: Real = 1.0
    data_source: Name = "*"  # rows that it scores; "*": all

    def rules(self) -> Iterator[Problem]:
        if not self.function:
            yield "function", "required: a built-in name or 'path/file.py:function'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Group):
    """One reward (or cost) model on the mesh and its weight in the score."""

    path: Folder = ""  # Hugging Face one-label classifier; "": trained first, see `preference`
    weight: Real = 1.0
    data_source: Name = "*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig(Group):
    """The score of a response: the weighted sum of all terms for its data source."""

    functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    models: Mapping[str, RewardModelConfig] = dataclasses.field(default_factory=dict)
    cost_functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    cost_models: Mapping[str, RewardModelConfig] = dataclasses.field(default_factory=dict)
    num_workers: Annotated[int, Range("[1, 1024]")] = 2  # worker processes
    timeout_s: Annotated[float, Range("[0.01, 1000000]")] = 10.0  # of one call
    # Address space of a worker process.
    memory_gib: Annotated[float, Range("[0.5, 1000000] or inf", "inf: no limit")] = 16.0
    environment: tuple[Name, ...] = ()  # environment variables that the workers may see
    on_failure: Literal["stop", "score"] = "stop"
    failure_score: Annotated[float, Range("[-3.4e38, 3.4e38]")] = 0.0  # the range of float32

    def rules(self) -> Iterator[Problem]:
        if not self.functions and not self.models:
            yield "functions", "no reward at all; add rewards.functions or rewards.models"
        for kind in ("", "cost_"):
            functions, models = getattr(self, f"{kind}functions"), getattr(self, f"{kind}models")
            if shared := set(functions) & set(models):
                yield f"{kind}models", f"names used twice: {', '.join(sorted(shared))}"
