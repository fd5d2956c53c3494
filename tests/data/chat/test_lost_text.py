"""What a template leaves out of a row is refused, with file, row, message, role and remedy."""

import json

import pytest
from round_trip_rows import TEMPLATES, tokenizer_of

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.chat.lost_text import check_dialogue, check_prompt
from jaxrl_llm.data.datasets import load_dataset, preference_pairs, worked_examples
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer

USER, ANSWER = {"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
# The kinds of templates, with roles that they know.
QWEN = (
    "2026{% for m in messages %}{% if m.role in ['user', 'assistant', 'tool'] %}"
    "<{{ m.role }}>{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    "{% endif %}{% endfor %}"
)
FIRST_CALL = (
    "{% for m in messages %}{{ m.role }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def with_template(template):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def read(job, rows, tokenizer, folder, **settings):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(task="files", train_files=(str(path),), **settings)
    if job == "rl":
        return load_dataset(config, tokenizer, "train", 0).prompts
    make = worked_examples if job == "sft" else preference_pairs
    rows = make(config, tokenizer, "train", 0)
    return rows if isinstance(rows, list) else rows.first(9)


def row_of(job, messages, **more):
    if job == "rl":
        return {"data_source": "s", "prompt": messages, **more}
    if job == "sft":
        return {"messages": [*messages, ANSWER], **more}
    return {"prompt": messages, "chosen": "4", "rejected": "5", **more}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("job", ["rl", "sft", "dpo"])
def test_a_message_that_vanishes_is_refused(job, stream, tmp_path):
    """Its text is elsewhere in the rendering, so that it cannot be looked for there."""
    system = {"role": "system", "content": "2"}
    tokenizer = with_template(QWEN)
    good = row_of(job, [USER])
    assert len(read(job, [good], tokenizer, tmp_path, stream=stream)) == 1
    with pytest.raises(DataError) as error:
        read(job, [good, row_of(job, [system, USER])], tokenizer, tmp_path, stream=stream)
    wanted = (
        "rows.jsonl, row 2: message 1 (role 'system'): the chat template does not show its text"
    )
    assert wanted in str(error.value) and "a message of the user, or set" in str(error.value)


@pytest.mark.parametrize("role", ["human", "gpt", "critic"])
def test_foreign_roles_are_refused_even_where_they_are_printed(role, tmp_path):
    tokenizer = character_tokenizer()  # prints every role
    rows = [row_of("rl", [{**USER, "role": role}])]
    with pytest.raises(DataError, match=rf"row 1: message 1 has the role '{role}', which the chat"):
        read("rl", rows, tokenizer, tmp_path)
    (prompt,) = read("rl", rows, tokenizer, tmp_path, role_aliases=(f"{role}:user",))
    assert prompt.text == "<bos><user>2<eos><assistant>"
    (prompt,) = read("rl", rows, tokenizer, tmp_path, role_aliases=(f"{role}:{role}",))
    assert prompt.text == f"<bos><{role}>2<eos><assistant>"
    tokenizer.chat_template += f"{{# knows '{role}' #}}"
    assert len(read("rl", rows, tokenizer, tmp_path)) == 1


def test_aliases_that_say_nothing_are_refused():
    for aliases, message in (
        (("human",), "'human' is no alias; write it as 'human:user'"),
        (("human:",), "is no alias"),
        (("bot:user", "bot:assistant"), "'bot' has two meanings"),
    ):
        problems = dict(DataConfig(role_aliases=aliases).problems())
        assert message in problems["role_aliases"]


def test_a_lost_call_and_lost_tools_are_refused():
    tokenizer = with_template(FIRST_CALL)
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    check_prompt(tokenizer, [USER, calling], {})
    with pytest.raises(DataError, match=r"message 2 \(role 'assistant'\): .* its call of 'add'"):
        check_prompt(tokenizer, [USER, {**calling, "tool_calls": [CALL, CALL]}], {})
    with pytest.raises(DataError, match=r"message 2 \(role 'assistant'\): .* its text 'So:'; wri"):
        check_prompt(tokenizer, [USER, {**calling, "content": "So:"}], {})
    with pytest.raises(DataError, match=r"does not show the tool 'add'; describe it by its name"):
        check_prompt(tokenizer, [{"role": "user", "content": "address"}], {"tools": [TOOL]})
    # Some describe tools by hand.
    by_hand = {"role": "system", "content": "Write add(a, b)."}
    check_prompt(tokenizer, [by_hand, USER], {"tools": [TOOL]})
    check_prompt(character_tokenizer(), [USER], {"tools": [TOOL]})


def test_arguments_that_are_left_out_are_refused():
    tokenizer = with_template(FIRST_CALL.replace("arguments | tojson", "name"))
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    with pytest.raises(DataError, match="does not show its call of 'add'"):
        check_prompt(tokenizer, [USER, calling], {})


def test_thinking_may_be_dropped_from_prompts_and_earlier_turns_only():
    tokenizer = with_template(QWEN)
    thinking = {"role": "assistant", "content": "<think>hm</think>4"}
    check_prompt(tokenizer, [USER, thinking, USER], {})
    parts = {**thinking, "content": [{"type": "text", "text": thinking["content"]}]}
    check_prompt(tokenizer, [USER, parts, USER], {})
    check_dialogue(tokenizer, [USER, thinking, USER, thinking], {}, 0)
    never = with_template(QWEN.replace("if not loop.last else m.content", ""))
    check_prompt(never, [USER, thinking, USER], {})
    with pytest.raises(DataError, match=r"message 4 .* does not show its thinking 'hm'; leave it"):
        check_dialogue(never, [USER, thinking, USER, thinking], {}, 2)
    beside = {**ANSWER, "reasoning_content": "hm"}
    with pytest.raises(DataError, match=r"message 2 .* does not show its thinking 'hm'"):
        check_dialogue(never, [USER, beside], {}, 0)
    check_dialogue(never, [USER, {**beside, "train": False}], {}, 0)


def test_without_a_template_calls_and_tools_are_refused(tmp_path):
    tokenizer = character_tokenizer()
    row = {"data_source": "s", "prompt": "1", "completion": "2", "tools": [TOOL]}
    for job in ("rl", "sft"):
        with pytest.raises(DataError, match=r"row 1: tools are shown by a chat template only"):
            read(job, [row], tokenizer, tmp_path, chat_template=False)
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    with pytest.raises(DataError, match=r"row 1: calls of tools need a chat template"):
        read("rl", [row_of("rl", [USER, calling])], tokenizer, tmp_path, chat_template=False)


def test_a_template_that_refuses_a_prompt_names_its_row(tmp_path):
    tokenizer = with_template("{{ raise_exception('users only') if messages | length > 1 }}2")
    tokenizer.chat_template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    for stream in (False, True):
        with pytest.raises(
            DataError, match=r"rows\.jsonl, row 2: the chat template refuses .*only"
        ):
            rows = [row_of("rl", [USER]), row_of("rl", [USER, USER])]
            read("rl", rows, tokenizer, tmp_path, stream=stream)


@pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
def test_reported_rows_keep_their_text(tmp_path):
    question, long = "What is 2+2?", {"max_prompt_tokens": 999}
    parts = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    text = [{"role": "user", "content": question}]
    for name in TEMPLATES:
        tokenizer = tokenizer_of(name)
        rows = [row_of("rl", parts), row_of("rl", text), row_of("rl", json.dumps(text))]
        shown = [prompt.text for prompt in read("rl", rows, tokenizer, tmp_path, **long)]
        assert shown == [shown[0]] * 3 and question in shown[0]
        (example,) = read("sft", [row_of("sft", parts)], tokenizer, tmp_path)
        assert any(example.mask) and question in tokenizer.decode(example.tokens)
        (pair,) = read("dpo", [row_of("dpo", parts)], tokenizer, tmp_path)
        assert question in tokenizer.decode(pair.rejected.tokens)
        human = [{"role": "human", "content": question}]
        with pytest.raises(DataError, match=r"row 1: message 1 has the role 'human'"):
            read("rl", [row_of("rl", human)], tokenizer, tmp_path)
