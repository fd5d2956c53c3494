"""The source of prompts."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import File, Group, Name, Range, Tokens
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Group):
    """The source of prompts."""

    task: Literal["arithmetic", "gsm8k", "files"] = "arithmetic"
    train_files: tuple[File, ...] = ()  # parquet or jsonl
    eval_files: tuple[File, ...] = ()
    prompt_column: Name = "prompt"
    max_prompt_tokens: Tokens = 256
    filter_long_prompts: bool = True  # drop them; False: a longer prompt is an error
    shuffle: bool = True
    chat_template: bool = True  # False: message contents are joined by newlines
    num_workers: Annotated[int, Range("[0, 1024]")] = 0  # threads that prepare rows ahead
    # The built-in task: sums of digits, with step-by-step solutions.
    arithmetic_terms: Annotated[int, Range("[2, 16]")] = 3
    arithmetic_train_prompts: Annotated[int, Range("[1, 1000000]")] = 512
    arithmetic_eval_prompts: Annotated[int, Range("[1, 1000000]")] = 128
    # Share of worked examples with an error.
    arithmetic_errors: Annotated[float, Range("[0, 1)")] = 0.0

    def rules(self) -> Iterator[Problem]:
        if self.task != "arithmetic" and not self.train_files:
            yield "train_files", f"task={self.task!r} reads files, none given"
        wanted = self.arithmetic_train_prompts + self.arithmetic_eval_prompts
        if self.task == "arithmetic" and 10**self.arithmetic_terms < wanted:
            yield (
                "arithmetic_train_prompts",
                f"{self.arithmetic_train_prompts} and arithmetic_eval_prompts="
                f"{self.arithmetic_eval_prompts} are {wanted} different prompts, but"
                f" arithmetic_terms={self.arithmetic_terms} digits make only"
                f" {10**self.arithmetic_terms} sums; use fewer prompts or more terms",
            )
