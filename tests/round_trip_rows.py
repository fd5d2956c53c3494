"""Generated rows of every layout and form, for tests/data/test_round_trip.py.

A row is a dialogue of some *forms* (a role, a form of content, calls, nulls), written in a
*layout* (the columns of a job) into a file of a *format*. `docs/data.md` says what becomes of each
form under each template. To add a form: a method `_form_NAME` of `Dialogues` that changes a
dialogue, and a row of the table there.
"""

import copy
import dataclasses
import itertools
import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pyarrow
import tokenizers
from pyarrow import parquet
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Templates of models that are often trained; only tests read them.
FOLDER = pathlib.Path(__file__).parents[2] / "shared" / "data" / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "data.md"
# The column of the table of forms for each template, whose variant for training has the same.
COLUMNS = {
    "qwen2_5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_instruct_2507": "Qwen3-2507",
    "llama3": "Llama 3",
    "llama3_1": "Llama 3.1, 3.2",
    "llama3_2": "Llama 3.1, 3.2",
    "gemma3": "Gemma 3",
    "gptoss": "gpt-oss",
    "deepseekv3": "DeepSeek-V3",
    "glm4moe": "GLM-4.5",
}
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "Größe", "日本", "a\u2028b", '"q"')


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the template of a model."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text("utf-8")
    return tokenizer


