"""Chat templates of models with a tokenizer of bytes, and generated dialogues for them."""

import json
import pathlib
import random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.chat.loss_masks import Dialogue

# Templates of models that are often trained; only tests read them.
FOLDER = pathlib.Path(__file__).parents[2] / "shared" / "data" / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
# Drops what stands before a bar in an answer, once others follow; for character_tokenizer.
DROPPING = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}{% else %}"
    "{{ m.content.split('|')[-1] }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_TOOLS = ("gemma3", "gemma3_training")  # they refuse them
TEXT_CALLS = ("deepseekv3",)  # writes arguments that are a text


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
