"""The assistant's tokens of a dialogue: as transformers finds them by marks, or by beginnings."""

import json
import pathlib
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.masks import Dialogue, example
from jaxrl_llm.data.tokenizer import character_tokenizer

# Templates of models that are often trained; only tests read them.
FOLDER = pathlib.Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SEEDS = (range(20), pytest.param(range(20, 200), marks=pytest.mark.nightly))
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
NO_TOOLS = ("gemma3", "gemma3_training")  # they refuse them
TEXT_CALLS = ("deepseekv3",)  # writes arguments that are a text
# What the marked twin of a template counts as the answer's, and its prompt for an answer has
# already; and the ends of turns that only that twin writes.
HEADERS = ("<｜tool▁outputs▁end｜>", "<｜Assistant｜>", "<|start|>assistant", "\n")
OTHER_TEXT = ("glm4moe",)  # its twin ends turns with the next header


def tokenizer_of(name: str):
    """Every byte is a token, as in models of bytes; the template is that of a model."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return tokenizer


def dialogue(seed: int, template: str, thinking: bool = True) -> Dialogue:
    """With and without system, tools, thinking; one to three turns; answers in part alike."""
    draw = random.Random(seed)
    messages = []
    tools = template not in NO_TOOLS and draw.random() < 0.5
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": draw.choice(["Be brief.", " Be kind.\n"])})
    for _ in range(draw.randint(1, 3)):
        question = draw.choice(["Hi", "1+1?", "Größe 0", "Two"]) + str(draw.randint(0, 9))
        messages.append({"role": "user", "content": question})
        if tools and draw.random() < 0.6:
            arguments = {"a": draw.randint(0, 9)}
            call = {"name": "add", "arguments": arguments}
            if template in TEXT_CALLS:
                call["arguments"] = json.dumps(arguments)
            calls = [{"type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "name": "add", "content": f"sum {seed}"})
        thought = f"<think>\nhm {draw.randint(0, 9)}\n</think>\n\n"
        answer = draw.choice(["Two", "It is 0", "x", "日本"]) + str(draw.randint(0, 20))
        is_thinking = thinking and draw.random() < 0.4
        messages.append({"role": "assistant", "content": thought * is_thinking + answer})
    return Dialogue(messages, 0, {"tools": [ADD]} if tools else {}, f"row {seed}")


def answers(tokenizer, found):
    """Returns the text of each run of tokens that bear loss."""
    runs, before = [], False
    for token, masked in zip(found.tokens, found.mask, strict=True):
        if masked and not before:
            runs.append([])
        if masked:
            runs[-1].append(token)
        before = masked
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.endswith("_training")])
def test_marks_are_taken_as_transformers_takes_them(name, seeds):
    tokenizer = tokenizer_of(name)
    for seed in seeds:
        given = dialogue(seed, name)
        found = example(tokenizer, given, True)
        wanted = tokenizer.apply_chat_template(
            given.messages, return_dict=True, return_assistant_tokens_mask=True, **given.options
        )
        assert list(found.tokens) == wanted["input_ids"]
        assert list(found.mask) == list(map(bool, wanted["assistant_masks"]))


@pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if not name.endswith("_training")])
def test_without_marks_the_answers_are_found(name, seeds):
    tokenizer = tokenizer_of(name)
    twin = f"{name}_training"
    marked = tokenizer_of(twin) if twin in TEMPLATES else None
    for seed in seeds:
        given = dialogue(seed, name, thinking=name != "qwen3")  # whose twin keeps all of it
        found = example(tokenizer, given, True)
        runs = answers(tokenizer, found)
        spoken = [m["content"] for m in given.messages if m["role"] == "assistant"]
        assert len(runs) == len(spoken)
        for run, content in zip(runs, spoken, strict=True):
            assert content.rpartition("</think>\n\n")[2] in run
            assert not any(m["content"] in run for m in given.messages if m["role"] == "tool")
        if marked is None or (name in TEXT_CALLS and given.options):
            continue
        for run, other in zip(runs, answers(marked, example(marked, given, True)), strict=True):
            if name == "qwen3":  # of earlier turns its twin writes the empty thinking, too
                other = other.removeprefix("<think>\n\n</think>\n\n")
                run = run.removeprefix("<think>\n\n</think>\n\n")
            for header in HEADERS:
                other = other if run.startswith(header) else other.removeprefix(header)
            if name in OTHER_TEXT:
                other = other.removesuffix("<|user|>").removesuffix("<|observation|>")
            assert run == other


MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def tokenizer():
    return character_tokenizer()


@pytest.mark.parametrize("template", [MARKED, None])
@pytest.mark.parametrize(("first", "wanted"), [(0, ["2<eos>", "4<eos>"]), (2, ["4<eos>"])])
def test_answers_in_the_prompt_bear_no_loss(tokenizer, template, first, wanted):
    tokenizer.chat_template = template or tokenizer.chat_template
    found = example(tokenizer, Dialogue(TALK, first, {}, "row 1"), True)
    assert answers(tokenizer, found) == wanted


def test_prompt_and_answer_of_plain_text_are_one_text(tokenizer):
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    for answer in ("c", "c<eos>"):
        given = Dialogue(messages, 1, {}, "row 1", ("ab", answer))
        found = example(tokenizer, given, False)
        assert found.tokens == tuple(tokenizer.encode("abc<eos>"))
        assert found.mask == (False, False, True, True)


@pytest.mark.parametrize(
    ("template", "messages", "text", "chat_template", "message"),
    [
        (None, TALK[:1], None, True, "row 7: no token of the assistant, so nothing to learn"),
        (None, TALK[1:], None, True, "row 7: .* begins with the assistant; set model.chat_templ"),
        (None, TALK, None, False, "row 7: lists of messages need a chat template"),
        (None, TALK[:2], ("1", " "), False, "row 7: the answer is empty"),
        ("{{ raise_exception('no') }}", TALK, None, True, "row 7: the chat template refuses .* no"),
        ("{{ messages | length }}", TALK, None, True, "row 7: .* cannot be found, message 1 of 4"),
        ("", TALK, None, True, "row 7: the tokenizer has no chat template"),
    ],
)
def test_what_cannot_be_masked_is_named(
    tokenizer, template, messages, text, chat_template, message
):
    tokenizer.chat_template = tokenizer.chat_template if template is None else template
    with pytest.raises(DataError, match=message):
        example(tokenizer, Dialogue(messages, 0, {}, "row 7", text), chat_template)
