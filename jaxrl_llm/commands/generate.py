"""Generates answers to prompts."""

import json
import sys

import jax

from jaxrl_llm import errors, program, saved_policy
from jaxrl_llm.commands.options import GenerateOptions
from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.config.kv_cache_sizing import SequenceLengths
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.rollout import engines, episodes
from jaxrl_llm.rollout.engine import kv_cache
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.rollout.engine_api import EngineArgs, SamplingEngine
from jaxrl_llm.types import Prompt, PromptBatch


def _engine(
    rollout: RolloutConfig, of_run: EngineArgs, max_tokens: int, num_samples: int
) -> SamplingEngine:
    """An engine like that of the run, for sequences of `max_tokens`."""
    network, mesh = of_run.network, of_run.mesh
    num_slots, cache_tokens = kv_cache.fitting_cache_size(
        network, mesh, SequenceLengths(max_tokens), num_samples, window_cache=True
    )
    args = EngineArgs(
        network,
        mesh,
        num_slots=num_slots,
        max_tokens=max_tokens,
        layout=of_run.layout,
        cache_tokens=cache_tokens,
        window_cache=True,
    )
    return engines.build(rollout, args)


def main(options: GenerateOptions) -> None:
    program.enable_compilation_cache(options.workdir, options.model)
    if options.workdir:
        source = saved_policy.policy_from_run(options.workdir)
    else:
        source = saved_policy.policy_from_model(saved_policy.sampling_config(options.model))
    models = source.models
    texts = options.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    messages = [[{"role": "user", "content": text}] for text in texts]
    tokens, rendered = tokenizer_lib.render_prompts(
        models.tokenizer, messages, source.config.data.chat_template
    )
    max_positions = models.policy.shape.max_positions
    max_tokens = (
        max_positions if options.max_tokens else min(max_positions, saved_policy.DEFAULT_MAX_TOKENS)
    )
    min_answer_tokens = options.max_tokens or 1
    errors.raise_flag_problems(
        (
            "prompt",
            f"{text[:200]!r} has {len(ids)} tokens; an answer of {min_answer_tokens} more does not"
            f" fit the {max_tokens} that are allowed; shorten it, or set --max_tokens (the model"
            f" holds {max_positions})",
        )
        for text, ids in zip(texts, tokens, strict=True)
        if len(ids) + min_answer_tokens > max_tokens
    )
    longest_prompt = max(map(len, tokens), default=1)
    answer_tokens = options.max_tokens or max_tokens - longest_prompt
    prompts = [
        Prompt(ids, text, "generate", "", {}, i)
        for i, (ids, text) in enumerate(zip(tokens, rendered, strict=True))
    ]
    sampling = SamplingParams(
        max_tokens=answer_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        stop_tokens=models.eos_tokens,
    )
    of_run = source.sampler.engine_args
    rollouts, _ = episodes.rollout(
        _engine(
            source.config.rollout,
            of_run,
            longest_prompt + answer_tokens,
            len(texts) * options.samples,
        ),
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