def trained_texts(tokenizer: PreTrainedTokenizerFast, example: Any) -> list[str]:
    """The text of each run of tokens that bear loss."""
    pairs = zip(example.tokens, example.mask, strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [
        str(tokenizer.decode([token for token, _ in run])) for bears_loss, run in runs if bears_loss
    ]


def table(first_cell: str, page: str = "") -> list[dict[str, str]]:
    """The rows of the page's table whose first column has this heading, by heading."""
    lines = (page or PAGE.read_text("utf-8")).split("\n")
    cells = lambda line: [cell.strip() for cell in line.strip().strip("|").split("|")]  # noqa: E731
    (start,) = [i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |")]
    headings, rows = cells(lines[start]), []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append(dict(zip(headings, cells(line), strict=True)))
    return rows


def verdicts() -> dict[str, dict[str, str]]:
    """What becomes of each form, by the template's name: "shown", "last turn" or "refused"."""
    found = {}
    for row in table("form under a template"):
        name = row["form under a template"].strip("`")
        found[name] = {template: row[column] for template, column in COLUMNS.items()}
    for row in table("form"):
        verdict = row["becomes"].split(":")[0]
        found[row["form"].strip("`")] = dict.fromkeys(COLUMNS, verdict)
    return found


def family(template: str) -> str:
    return template.removesuffix("_training")


@dataclasses.dataclass
class Generated:
    """A row, and what it is made of."""

    template: str
    layout: str
    job: str  # rl, sft or dpo
    suffix: str
    forms: list[str]
    columns: dict[str, Any]
    messages: list[dict[str, Any]]  # as they are meant; of a pair, those of `chosen`
    first: int  # from which number the assistant's bear loss
    aliases: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    rejected: str = ""

    def __str__(self) -> str:
        where = f"{self.template}, {self.layout}, {self.job}, {self.suffix}"
        return f"{where}, {self.forms}: {json.dumps(self.columns, ensure_ascii=False)[:2000]}"


class Dialogues:
    """Makes rows from a seed."""

    def __init__(self, seed: int | str):
        self._draw = random.Random(f"round trip {seed}")
        self._count = 0

    def _text(self) -> str:
        """A text that no other one contains."""
        self._count += 1
        return f"t{self._count}x {self._draw.choice(WORDS)} {self._draw.randint(0, 999)}."

    def row(self, template: str = "", forms: list[str] | None = None, job: str = "") -> Generated:
        """A row of some forms; of those that are given, if they are."""
        draw = self._draw
        template = template or draw.choice(TEMPLATES)
        job = job or draw.choice(["rl", "sft", "dpo"])
        messages = []
        for _ in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": self._text()})
            messages.append({"role": "assistant", "content": self._text()})
        made = Generated(
            template, "", job, draw.choice([".jsonl", ".parquet"]), [], {}, messages, 0
        )
        if forms is None:
            every = [*FORMS]
            forms = draw.sample(every, draw.choice([0, 1, 1, 2, 3]))
        for name in sorted(forms, key=[*FORMS].index):
            if FORMS[name](self, made):
                made.forms.append(name)
        if job == "rl":
            made.messages = made.messages[: self._end_of_prompt(made.messages)]
        made.first = 0
        self._write(made)
        return made

    def _end_of_prompt(self, messages: list[dict[str, Any]]) -> int:
        """After the last message that the policy would answer."""
        return max(i for i, message in enumerate(messages) if message["role"] != "assistant") + 1

    # Forms. Each returns whether it fits the dialogue.

    def _last(self, made: Generated) -> dict[str, Any]:
        return made.messages[-1]

    def _any(self, made: Generated, role: str = "") -> dict[str, Any]:
        """Any message whose content is a text; of a prompt, not the answer."""
        messages = made.messages[:-1] if made.job == "rl" else made.messages
        fitting = [
            message
            for message in messages
            if isinstance(message.get("content"), str)
            and message["content"]
            and role in ("", message["role"])
            and message["role"] in ("user", "system", "assistant")
        ]
        return self._draw.choice(fitting) if fitting else {}

    def _form_system_first(self, made: Generated) -> bool:
        made.messages.insert(0, {"role": "system", "content": self._text()})
        return True

    def _form_system_later(self, made: Generated) -> bool:
        if len(made.messages) < 4 or "calls" in " ".join(made.forms):
            return False
        later = [i for i, m in enumerate(made.messages) if i > 1 and m["role"] == "user"]
        made.messages.insert(self._draw.choice(later), {"role": "system", "content": self._text()})
        return True

    def _form_developer(self, made: Generated) -> bool:
        if made.messages[0]["role"] == "system":
            return False
        made.messages.insert(0, {"role": "developer", "content": self._text()})
        return True

    def _form_foreign_role(self, made: Generated) -> bool:
        message = self._any(made, "user")
        if not message:
            return False
        message["role"] = self._draw.choice(["human", "customer"])
        return True

    def _form_role_alias(self, made: Generated) -> bool:
        if "foreign_role" in made.forms:
            return False
        made.aliases = ("human:user", "bot:assistant")
        return True  # written when the row is

    def _form_text_parts(self, made: Generated) -> bool:
        for message in made.messages:
            if self._draw.random() < 0.5 and isinstance(message["content"], str):
                text = message["content"]
                cut = self._draw.choice([len(text), text.index(" ") + 1])
                texts = [each for each in (text[:cut], text[cut:]) if each]
                message["content"] = [{"type": "text", "text": each} for each in texts]
        return any(isinstance(message["content"], list) for message in made.messages)

    def _calling(self, made: Generated, count: int, content: Any) -> int:
        """Puts a calling turn and its results before the last answer; returns its place."""
        number = len(made.messages) - 1
        calls, results = [], []
        for _ in range(count):
            function = {"name": "add", "arguments": {"a": self._text(), "n": 3}}
            calls.append({"type": "function", "id": f"{len(calls):09d}", "function": function})
            result = {"role": "tool", "name": "add", "tool_call_id": calls[-1]["id"]}
            results.append({**result, "content": self._text()})
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        made.messages[number:number] = [turn, *results]
        return number

    def _form_one_call(self, made: Generated) -> bool:
        self._calling(made, 1, "")
        return True

    def _form_several_calls(self, made: Generated) -> bool:
        if "one_call" in made.forms:
            return False
        self._calling(made, 2, "")
        return True

    def _form_text_beside_call(self, made: Generated) -> bool:
        if {"one_call", "several_calls"} & {*made.forms}:
            return False
        number = self._calling(made, 1, self._text())
        if made.job != "rl":  # bears loss: its turn is the last one
            made.messages = made.messages[: number + 1]
        return True

    def _calls(self, made: Generated) -> list[dict[str, Any]]:
        calls = [call for m in made.messages for call in m.get("tool_calls") or ()]
        if not calls:
            self._calling(made, 1, "")
            made.forms.append("one_call")
            return self._calls(made)
        return calls

    def _form_arguments_in_text(self, made: Generated) -> bool:
        for call in self._calls(made):
            function = call["function"]
            spaces = self._draw.choice([None, (",", ":")])
            written = json.dumps(function["arguments"], ensure_ascii=False, separators=spaces)
            function["arguments"] = written
        return True

    def _form_null_argument(self, made: Generated) -> bool:
        functions = [call["function"] for call in self._calls(made)]
        if any(isinstance(function["arguments"], str) for function in functions):
            return False
        for function in functions:
            function["arguments"]["nothing"] = None
        made.suffix = ".jsonl"  # parquet cannot tell a null from a key that other rows have
        return True

    def _form_null_content(self, made: Generated) -> bool:
        self._calls(made)
        turns = [m for m in made.messages if m.get("tool_calls") and not m["content"]]
        for turn in turns:
            turn["content"] = None
        return bool(turns)

    def _form_null_keys(self, made: Generated) -> bool:
        for message in made.messages:
            message |= {"refusal": None, "audio": None}
            message.setdefault("name", None)
            message.setdefault("tool_calls", None)
        return True

    def _form_no_object(self, made: Generated) -> bool:
        self._calls(made)[0]["function"]["arguments"] = self._draw.choice(["{a: 1", "[1]", "3"])
        return True

    def _form_tools(self, made: Generated) -> bool:
        made.tools = ("add",)
        properties = {"a": {"type": "string", "default": None}, "n": {"type": "integer"}}
        function = {"name": "add", "description": "Adds.", "parameters": {}}
        function["parameters"] = {"type": "object", "properties": properties}
        tools = [{"type": "function", "function": function}]
        made.columns["tools"] = self._draw.choice([tools, json.dumps(tools)])
        return True

    def _form_thinking_in_content(self, made: Generated) -> bool:
        last = self._last(made)
        if made.job == "rl" or not isinstance(last["content"], str) or not last["content"]:
            return False
        if made.messages[-2]["role"] == "tool":  # some show it after a tool's result only
            return False
        last["content"] = f"<think>\n{self._text()}\n</think>\n\n{last['content']}"
        return True

    def _form_thinking_in_prompt(self, made: Generated) -> bool:
        if made.job != "rl" or len(made.messages) < 4:
            return False
        answers = [m for m in made.messages[:-1] if m["role"] == "assistant"]
        answers = [m for m in answers if isinstance(m["content"], str) and m["content"]]
        answers = [m for m in answers if not m.get("tool_calls")]
        if not answers:
            return False
        message = self._draw.choice(answers)
        message["content"] = f"<think>\nhm\n</think>\n\n{message['content']}"
        return True

    def _form_untrained(self, made: Generated) -> bool:
        answers = [m for m in made.messages if m["role"] == "assistant"]
        if made.job != "sft" or len(answers) < 2:
            return False
        self._draw.choice(answers[:-1]).update(self._draw.choice([{"weight": 0}, {"train": False}]))
        return True

    def _form_weight_between(self, made: Generated) -> bool:
        if made.job != "sft":
            return False
        self._last(made)["weight"] = 0.5
        return True

    def _form_other_part(self, made: Generated) -> bool:
        message = self._any(made)
        if not message:
            return False
        message["content"] = [{"type": "audio", "text": message["content"]}]
        return True

    # Layouts.

    def _write(self, made: Generated) -> None:
        """Writes the dialogue in a layout that can hold it."""
        draw = self._draw
        # Calls of other rows make keys of parquet; a mapping with other keys would be cut.
        written = copy.deepcopy(made.messages)
        if made.aliases:
            names = {"user": "human", "assistant": "bot"}
            for message in written:
                message["role"] = names.get(message["role"], message["role"])
        layouts = {
            "rl": ["prompt", "prompt in JSON text", "prompt of ShareGPT"],
            "sft": ["messages", "messages in JSON text", "prompt, completion", "conversations"],
            "dpo": ["prompt, chosen, rejected", "chosen, rejected"],
        }[made.job]
        if made.job == "rl" and [message["role"] for message in written] == ["user"]:
            layouts.append("prompt in text")
        made.layout = draw.choice(layouts)
        if made.layout in ("prompt of ShareGPT", "conversations"):
            plain = all(
                {*m} <= {"role", "content"} and m["role"] in ("user", "assistant", "system")
                for m in written
            )
            made.layout = made.layout if plain else layouts[0]
        getattr(self, f"_layout_{made.job}")(made, written)

    def _layout_rl(self, made: Generated, written: list[dict[str, Any]]) -> None:
        made.first = len(written)
        prompt: Any = written
        if made.layout == "prompt in text" and isinstance(written[0]["content"], str):
            prompt = written[0]["content"]
        elif made.layout == "prompt in JSON text":
            prompt = json.dumps(written, ensure_ascii=self._draw.random() < 0.5)
        elif made.layout == "prompt of ShareGPT":
            prompt = _sharegpt(written)
        made.columns |= {"data_source": "generated", "prompt": prompt}
        made.columns |= {"extra_info": {"level": 1}, "reward_model": {"ground_truth": {"a": 1}}}

    def _layout_sft(self, made: Generated, written: list[dict[str, Any]]) -> None:
        if made.layout == "messages":
            made.columns["messages"] = written
        elif made.layout == "messages in JSON text":
            made.columns["messages"] = json.dumps(written)
        elif made.layout == "conversations":
            made.columns["conversations"] = _sharegpt(written)
        else:
            made.first = len(written) - 1
            made.columns |= {"prompt": written[:-1], "completion": written[-1:]}
            plain = isinstance(written[-1]["content"], str) and not made.aliases
            if plain and {*written[-1]} == {"role", "content"} and self._draw.random() < 0.5:
                made.columns["completion"] = written[-1]["content"]

    def _layout_dpo(self, made: Generated, written: list[dict[str, Any]]) -> None:
        made.first = len(written) - 1
        made.rejected = self._text()
        role = written[-1]["role"]
        rejected = [{"role": role, "content": made.rejected}]
        prompt, chosen = written[:-1], written[-1:]
        if made.layout == "chosen, rejected":
            made.columns |= {"chosen": written, "rejected": [*prompt, *rejected]}
        else:
            made.columns |= {"prompt": prompt, "chosen": chosen, "rejected": rejected}


FORMS: dict[str, Callable[[Dialogues, Generated], bool]] = {
    name.removeprefix("_form_"): function
    for name, function in vars(Dialogues).items()
    if name.startswith("_form_")
}


def _sharegpt(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt", "human": "human", "bot": "gpt"}
    return [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in messages]


def write(made: Generated, path: pathlib.Path) -> bool:
    """Writes the row into a file; False if the format cannot hold it.

    Of parquet, a second row has other keys, so that both rows have nulls of each other.
    """
    if made.suffix == ".jsonl":
        path.write_text(json.dumps(made.columns, ensure_ascii=False) + "\n", "utf-8")
        return True
    other = copy.deepcopy(made.columns)
    if "extra_info" in other:
        other["extra_info"] = {"other": 2}
        other["reward_model"] = {"ground_truth": {"b": 1}}
    try:
        table = pyarrow.Table.from_pylist([made.columns, other])
    except (pyarrow.ArrowException, TypeError):
        return False  # a list of texts and of parts, for example
    parquet.write_table(table, path)
    return True
