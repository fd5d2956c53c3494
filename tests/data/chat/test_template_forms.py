"""Messages in the forms that a template takes, for every kind of template."""

import json

import pytest
from round_trip_rows import FOLDER, TEMPLATES, tokenizer_of

from jaxrl_llm.data.chat.template_forms import fitted_messages
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer, prompt_text, render_chat

PARTS = [{"type": "text", "text": "What "}, {"type": "text", "text": "is 2+2?"}]
ARGUMENTS = {"city": "Köln", "unit": None}
LOOP = "{%% for m in messages %%}<{{ m.role }}>%s{%% endfor %%}"
LISTS = LOOP % (
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{{ '' if loop.last else '\n' }}{% endfor %}{% endif %}"
)
ONLY_LISTS = (
    LOOP % "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
)
TRIMMED = LISTS.replace("{{ p.text }}", "{{ p.text | trim }}")
CALLS = "{{ m.content }}{%% for c in m.tool_calls %%}{{ c.function.name }}%s{%% endfor %%}"
BY_JSON = LOOP % (CALLS % "{{ c.function.arguments | tojson }}")
AS_TEXT = LOOP % (CALLS % "{{ c.function.arguments }}")
JOINED = LOOP % (CALLS % "{{ '' + c.function.arguments }}")


def tokenizer_with(template):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def calling(arguments, **message):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call], **message},
    ]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (None, "<bos><user>What is 2+2?<eos><assistant>"),
        (LISTS, "<user>What \nis 2+2?"),  # as the template joins them
        (ONLY_LISTS, "<user>What is 2+2?"),
        (TRIMMED, "<user>What is 2+2?"),  # joined, as it would cut the space
    ],
)
def test_parts_that_are_texts(template, shown):
    tokenizer = tokenizer_with(template or character_tokenizer().chat_template)
    assert prompt_text(tokenizer, [{"role": "user", "content": PARTS}]) == shown
    whole = "What is 2+2?"
    text = prompt_text(tokenizer, [{"role": "user", "content": whole}])
    assert text == shown.replace("\n", "")
    assert prompt_text(tokenizer, [{"role": "user", "content": PARTS}], False) == whole


def test_images_stay_content_parts():
    parts = [*PARTS, {"type": "image"}]
    message = {"role": "user", "content": parts}
    assert fitted_messages(character_tokenizer(images=True), [message], {}) == [message]
    with pytest.raises(DataError, match="images need a chat template"):
        prompt_text(character_tokenizer(), [message], False)


@pytest.mark.parametrize("template", [BY_JSON, AS_TEXT, JOINED])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False)])
def test_arguments_are_written_once(template, arguments):
    found = render_chat(tokenizer_with(template), calling(arguments), tokenize=False)
    assert found == '<user>x<assistant>f{"city": "Köln", "unit": null}'


def test_a_text_of_arguments_stays_where_the_template_wants_one():
    messages = calling('{"a":1.50}')
    assert render_chat(tokenizer_with(JOINED), messages, tokenize=False).endswith('f{"a":1.50}')
    assert render_chat(tokenizer_with(BY_JSON), messages, tokenize=False).endswith('f{"a": 1.5}')


def test_no_arguments_are_an_empty_mapping():
    for arguments in ("", None, {}):
        assert (
            render_chat(tokenizer_with(BY_JSON), calling(arguments), tokenize=False)[-3:] == "f{}"
        )


@pytest.mark.parametrize("template", ["{{ m.content }}", "{{ m.content + '' }}"])
def test_no_content_beside_calls_is_nothing(template):
    """Not the text None, and no refusal."""
    tokenizer = tokenizer_with(LOOP % template)
    for message in ({"content": None}, {"content": ""}):
        shown = render_chat(tokenizer, calling({}, **message), tokenize=False)
        assert shown == "<user>x<assistant>"


def test_a_template_of_calls_among_tools_alone_is_tried_with_text():
    guard = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer = tokenizer_with(guard + JOINED)
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = render_chat(tokenizer, calling({"a": 1}), {"tools": tools}, tokenize=False)
    assert found == '<user>x<assistant>f{"a": 1}'
    with pytest.raises(DataError, match=r"the chat template refuses .* no tools"):
        render_chat(tokenizer, calling({"a": 1}), tokenize=False)


@pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gptoss", "glm4moe", "deepseekv3"])
def test_templates_of_models_write_arguments_alike(name):
    tokenizer = tokenizer_of(name)
    texts = {
        render_chat(tokenizer, calling(arguments, content=content), tokenize=False)
        for arguments in ({"a": 1}, '{"a": 1}')
        for content in ("", None)
    }
    (text,) = texts
    wanted = "<arg_key>a</arg_key>\n<arg_value>1</arg_value>" if name == "glm4moe" else '{"a": 1}'
    assert wanted in text and '\\"' not in text and "None" not in text
    assert (FOLDER / f"{name}.jinja").is_file()
