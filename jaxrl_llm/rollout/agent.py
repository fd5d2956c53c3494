"""Prompts in, sequences out: one turn of sampling, token ids throughout."""

from collections.abc import Sequence

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.requests import Request, SamplingParams
from jaxrl_llm.types import PromptBatch, Rollouts


def sampling_params(config: RolloutConfig, eos_tokens: Sequence[int]) -> SamplingParams:
    """Returns how a run samples its training responses."""
    return SamplingParams(
        max_tokens=config.max_response_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        stop_tokens=tuple(dict.fromkeys((*eos_tokens, *config.stop_tokens))),
        stop_strings=config.stop_strings,
    )


def rollout(
    engine: Engine,
    params: Params,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    samples: Sequence[SamplingParams],
    key: jax.Array,
) -> Rollouts:
    """Returns `len(samples)` sequences of every prompt, prompt-major.

    Args:
      engine: What samples.
      params: Rollout parameters.
      tokenizer: Turns responses into text for rewards and dumps; tokens are never re-tokenized.
      prompts: P of them.
      samples: How each sample of a prompt is drawn.
      key: Of this call; sample i of prompt p uses `fold_in(key, p * len(samples) + i)`.
    """
    n = len(samples)
    keys = _sample_keys(key, len(prompts.prompts) * n).reshape(-1, n, 2)
    requests = [
        Request(prompt.tokens, keys[i], tuple(samples)) for i, prompt in enumerate(prompts.prompts)
    ]
    completions = [c for group in engine.generate(params, requests) for c in group]

    group_ids = np.repeat(np.arange(len(requests), dtype=np.int32), n)
    sequences = [
        (*requests[g].tokens, *c.tokens) for g, c in zip(group_ids, completions, strict=True)
    ]
    lengths = np.array([len(s) for s in sequences], np.int32)
    shape = (len(sequences), bucket(int(lengths.max()), smallest=32, largest=engine.max_tokens))
    tokens = np.zeros(shape, np.int32)
    response_mask = np.zeros(shape, bool)
    log_probs = np.zeros(shape, np.float32)
    for row, (sequence, completion) in enumerate(zip(sequences, completions, strict=True)):
        start, end = len(sequence) - len(completion.tokens), len(sequence)
        tokens[row, :end] = sequence
        response_mask[row, start:end] = True
        log_probs[row, start:end] = completion.log_probs
    return Rollouts(
        tokens=tokens,
        response_mask=response_mask,
        rollout_log_probs=log_probs,
        lengths=lengths,
        group_ids=group_ids,
        stopped=np.array([c.stopped for c in completions]),
        prompts=prompts.prompts,
        responses=tuple(
            str(tokenizer.decode(c.tokens, skip_special_tokens=True)) for c in completions
        ),
    )


def _sample_keys(key: jax.Array, count: int) -> np.ndarray:
    return np.asarray(_fold_in_each(key, np.arange(count, dtype=np.uint32)))


@jax.jit
def _fold_in_each(key, indices):
    return jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(indices)
