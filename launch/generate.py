"""Answers prompts with a run's policy: `python launch/generate.py --workdir=DIR --prompt="3+4+2="`.

Prompts come from `--prompt` (may be repeated) or, a line each, from standard input. Prints one
JSON object a sample: `prompt`, `output`, `log_prob`.
"""

import json
import sys

import jax
from absl import flags

from jaxrl_llm import program
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.learner import saved
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.requests import SamplingParams
from jaxrl_llm.types import Prompt, PromptBatch, Weights

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
PROMPT = flags.DEFINE_multi_string("prompt", [], "A question; may be repeated.")
SAMPLES = flags.DEFINE_integer("samples", 1, "Answers to each prompt.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: greedy.", lower_bound=0.0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Share of probability kept.", 1e-6, 1.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the samples.")


def main():
    program.keep_compilations(WORKDIR.value)
    policy = saved.load_policy(WORKDIR.value)
    config, models, sampler = policy.config, policy.models, policy.sampler
    texts = PROMPT.value or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    messages = [[{"role": "user", "content": text}] for text in texts]
    tokens, rendered = tokenizer_lib.render_prompts(
        models.tokenizer, messages, config.data.chat_template
    )
    program.refuse(
        ("prompt", f"{text!r} has {len(ids)} tokens, the run allows {limit}")
        for text, ids in zip(texts, tokens, strict=True)
        if len(ids) > (limit := config.data.max_prompt_tokens)
    )
    prompts = [
        Prompt(ids, text, "generate", "", {}, i)
        for i, (ids, text) in enumerate(zip(tokens, rendered, strict=True))
    ]
    sampling = SamplingParams(
        max_tokens=config.rollout.max_response_tokens,
        temperature=TEMPERATURE.value,
        top_p=TOP_P.value,
        stop_tokens=models.eos_tokens,
    )
    rollouts = episodes.rollout(
        sampler.engine,
        Weights(sampler.weights(policy.params), policy.step),
        models.tokenizer,
        PromptBatch(tuple(prompts)),
        [sampling] * SAMPLES.value,
        jax.random.key(SEED.value),
    )
    for row, response in enumerate(rollouts.responses):
        log_prob = float(rollouts.rollout_log_probs[row].sum())
        line = {"prompt": rollouts.prompt_of(row).text, "output": response, "log_prob": log_prob}
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    program.run(main)
