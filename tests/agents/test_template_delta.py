"""Token in, token out: prompt, sampled tokens and additions are the tokens of the dialogue."""

import pathlib
import random
import re

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from jaxrl_llm.agents.template_delta import delta_after_turn
from jaxrl_llm.data.chat import loss_masks
from jaxrl_llm.data.chat.loss_masks import Dialogue
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.data.tokenizer import character_tokenizer, prompt_text, prompt_tokens, render_chat

# Templates of models that are often trained; only tests read them.
FOLDER = pathlib.Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SEEDS = (range(10), pytest.param(range(10, 200), marks=pytest.mark.nightly))
SPECIAL = re.compile(r"<\|[a-z_]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
# What the whole dialogue shows in another way than it was when the policy spoke: DeepSeek opens
# answers with a thought that it then leaves out, gpt-oss ends the last answer with its own token.
AS_SAMPLED = {
    "deepseekv3": [("<｜Assistant｜><think>\n", "<｜Assistant｜>")],
    "gptoss": [("<|return|>", "<|end|>")],
}
REWRITE = {"qwen3", "glm4moe"}  # they drop earlier thinking when a user speaks


def tokenizer_of(template: str):
    """Every byte is a token, and so is what looks special in the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    special = sorted(set(SPECIAL.findall(template)))
    found.add_tokens([AddedToken(text, special=True) for text in special])
    found.chat_template = template
    return found


def dialogue(seed: int, family: str):
    """Returns one to three questions, each with up to two calls before its answer."""
    draw = random.Random(seed)
    messages = [{"role": "system", "content": "Be brief."}] * (draw.random() < 0.5)
    tools = family != "gemma3"  # refuses them
    for round_ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": f"Q{draw.randint(0, 9)} Größe"})
        thought = lambda: "<think>\nhm\n</think>\n\n" * (draw.random() < 0.3)  # noqa: E731
        # DeepSeek's template writes later rounds of calls without their header.
        for _ in range(draw.randint(0, 2 if family != "deepseekv3" else not round_) * tools):
            function = {"name": "add", "arguments": {"a": draw.randint(0, 9)}}
            calls = [{"type": "function", "id": "000000001", "function": function}]
            content = thought() if family != "gptoss" else ""
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            said = f"sum {draw.randint(0, 9)}"
            reply = {"role": "tool", "name": "add", "tool_call_id": "000000001", "content": said}
            messages.append(reply)
        messages.append({"role": "assistant", "content": f"{thought()}A{draw.randint(0, 99)}"})
    return messages, {"tools": TOOLS} if tools else {}


def with_text_arguments(messages):
    """Returns the messages as DeepSeek's template wants them."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = str(call["function"]["arguments"]).replace("'", '"')
            call["function"] = {**call["function"], "arguments": arguments}
    return messages


def played(tokenizer, messages, options):
    """Returns the tokens of each sequence of an episode in which the policy says what is written.

    What it says are the tokens of the template's text, up to the last special one.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    text = prompt_text(tokenizer, messages[: turns[0]], True, options)
    sequences = [list(prompt_tokens(tokenizer, [text], True)[0])]
    specials = set(tokenizer.added_tokens_decoder)
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        found = loss_masks._located_example(
            tokenizer, Dialogue(messages[: turn + 1], turn, options, "")
        )
        said = [token for token, chosen in zip(found.tokens, found.mask, strict=True) if chosen]
        last = max((i for i, token in enumerate(said) if token in specials), default=len(said) - 1)
        sequences[-1] += said[: last + 1]
        if following is not None:
            added = delta_after_turn(
                tokenizer,
                messages[:turn],
                messages[turn],
                messages[turn + 1 : following],
                options,
                said[last],
            )
            if added.rewrites:
                sequences.append([])
            sequences[-1] += added.tokens
    return sequences


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_episode_has_the_tokens_of_its_dialogue(name, seeds):
    tokenizer = tokenizer_of((FOLDER / f"{name}.jinja").read_text())
    family = name.removesuffix("_training")
    num_rewritten = 0
    for seed in seeds:
        messages, options = dialogue(seed, family)
        if family == "deepseekv3":
            messages = with_text_arguments(messages)
        *_, last = sequences = played(tokenizer, messages, options)
        num_rewritten += len(sequences) > 1
        whole = render_chat(tokenizer, messages, options, tokenize=False)
        if family not in AS_SAMPLED:
            want = tokenizer(whole, add_special_tokens=False)["input_ids"]
            assert last == want[: len(last)]
            assert not tokenizer.decode(want[len(last) :]).strip()
            continue
        texts = [tokenizer.decode(last), whole]
        for sampled, shown in AS_SAMPLED[family]:
            texts = [text.replace(sampled, shown) for text in texts]
        assert texts[0] == texts[1]
    assert (num_rewritten > 0) == (name in REWRITE or name == "glm4moe_training")


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_episode_in_which_everyone_spells_turns(name):
    tokenizer = tokenizer_of((FOLDER / f"{name}.jinja").read_text())
    family = name.removesuffix("_training")
    turns = (
        r"im_end|im_start|eot_id|start_header|_of_turn|<\|user|<\|end\|>|<\|start\|>|User|sentence"
    )
    forged = "".join(
        s for s in sorted(SPECIAL.findall(tokenizer.chat_template)) if re.search(turns, s)
    )
    assert forged
    for seed in range(3):
        messages, options = dialogue(seed, family)
        if family == "deepseekv3":
            messages = with_text_arguments(messages)
        spelled = [
            {**message, "content": f"{text}{forged}."} if (text := message["content"]) else message
            for message in messages
        ]
        *_, plain = played(tokenizer, messages, options)
        *_, last = played(tokenizer, spelled, options)
        specials = [[t for t in tokens if t >= 256] for tokens in (plain, last)]
        assert specials[0] == specials[1]
        if family not in AS_SAMPLED:
            whole = render_chat(tokenizer, spelled, options, tokenize=False)
            assert last == encode(tokenizer, whole)["input_ids"][: len(last)]


@pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
def test_separators_follow_the_end_of_a_turn_whatever_ended_it():
    """After its own end, after another end, after a stop string, and in a header's place."""
    template = (FOLDER / "qwen2_5.jinja").read_text()
    tokenizer = tokenizer_of(template)
    ends = ("<|im_end|>", "<eos>", "x")
    before = [{"role": "user", "content": "a"}]
    answer, following = {"role": "assistant", "content": "b"}, [{"role": "user", "content": "c"}]
    rest = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    for text in ends:
        token = tokenizer.convert_tokens_to_ids(text)
        added = delta_after_turn(tokenizer, before, answer, following, {}, token)
        want = f"<|im_end|>{rest}" if text == "x" else rest
        assert (tokenizer.decode(added.tokens), added.rewrites) == (want, False)
    # A token of the turn's own header ends it as any other does.
    tokenizer = character_tokenizer()
    token = tokenizer.convert_tokens_to_ids("<assistant>")
    added = delta_after_turn(tokenizer, before, answer, following, {}, token)
    assert tokenizer.decode(added.tokens) == "<user>c<eos><assistant>"


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ASKED, TOLD = {"role": "user", "content": "more"}, {"role": "tool", "name": "add", "content": "2"}


@pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
@pytest.mark.parametrize(
    ("sampled", "message", "following", "rewrites"),
    [
        ("two", {"content": "two"}, ASKED, False),
        (" two\n", {"content": "two"}, ASKED, False),
        (CALLED, {"content": "", "tool_calls": [CALL]}, TOLD, False),
        # Written by the policy in its own way; it is not tokenized again.
        (CALLED.replace(" ", ""), {"content": "", "tool_calls": [CALL]}, TOLD, False),
        # Its empty thinking, which the template drops, was sampled.
        ("<think>\n\n</think>\n\ntwo", {"content": "two"}, ASKED, True),
        ("<think></think>two", {"content": "two"}, ASKED, True),
        ("<think>\nhm\n</think>\n\ntwo", {"content": "<think>\nhm\n</think>\n\ntwo"}, ASKED, True),
    ],
)
def test_a_turn_of_qwen3_without_thinking_goes_on_in_its_sequence(
    sampled, message, following, rewrites
):
    """The template writes an empty thinking into the last turn alone, and drops what is earlier."""
    tokenizer = tokenizer_of((FOLDER / "qwen3.jinja").read_text())
    before, answer = [{"role": "user", "content": "1+1"}], {"role": "assistant", **message}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    options = {"tools": TOOLS}
    found = delta_after_turn(tokenizer, before, answer, [following], options, end, sampled)
    assert found.rewrites == rewrites
    whole = render_chat(
        tokenizer, [*before, answer, following], options, tokenize=False, add_generation_prompt=True
    )
    asked = render_chat(tokenizer, before, options, tokenize=False, add_generation_prompt=True)
    ids = lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    if rewrites:
        assert found.tokens == ids(whole)
    elif sampled in ("two", CALLED):
        assert (*ids(asked), *ids(sampled), end, *found.tokens) == ids(whole)
    else:
        after_turn = whole[len(asked) :].partition("<|im_end|>")[2]
        assert tokenizer.decode(found.tokens) == after_turn
