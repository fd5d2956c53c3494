"""Compares greedy answers of the engine with those of transformers, token for token, in float32.

`python benchmarks/greedy.py --model=models/smollm2 --file=gsm8k/test.jsonl`

Needs the extra [parity]. The questions are the first ones of a GSM8K file. Where two answers part,
the report has the difference of the two tokens' logits, as transformers computes them.
"""

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np
import torch
import transformers
from side_by_side import emit

from jaxrl_llm import saved_policy
from jaxrl_llm.config import DataConfig
from jaxrl_llm.data import datasets
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

Tokens = tuple[int, ...]
_SLOTS = 16  # sequences at one time


def of_engine(
    source: saved_policy.SavedPolicy, prompts: Sequence[Tokens], max_tokens: int
) -> list[Tokens]:
    own = source.sampler.engine_args
    longest = max(map(len, prompts))
    engine = Engine(
        own.network, own.mesh, num_slots=_SLOTS, max_tokens=longest + max_tokens, layout=own.layout
    )
    greedy = SamplingParams(max_tokens, temperature=0.0, stop_tokens=source.models.eos_tokens)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 1)))
    requests = [Request(prompt, keys, (greedy,)) for prompt in prompts]
    found = engine.generate(source.weights().params, requests)
    return [tuple(completion.tokens) for (completion,) in found]


def of_transformers(
    model, prompts: Sequence[Tokens], max_tokens: int, ends: Sequence[int]
) -> list[Tokens]:
    found = []
    for start in range(0, len(prompts), _SLOTS):
        batch = prompts[start : start + _SLOTS]
        longest = max(map(len, batch))
        ids = torch.tensor([[ends[0]] * (longest - len(prompt)) + list(prompt) for prompt in batch])
        mask = torch.arange(longest) >= longest - torch.tensor([[len(p)] for p in batch])
        out = model.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(ends),
            pad_token_id=ends[0],
        )
        for row in out[:, longest:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            found.append(tuple(row[:end]))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--file", required=True, help="a file of GSM8K")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()

    source = saved_policy.policy_from_model(saved_policy.sampling_config(arguments.model))
    data = DataConfig(task="gsm8k", train_files=(arguments.file,), max_prompt_tokens=1024)
    dataset = datasets.load_dataset(data, source.models.tokenizer, "train", 0)
    prompts = [prompt.tokens for prompt in dataset.prompts[: arguments.questions]]
    began = time.perf_counter()
    ours = of_engine(source, prompts, arguments.max_tokens)
    between = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="eager"
    )
    ends = source.models.eos_tokens
    theirs = of_transformers(model, prompts, arguments.max_tokens, ends)
    ended = time.perf_counter()
    for index, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a != b:
            place = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *b[:place]]])).logits[0, -1]
            margin = float(logits[b[place]] - logits[a[place]])
            emit({"question": index, "first_different_token": place, "logit_margin": margin})
    emit(
        {
            "equal": sum(a == b for a, b in zip(ours, theirs, strict=True)),
            "of": len(prompts),
            "tokens": sum(map(len, theirs)),
            "engine_s": between - began,
            "transformers_s": ended - between,
        }
    )


if __name__ == "__main__":
    main()
