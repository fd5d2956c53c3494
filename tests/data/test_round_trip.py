"""Rows of every layout and form under every template: each is shown whole, or refused by name.

What becomes of a form is read from the tables of `docs/data.md`.
"""

import json
import re

import pytest
import round_trip_rows
from round_trip_rows import (
    FORMS,
    TEMPLATES,
    Dialogues,
    family,
    tokenizer_of,
    trained_texts,
    verdicts,
)

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import load_dataset, preference_pairs, worked_examples
from jaxrl_llm.data.errors import DataError

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")

# What templates write in a turn of the assistant, beside tags.
OWN_WORDS = {"final", "analysis", "assistant", "commentary", "model"}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: tokenizer_of(name) for name in TEMPLATES}


def texts_of(content):
    """The texts of a content, without the thinking that a template may leave out."""
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [content.rpartition("</think>")[2]] if content else []


def is_in(text, rendering):
    """Whether a text is in a rendering, as it is or within JSON."""
    text = text.strip()
    return text in rendering or json.dumps(text, ensure_ascii=False)[1:-1] in rendering


def check_shown(made, rendering, verdict_of):
    for number, message in enumerate(made.messages):
        is_earlier = number < len(made.messages) - 1 and bool(message.get("tool_calls"))
        if is_earlier and any(verdict_of[form] == "last turn" for form in made.forms):
            continue
        for text in texts_of(message["content"]):
            assert is_in(text, rendering), (text, rendering)
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            assert is_in(arguments["a"], rendering) and "add" in rendering, rendering
            assert ("nothing" in arguments) == ("nothing" in rendering)
            assert '\\"a\\"' not in rendering, rendering  # quoted twice
    assert all(tool in rendering for tool in made.tools)
    # As Python prints lists, and values that are no JSON.
    assert not re.search(r"\[\{'|'type': 'text'|\bNone\b", rendering), rendering


def in_turn_order(made, runs):
    """The trained texts in the order of their turns; each turn has a text of its own."""

    def number(run):
        texts = {i: texts_of(message["content"]) for i, message in enumerate(made.messages)}
        for i, message in enumerate(made.messages):
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                texts[i] = [*texts[i], arguments["a"]]
        return min((i for i in texts if any(is_in(text, run) for text in texts[i])), default=-1)

    return sorted(runs, key=number)


def check_mask(made, runs, last=""):
    """Compares what bears loss with the turns of the assistant."""
    messages = made.messages
    trained = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
        and number >= made.first
        and message.get("weight") != 0
        and message.get("train") is not False
    ]
    assert len(runs) == len(trained), (runs, trained)
    for run, number in zip(runs, trained, strict=True):
        texts = texts_of(messages[number]["content"])
        if last and number == len(messages) - 1:
            texts = [last]
        rest = run
        for text in texts:
            assert is_in(text, run), (text, run)
            rest = rest.replace(text.strip(), "", 1)
        others = [m for i, m in enumerate(messages) if i != number]
        for other in others:
            assert not any(is_in(text, run) for text in texts_of(other["content"])), (other, run)
        calls = () if last and number == len(messages) - 1 else messages[number].get("tool_calls")
        for call in calls or ():
            assert call["function"]["name"] in run, (call, run)
        if not calls and "</think>" not in run.replace("<think></think>", ""):
            rest = re.sub(r"<[^<>]*>", " ", rest)
            assert {*re.findall(r"\w+", rest)} <= OWN_WORDS, (rest, run)


def check_row(made, path, tokenizer, verdict_of):
    """Reads the row as its job does, and compares what becomes of it with the tables."""
    aliases = {"role_aliases": made.aliases}
    config = DataConfig(
        task="files", train_files=(str(path),), max_prompt_tokens=100_000, **aliases
    )
    wanted = "refused" if any(verdict_of[f] == "refused" for f in made.forms) else "shown"
    try:
        if made.job == "rl":
            rows = load_dataset(config, tokenizer, "train", 0).prompts
        elif made.job == "sft":
            rows = worked_examples(config, tokenizer, "train", 0)
        else:
            rows = preference_pairs(config, tokenizer, "train", 0)
    except DataError as error:
        assert wanted == "refused", f"refused: {error}"
        assert f"{path}, row 1" in str(error), error
        assert len(str(error)) < 1500, error
        return "refused"
    assert wanted == "shown", "shown"
    row = rows[0]
    if made.job == "rl":
        check_shown(made, row.text, verdict_of)
        others = {name: value for name, value in row.extra_info.items() if name != "tools"}
        assert others == {"level": 1} and row.ground_truth == {"a": 1}
    elif made.job == "sft":
        # A turn that a longer rendering rewrites has a sequence of its own. A parquet file has a
        # second row with the same messages.
        rows = rows[: len(rows) // 2] if made.suffix == ".parquet" else rows
        check_shown(made, "".join(tokenizer.decode(each.tokens) for each in rows), verdict_of)
        check_mask(
            made, in_turn_order(made, [r for e in rows for r in trained_texts(tokenizer, e)])
        )
    else:
        check_shown(made, tokenizer.decode(row.chosen.tokens), verdict_of)
        check_mask(made, trained_texts(tokenizer, row.chosen))
        check_mask(made, trained_texts(tokenizer, row.rejected), made.rejected)
    return "shown"


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_rows_are_shown_whole_or_refused(count, tokenizers, tmp_path):
    becomes, seen = verdicts(), []
    for number in range(count):
        made = Dialogues(f"{count} {number}").row()
        path = tmp_path / f"{number}{made.suffix}"
        if not round_trip_rows.write(made, path):
            continue
        name = family(made.template)
        verdict_of = {form: becomes[form][name] for form in made.forms}
        try:
            verdict = check_row(made, path, tokenizers[made.template], verdict_of)
        except AssertionError as error:
            raise AssertionError(f"row {number}: {made}\n{verdict_of}\n{error}") from error
        seen.append((made.layout, made.template, verdict, *made.forms))
    assert len(seen) > 0.9 * count
    assert {row[2] for row in seen} == {"shown", "refused"}
    if count > 1000:
        assert {row[1] for row in seen} == {*TEMPLATES}
        assert {form for row in seen for form in row[3:]} == {*FORMS} == {*becomes}
