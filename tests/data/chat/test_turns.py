"""Every turn is trained in the context in which it is sampled, with what ends it."""

import random

import pytest
from chat_dialogues import ADD, TEMPLATES, answers, dialogue, tokenizer_of

from jaxrl_llm.data.chat import loss_masks
from jaxrl_llm.data.chat.loss_masks import Dialogue
from jaxrl_llm.data.chat.turns import dialogue_sequences
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer, render_chat

needs_templates = pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
SEEDS = (range(12), pytest.param(range(12, 150), marks=pytest.mark.nightly))


def turn(thinking, answer):
    return {"role": "assistant", "content": f"<think>\n{thinking}\n</think>\n\n{answer}"}


def user(text):
    return {"role": "user", "content": text}


def trained_text(tokenizer, example):
    """The text of a sequence up to each run of tokens with loss, and that run."""
    pairs, begin = [], 0
    mask = example.mask
    for i, bears in enumerate(mask):
        if bears and not (i and mask[i - 1]):
            begin = i
        if bears and not (i + 1 < len(mask) and mask[i + 1]):
            run = example.tokens[begin : i + 1]
            pairs.append((tokenizer.decode(example.tokens[:begin]), tokenizer.decode(run)))
    return pairs


def sequences(tokenizer, messages, options=None, first=0, **kwargs):
    given = Dialogue(messages, first, options or {}, "row 1")
    return dialogue_sequences(tokenizer, given, True, **kwargs)


@needs_templates
def test_every_turn_of_qwen3_is_trained_with_its_thinking_in_its_context():
    """Context ids and trained ids are the rendered prompt, then thinking, answer, end of turn."""
    tokenizer = tokenizer_of("qwen3")
    messages = [{"role": "system", "content": "Be brief."}]
    for number in range(3):
        messages += [user(f"Question {number}"), turn(f"thought {number}", f"answer {number}")]
    found = sequences(tokenizer, messages)
    assert found.num_rewritten == 2 and len(found.sequences) == 3
    for number, (example, size, turns) in enumerate(found.sequences):
        k = 2 + 2 * number
        assert (size, turns) == (k + 1, (k,))
        prompt = render_chat(tokenizer, messages[:k], add_generation_prompt=True, tokenize=False)
        said = f"<think>\nthought {number}\n</think>\n\nanswer {number}<|im_end|>\n"
        assert example.tokens == tuple(tokenizer.encode(prompt + said, add_special_tokens=False))
        (masked,) = answers(tokenizer, example)
        assert masked == said
        assert "thought" not in prompt  # it is dropped where the policy goes on


@needs_templates
def test_turns_that_are_not_rewritten_share_a_sequence():
    tokenizer = tokenizer_of("qwen3")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        user("1"),
        {**turn("I call", ""), "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
        turn("I know", "two"),
        user("2"),
        {"role": "assistant", "content": "no thought"},
        user("3"),
        turn("last", "three"),
    ]
    found = sequences(tokenizer, messages, {"tools": [ADD]})
    runs = [answers(tokenizer, example) for example, *_ in found.sequences]
    # Thinking stays as long as no user speaks; a turn without thinking loses nothing.
    assert [[run.split("\n")[1:2] for run in each] for each in runs] == [
        [["I call"], ["I know"]],
        [[""], ["last"]],
    ]
    assert runs[1][0] == "no thought<|im_end|>\n"
    assert [sequence.turns for sequence in found.sequences] == [(1, 3), (5, 7)]
    assert [size for _, size, _ in found.sequences] == [4, 8] and found.num_rewritten == 2
    plain = [message | {"content": "x"} for message in messages[4:]]
    assert len(sequences(tokenizer, plain).sequences) == 1
    # With thinking switched off a turn is sampled after an empty thought, which is dropped later.
    off = sequences(tokenizer, plain, {"enable_thinking": False})
    assert [answers(tokenizer, example) for example, *_ in off.sequences] == [["x<|im_end|>\n"]] * 2
    assert all("<think>" in tokenizer.decode(example.tokens) for example, *_ in off.sequences)


@needs_templates
def test_the_whole_dialogue_is_one_sequence_that_counts_what_it_loses():
    tokenizer = tokenizer_of("qwen3")
    messages = [user("1"), turn("a", "b"), user("2"), turn("c", "d")]
    found = sequences(tokenizer, messages, rewritten_turns="whole")
    ((example, size, _),) = found.sequences
    assert (size, found.num_rewritten) == (4, 1)
    assert example == loss_masks.dialogue_example(tokenizer, Dialogue(messages, 0, {}, ""), True)
    assert answers(tokenizer, example)[0] == "b<|im_end|>\n"


NO_CALLS = ("llama3", "llama3_training")  # they do not write them


