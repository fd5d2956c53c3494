"""A folder from which recipes of `tinker-cookbook` run: a small model, its tokenizer, and data.

Recipes name models and data sets as on the hub; from this folder the same names are folders.
"""

import json
import random

import serving_model
import tiny

from jaxrl_llm.models.hf import checkpoint

MODEL = "Qwen/Qwen3-8B-Base"  # the renderer that the cookbook chooses for it writes plain text
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
ANSWER = 7  # of every question
SFT_ANSWERS = (6, 7, 8)  # of the supervised rows: a third is right


def question(number):
    first = number % ANSWER
    return f"{first}+{ANSWER - first}?"


def chat(number):
    """A question of gsm8k as the loop asks it, with an answer that is often wrong."""
    answer = f"\\boxed{{{SFT_ANSWERS[number % len(SFT_ANSWERS)]}}}"
    return [
        {"role": "user", "content": question(number) + BOXED},
        {"role": "assistant", "content": answer},
    ]


def preferences(number):
    """A pair of the form of hh-rlhf."""
    asked = f"\n\nHuman: {question(number)}\n\nAssistant:"
    return {"chosen": f"{asked} yes", "rejected": f"{asked} no"}


def write_rows(home, name, rows, config=None, splits=("train", "test")):
    folder = home / name
    folder.mkdir(parents=True)
    for split in splits:
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config:
        files = "".join(f"  - split: {s}\n    path: {s}.jsonl\n" for s in splits)
        card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
        (folder / "README.md").write_text(card)


def make_home(home, num_rows=1024):
    """Writes the model and the data sets of the recipes."""
    tokenizer = serving_model.byte_tokenizer()
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4}
    network = tiny.with_sizes(
        vocab_size=len(tokenizer), head_size=16, mlp_size=128, max_positions=1024, **sizes
    )
    checkpoint.save(home / MODEL, network, tiny.params(network, scale=2.0), tokenizer)
    order = list(range(num_rows))
    random.Random(0).shuffle(order)
    write_rows(home, "HuggingFaceH4/no_robots", [{"messages": chat(i)} for i in order])
    sums = [{"question": question(i), "answer": f"#### {ANSWER}"} for i in order]
    write_rows(home, "openai/gsm8k", sums, "main")
    write_rows(home, "Anthropic/hh-rlhf", [preferences(i) for i in order])
    asked = [{"question": question(i) + BOXED} for i in order]
    write_rows(home, "zwhe99/DeepMath-103K", asked, splits=("train",))
