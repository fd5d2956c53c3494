"""A folder from which recipes of `tinker-cookbook` run: a small model, its tokenizer, and data.

Recipes name models and data sets as on the hub; from this folder the same names are folders.
"""

import json
import random

import jax
import numpy as np
import serving_model
import tiny

import jaxrl_llm
from jaxrl_llm.learner.adamw import AdamWParams
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.training_api.training_data import Datum

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


def rendered(tokenizer, messages):
    """Tokens of a chat as the cookbook writes it for a base model, and weights of its answers."""
    tokens, weights = [], []
    for message in messages:
        answers = message["role"] == "assistant"
        header = tokenizer.encode(f"{message['role'].capitalize()}:", add_special_tokens=False)
        content = tokenizer.encode(f" {message['content']}\n\n", add_special_tokens=False)
        tokens += header + content
        weights += [0.0] * len(header) + [float(answers)] * len(content)
    stop = tokenizer.encode("User:", add_special_tokens=False)
    return tokens + stop, weights + [1.0] * len(stop)


def pretrain(folder, tokenizer, steps=250, batch=16):
    """Trains the model to answer in the form that is asked for, with any digit; returns weights."""
    config = jaxrl_llm.default_config()
    config.model.path, config.lora.rank = str(folder), 0
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 512, 16
    config.trainer.max_tokens_per_microbatch = 8192
    config.trainer.prompts_per_step = 1
    config.rewards.functions.answer = {"function": "arithmetic"}  # a job would need one
    chance = random.Random(1)
    with mesh_lib.use_devices(jax.devices()[:1]):
        session = jaxrl_llm.training_session(config)
        for _ in range(steps):
            data = []
            for _ in range(batch):
                # The loops put an example before the question: any text will do.
                words = " ".join(chance.choices(serving_model.CORPUS[0].split(), k=60))
                example = [{"role": "user", "content": words}] * chance.randint(0, 1)
                asked, answer = chat(chance.randrange(10**6))
                answer = {**answer, "content": f"\\boxed{{{chance.randrange(10)}}}"}
                tokens, weights = rendered(tokenizer, [*example, asked, answer])
                data.append(Datum(tokens, {"weights": np.array(weights) / batch / 12}))
            result = session.forward_backward(data)
            session.optim_step(AdamWParams(3e-3, 0.9, 0.99, 1e-8, max_grad_norm=1.0))
        print(f"pretrained: loss {result.loss:.3f}")
        return jax.device_get(session.state.params)


def make_home(home, num_rows=1024):
    """Writes the model and the data sets of the recipes."""
    tokenizer = serving_model.byte_tokenizer()
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4}
    network = tiny.with_sizes(
        vocab_size=len(tokenizer), head_size=16, mlp_size=128, max_positions=1024, **sizes
    )
    checkpoint.save(home / "random", network, tiny.params(network, scale=1.0), tokenizer)
    weights = pretrain(home / "random", tokenizer)
    checkpoint.save(home / MODEL, network, weights, tokenizer)
    order = list(range(num_rows))
    random.Random(0).shuffle(order)
    write_rows(home, "HuggingFaceH4/no_robots", [{"messages": chat(i)} for i in order])
    sums = [{"question": question(i), "answer": f"#### {ANSWER}"} for i in order]
    write_rows(home, "openai/gsm8k", sums, "main")
    write_rows(home, "Anthropic/hh-rlhf", [preferences(i) for i in order])
    asked = [{"question": question(i) + BOXED} for i in order]
    write_rows(home, "zwhe99/DeepMath-103K", asked, splits=("train",))
