"""The assistant's tokens of a dialogue: as transformers finds them by marks, or by beginnings."""

import pytest
from chat_dialogues import TEMPLATES, TEXT_CALLS, answers, dialogue, tokenizer_of

from jaxrl_llm.data.chat.loss_masks import Dialogue, dialogue_example
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer

SEEDS = (range(20), pytest.param(range(20, 200), marks=pytest.mark.nightly))
# What the marked twin of a template counts as the answer's, and its prompt for an answer has
# already; and the ends of turns that only that twin writes.
HEADERS = ("<｜tool▁outputs▁end｜>", "<｜Assistant｜>", "<|start|>assistant", "\n")
NO_END = ("glm4moe",)  # its twin ends the last turn as if a user followed, we with the end token


@pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.endswith("_training")])
def test_marks_are_taken_as_transformers_takes_them(name, seeds):
    tokenizer = tokenizer_of(name)
    for seed in seeds:
        given = dialogue(seed, name)
        found = dialogue_example(tokenizer, given, True)
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
        found = dialogue_example(tokenizer, given, True)
        runs = answers(tokenizer, found)
        spoken = [m["content"] for m in given.messages if m["role"] == "assistant"]
        assert len(runs) == len(spoken)
        for run, content in zip(runs, spoken, strict=True):
            assert content.rpartition("</think>\n\n")[2] in run
            assert not any(m["content"] in run for m in given.messages if m["role"] == "tool")
        if marked is None or (name in TEXT_CALLS and given.options):
            continue
        others = answers(marked, dialogue_example(marked, given, True))
        if name in NO_END:
            assert runs[-1].endswith("<eos>") and others[-1].endswith("<|user|>")
            runs[-1], others[-1] = runs[-1][: -len("<eos>")], others[-1][: -len("<|user|>")]
        for run, other in zip(runs, others, strict=True):
            if name == "qwen3":  # of earlier turns its twin writes the empty thinking, too
                other = other.removeprefix("<think>\n\n</think>\n\n")
                run = run.removeprefix("<think>\n\n</think>\n\n")
            for header in HEADERS:
                other = other if run.startswith(header) else other.removeprefix(header)
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
    found = dialogue_example(tokenizer, Dialogue(TALK, first, {}, "row 1"), True)
    assert answers(tokenizer, found) == wanted


@pytest.mark.parametrize("template", [MARKED, None])
@pytest.mark.parametrize(("untrained", "wanted"), [(1, ["4<eos>"]), (3, ["2<eos>"])])
def test_answers_that_are_not_to_be_trained_bear_no_loss(tokenizer, template, untrained, wanted):
    tokenizer.chat_template = template or tokenizer.chat_template
    talk = [dict(message) for message in TALK]
    talk[untrained]["train"] = False
    found = dialogue_example(tokenizer, Dialogue(talk, 0, {}, "row 1"), True)
    assert answers(tokenizer, found) == wanted
    assert found.tokens == dialogue_example(tokenizer, Dialogue(TALK, 0, {}, "row 1"), True).tokens
    talk[1]["train"] = talk[3]["train"] = False
    with pytest.raises(DataError, match="row 1: no assistant tokens, so nothing to learn"):
        dialogue_example(tokenizer, Dialogue(talk, 0, {}, "row 1"), True)


def test_prompt_and_answer_of_plain_text_are_one_text(tokenizer):
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    for answer in ("c", "c<eos>"):
        given = Dialogue(messages, 1, {}, "row 1", ("ab", answer))
        found = dialogue_example(tokenizer, given, False)
        assert found.tokens == tuple(tokenizer.encode("abc<eos>"))
        assert found.mask == (False, False, True, True)


@pytest.mark.parametrize(
    ("template", "messages", "text", "chat_template", "message"),
    [
        (None, TALK[:1], None, True, "row 7: no assistant tokens, so nothing to learn"),
        (None, TALK[1:], None, True, "row 7: .* begins with the assistant; set model.chat_templ"),
        (None, TALK, None, False, "row 7: lists of messages need a chat template"),
        (None, TALK[:2], ("1", " "), False, "row 7: the answer is empty"),
        ("{{ raise_exception('no') }}", TALK, None, True, "row 7: the chat template refuses .* no"),
        ("{{ messages | length }}", TALK, None, True, "row 7: .* cannot be found, message 1 of 4"),
        ("", TALK, None, True, "row 7: the tokenizer has no chat template"),
    ],
)
def test_unmaskable_dialogues_are_named(
    tokenizer, template, messages, text, chat_template, message
):
    tokenizer.chat_template = tokenizer.chat_template if template is None else template
    with pytest.raises(DataError, match=message):
        dialogue_example(tokenizer, Dialogue(messages, 0, {}, "row 7", text), chat_template)
