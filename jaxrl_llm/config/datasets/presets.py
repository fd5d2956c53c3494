"""How columns of published datasets become rows of this package; the known ones as a table."""

import dataclasses
import difflib
import re
import string
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxrl_llm.config.validation import Problems

# The columns of a row that `data.columns` can take from others, with their meaning.
TARGETS: Mapping[str, str] = {
    "prompt": "a text, which is one user message, or messages",
    "system": "the system prompt, a text",
    "answer": "the ground truth for reward functions (`job='rl'`)",
    "completion": "the answer to `prompt` (`job='sft'`)",
    "messages": "a dialogue (`job='sft'`)",
    "chosen": "the better answer or dialogue (`job='dpo'`, `'reward_model'`)",
    "rejected": "the worse one",
    "label": "whether the answer is desirable (`job='dpo'` with a loss on single answers)",
    "data_source": "the name of the row's origin",
    "images": "images of a vision-language model",
    "tools": "JSON schemas of tools for the chat template",
    "chat_template_kwargs": "variables of the chat template",
}
OPTIONAL = "?"  # ends the name of a column that a row may lack, or have as null

Preset = Literal[
    "none", "gsm8k", "math", "math_500", "rlvr", "hh_rlhf", "ultrafeedback", "orca_dpo", "tulu3",
    "sharegpt", "alpaca", "dolly",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RowMapping:
    """Which columns of a dataset are prompt, answer and so on; the fields are those of `data`."""

    # of TARGETS -> the dataset's
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prompt_template: str = ""
    system_prompt: str = ""
    answer_pattern: str = ""
    extra_columns: tuple[str, ...] = ()
    transcript_roles: tuple[str, ...] = ()
    data_source: str = ""

    def with_preset(self, base: "RowMapping") -> "RowMapping":
        """This mapping, completed by a preset; a setting drops what it replaces in the preset."""
        columns = {**base.columns, **self.columns}
        if self.prompt_template:
            columns.pop("prompt", None)
        template = "" if "prompt" in self.columns else base.prompt_template
        pattern = "" if "answer" in self.columns else base.answer_pattern
        return RowMapping(
            columns=columns,
            prompt_template=self.prompt_template or template,
            system_prompt=self.system_prompt or base.system_prompt,
            answer_pattern=self.answer_pattern or pattern,
            extra_columns=self.extra_columns or base.extra_columns,
            transcript_roles=self.transcript_roles or base.transcript_roles,
            data_source=self.data_source or base.data_source,
        )

    def problems(self) -> Problems:
        """Problems of the fields as they are set, without a preset."""
        for target, column in self.columns.items():
            if target not in TARGETS:
                near = difflib.get_close_matches(target, TARGETS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(TARGETS)}"
                yield "columns", f"unknown column {target!r}; {hint}"
            elif not column.removesuffix(OPTIONAL):
                yield f"columns.{target}", "names no column; leave it out"
        if problem := template_problem(self.prompt_template):
            yield "prompt_template", f"{problem}; write {{{{ and }}}} for braces"
        elif self.prompt_template and "prompt" in self.columns:
            yield "prompt_template", "makes the prompt, as columns.prompt does; leave one out"
        yield from self._pattern_problems()
        yield from pair_problems("transcript_roles", self.transcript_roles, "Human:user")

    def _pattern_problems(self) -> Problems:
        try:
            num_groups = re.compile(self.answer_pattern).groups
        except (re.error, RecursionError, OverflowError) as error:
            yield "answer_pattern", f"{self.answer_pattern!r} is no regular expression: {error}"
            return
        if self.answer_pattern and num_groups != 1:
            rule = "needs one group, which is the answer; write other brackets as (?:...)"
            yield "answer_pattern", f"{self.answer_pattern!r} has {num_groups} groups, but {rule}"


def template_fields(template: str) -> list[tuple[str, str]]:
    """(text, the column that follows it, "" at the end) of a prompt template.

    >>> template_fields("{question} Box it: {{}}.")
    [('', 'question'), (' Box it: {', ''), ('}', ''), ('.', '')]

    Raises:
      ValueError: If braces are not closed, or a field is more than a name.
    """
    fields = []
    for text, name, form, conversion in string.Formatter().parse(template):
        if name is not None and (not name or form or conversion):
            raise ValueError(f"a field must be the name of a column, got {name!r}")
        fields.append((text, name or ""))
    return fields


def template_problem(template: str) -> str:
    """The fault of a prompt template; "" if there is none."""
    try:
        fields = template_fields(template)
    except ValueError as error:
        return f"{template!r:.100}: {error}"
    if template and not any(name for _, name in fields):
        return f"{template!r:.100} names no column, so that all prompts are the same"
    return ""


def pair_problems(field: str, pairs: Iterable[str], example: str) -> Problems:
    """Problems of a field whose entries are `name:role`."""
    pairs = tuple(pairs)
    names = [pair.partition(":")[0] for pair in pairs]
    for pair in pairs:
        name, colon, role = pair.partition(":")
        if not (name and colon and role):
            yield field, f"{pair!r} is no alias; write it as {example!r}"
        elif names.count(name) > 1:
            yield field, f"{name!r} has two meanings; give it one"


_STEP_BY_STEP = "Let's think step by step and output the final answer"
# Text in braces up to four levels deep, as in \boxed{\frac{1}{2}}.
_BRACED = r"[^{}]*"
for _ in range(4):
    _BRACED = rf"(?:[^{{}}]|\{{{_BRACED}\}})*"

# Datasets by their layout. The comment is the dataset on the hub that has it.
PRESETS: Mapping[str, RowMapping] = {
    "none": RowMapping(),
    "gsm8k": RowMapping(  # openai/gsm8k
        columns={"answer": "answer", "completion": "answer"},
        prompt_template=f'{{question}} {_STEP_BY_STEP} after "####".',
        answer_pattern=r"#### (-?[0-9.,]+)",
        data_source="openai/gsm8k",
    ),
    "math": RowMapping(  # EleutherAI/hendrycks_math
        columns={"answer": "solution", "completion": "solution"},
        prompt_template=f"{{problem}} {_STEP_BY_STEP} within \\boxed{{{{}}}}.",
        # The last box of the solution, also as "\boxed 3".
        answer_pattern=rf"\\(?:boxed|fbox)(?![a-zA-Z])\s*\{{?((?<=\{{){_BRACED}(?=\}})|(?<!\{{)[^\s{{}}$.,]+)",
        data_source="hendrycks_math",
    ),
    "math_500": RowMapping(  # HuggingFaceH4/MATH-500
        columns={"answer": "answer", "completion": "solution"},
        prompt_template=f"{{problem}} {_STEP_BY_STEP} within \\boxed{{{{}}}}.",
        data_source="math_500",
    ),
    "rlvr": RowMapping(  # allenai/RLVR-GSM-MATH-IF-Mixed-Constraints
        columns={"prompt": "messages", "answer": "ground_truth", "data_source": "dataset"},
    ),
    "hh_rlhf": RowMapping(  # Anthropic/hh-rlhf
        columns={"chosen": "chosen", "rejected": "rejected"},
        transcript_roles=("Human:user", "Assistant:assistant"),
        data_source="hh_rlhf",
    ),
    "ultrafeedback": RowMapping(  # HuggingFaceH4/ultrafeedback_binarized
        columns={
            "prompt": "prompt?",
            "messages": "messages?",
            "chosen": "chosen",
            "rejected": "rejected",
        },
        data_source="ultrafeedback",
    ),
    "orca_dpo": RowMapping(  # Intel/orca_dpo_pairs
        columns={
            "system": "system?",
            "prompt": "question",
            "chosen": "chosen",
            "rejected": "rejected",
        },
        data_source="orca_dpo",
    ),
    "tulu3": RowMapping(  # allenai/tulu-3-sft-mixture
        columns={"messages": "messages", "data_source": "source?"}, data_source="tulu3"
    ),
    "sharegpt": RowMapping(  # anon8231489123/ShareGPT_Vicuna_unfiltered
        columns={"messages": "conversations", "system": "system?"}, data_source="sharegpt"
    ),
    "alpaca": RowMapping(  # tatsu-lab/alpaca
        columns={"completion": "output"},
        prompt_template="{instruction}\n\n{input?}",
        data_source="alpaca",
    ),
    "dolly": RowMapping(  # databricks/databricks-dolly-15k
        columns={"completion": "response"},
        prompt_template="{instruction}\n\n{context?}",
        data_source="dolly",
    ),
}
