"""Where prompts come from."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxrl_llm.errors import Problem


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