@needs_templates
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_contexts_are_those_of_sampling_under_every_template(name, seeds):
    """Each turn once, after what the messages before it render to, with its own text and an end."""
    tokenizer = tokenizer_of(name)
    for seed in seeds:
        given = dialogue(seed, name)
        found = dialogue_sequences(tokenizer, given, True)
        pairs = {}
        for example, _, turns in found.sequences:
            runs = trained_text(tokenizer, example)
            pairs |= dict(zip(turns, runs, strict=True))
        turns = [i for i, m in enumerate(given.messages) if m["role"] == "assistant"]
        assert sorted(pairs) == turns
        for number, (context, run) in pairs.items():
            message = given.messages[number]
            prompt = render_chat(
                tokenizer,
                given.messages[:number],
                given.options,
                add_generation_prompt=True,
                tokenize=False,
            )
            if name.startswith("deepseekv3"):  # opens a thought that no answer then has
                prompt = prompt.removesuffix("<think>\n")
                if "tool_calls" in message:  # and later rounds of calls have no header
                    prompt = prompt.removesuffix("<｜Assistant｜>")
            # Marks may begin with the header, or with what follows it.
            assert (context + run).startswith(prompt)
            assert context.startswith(prompt[: len(context)])
            thinking, _, answer = message["content"].rpartition("</think>\n\n")
            assert answer.strip() in run
            if thinking and name.removesuffix("_training") in ("qwen3", "glm4moe"):
                assert thinking.partition("\n")[2].strip() in run
            for call in message.get("tool_calls", ()) if name not in NO_CALLS else ():
                assert call["function"]["name"] in run
            assert run.rstrip().endswith((">", "｜>"))


@needs_templates
def test_end_of_a_glm_turn_bears_loss():
    """The next role's mark, and the end token at the end; nothing after it does."""
    tokenizer = tokenizer_of("glm4moe")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        user("1"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
        user("2"),
        {"role": "assistant", "content": "three"},
    ]
    ((example, *_),) = sequences(tokenizer, messages, {"tools": [ADD]}).sequences
    calls, two, three = answers(tokenizer, example)
    assert calls.endswith("</tool_call><|observation|>")
    assert (two, three) == ("\n<think></think>\ntwo<|user|>", "\n<think></think>\nthree<eos>")
    # A turn that ends its own sequence ends with the mark of who follows, if that is known.
    messages = [user("1"), turn("a", "b"), user("2"), turn("c", "d")]
    first, last = (answers(tokenizer, e)[0] for e, *_ in sequences(tokenizer, messages).sequences)
    assert first == "\n<think>a</think>\nb<|user|>" and last == "\n<think>c</think>\nd<eos>"


PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [user("1"), {"role": "assistant", "content": "2"}] * 2


def test_turns_without_end_and_mark_end_in_sequences_of_their_own():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = PLAIN
    found = sequences(tokenizer, TALK)
    assert [answers(tokenizer, e) for e, *_ in found.sequences] == [["2\n<eos>"]] * 2
    with pytest.raises(
        DataError, match="row 1: the chat template writes nothing at the end of messa"
    ):
        sequences(tokenizer, TALK, rewritten_turns="whole")


@needs_templates
@pytest.mark.parametrize("end", ["<|im_end|>", "<eos>", "<|im_end|>\n", "<|im_end|><eos>"])
def test_an_answer_that_brings_its_end_along_has_one_end(end):
    tokenizer = tokenizer_of("qwen2_5")
    messages = [user("1"), {"role": "assistant", "content": f"two{end}"}]
    for content in (f"two{end}", [{"type": "text", "text": f"two{end}"}]):
        messages = [user("1"), {"role": "assistant", "content": content}]
        given = loss_masks.without_end_tokens(tokenizer, Dialogue(messages, 1, {}, ""))
        content = given.messages[1]["content"]
        assert (content if isinstance(content, str) else content[0]["text"]) == "two"
    messages[1] = {"role": "assistant", "content": f"two{end}"}
    ((example, *_),) = sequences(tokenizer, messages, first=1).sequences
    assert answers(tokenizer, example) == ["two<|im_end|>\n"]


EMPTY = ["", " \n", "<think>\n\n</think>\n\n", "<eos>", [{"type": "text", "text": ""}]]


@pytest.mark.parametrize("content", EMPTY)
def test_an_empty_answer_is_refused_where_it_would_be_trained(content):
    tokenizer = character_tokenizer()
    empty = {"role": "assistant", "content": content}
    messages = [user("1"), empty, *TALK]
    with pytest.raises(DataError, match="row 1: message 2, of the assistant, is empty and would"):
        sequences(tokenizer, messages)
    if isinstance(content, str):
        untrained = [user("1"), empty | {"train": False}, *TALK]
        for given, first in ((messages, 2), (untrained, 0)):
            ((example, *_),) = sequences(tokenizer, given, first=first).sequences
            assert answers(tokenizer, example) == ["2<eos>", "2<eos>"]


MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", [None, MARKED])
@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0.0}])
def test_a_turn_that_is_not_to_be_trained_bears_no_loss(flag, template):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    messages = [TALK[0], TALK[1] | flag, TALK[2], TALK[3] | {"train": True, "weight": 1}]
    ((example, *_),) = sequences(tokenizer, messages).sequences
    assert answers(tokenizer, example) == ["2<eos>"]
    assert example.mask[-2:] == (True, True)


def test_marks_that_leave_out_the_end_of_a_turn_are_completed():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}"
        "{% endif %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    ((example, *_),) = sequences(tokenizer, TALK).sequences
    assert answers(tokenizer, example) == ["2<eos>", "2<eos>"]


@needs_templates
def test_the_number_of_renderings_grows_with_the_turns_alone(monkeypatch):
    """A dialogue of many turns, each rewritten, is not rendered for every pair of turns."""
    tokenizer = tokenizer_of("qwen3")
    calls = []
    apply = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template", lambda *a, **k: calls.append(1) or apply(*a, **k)
    )
    counts = []
    for num_turns in (8, 16):
        messages = []
        for number in range(num_turns):
            messages += [user(f"q {number}"), turn(f"t {number}", random.choice("ab"))]
        calls.clear()
        assert len(sequences(tokenizer, messages).sequences) == num_turns
        counts.append(len(calls))
    assert counts[1] < 2.2 * counts[0]
