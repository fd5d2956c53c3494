"""Answers prompts."""

import json
import sys

import jax

from jaxrl_llm import errors, program
from jaxrl_llm.commands.options import Generate
from jaxrl_llm.config.room import Lengths
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.learner import saved
from jaxrl_llm.rollout import cache, episodes
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.requests import SamplingParams
from jaxrl_llm.types import Prompt, PromptBatch


def _engine(own: Engine, max_tokens: int, num_samples: int) -> Engine:
    """Returns an engine for sequences of `max_tokens`, not for those of the run."""
    network, mesh = own.network, own.mesh
    num_slots, cache_tokens = cache.fitting(network, mesh, Lengths(max_tokens), num_samples)
    return Engine(
        network,
        mesh,
        num_slots=num_slots,
        max_tokens=max_tokens,
        layout=own.layout,
        cache_tokens=cache_tokens,
    )


def main(options: Generate) -> None:
    program.keep_compilations(options.workdir or options.model)
    if options.workdir:
        source = saved.from_run(options.workdir)
    else:
        source = saved.from_model(saved.model_config(options.model))
    models = source.models
    texts = options.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    messages = [[{"role": "user", "content": text}] for text in texts]
    tokens, rendered = tokenizer_lib.render_prompts(
        models.tokenizer, messages, source.config.data.chat_template
    )
    room = models.policy.shape.max_positions
    most = room if options.max_tokens else min(room, saved.MOST_TOKENS)
    least = options.max_tokens or 1
    errors.refuse(
        (
            "prompt",
            f"{text[:200]!r} has {len(ids)} tokens; an answer of {least} more does not fit the"
            f" {most} that are allowed; shorten it, or set --max_tokens (the model holds {room})",
        )
        for text, ids in zip(texts, tokens, strict=True)
        if len(ids) + least > most
    )
    longest = max(map(len, tokens), default=1)
    answer = options.max_tokens or most - longest
    prompts = [
        Prompt(ids, text, "generate", "", {}, i)
        for i, (ids, text) in enumerate(zip(tokens, rendered, strict=True))
    ]
    sampling = SamplingParams(
        max_tokens=answer,
        temperature=options.temperature,
        top_p=options.top_p,
        stop_tokens=models.eos_tokens,
    )
    rollouts, _ = episodes.rollout(
        _engine(source.sampler.engine, longest + answer, len(texts) * options.samples),
        source.weights(),
        models.tokenizer,
        PromptBatch(tuple(prompts)),
        [sampling] * options.samples,
        jax.random.key(options.seed),
    )
    for row, response in enumerate(rollouts.responses):
        log_prob = float(rollouts.rollout_log_probs[row].sum())
        line = {
            "prompt": rollouts.prompts[rollouts.group_ids[row]].text,
            "output": response,
            "log_prob": log_prob,
        }
        print(json.dumps(line, ensure_ascii=False))
