"""Answers prompts with a run's policy: `python launch/generate.py --workdir=DIR --prompt="3+4+2="`.

Or with the model of a Hugging Face folder: `--model=FOLDER`. Prompts come from `--prompt` (may be
repeated) or from the lines of standard input. Prints one JSON object per sample: `prompt`,
`output`, `log_prob`.
"""

import json
import sys

import jax
from absl import flags

from jaxrl_llm import program
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.learner import saved
from jaxrl_llm.rollout import cache, episodes
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.requests import SamplingParams
from jaxrl_llm.types import Prompt, PromptBatch

WORKDIR = flags.DEFINE_string("workdir", "", "Folder of a run.")
MODEL = flags.DEFINE_string("model", "", "Hugging Face folder, instead of a run.")
PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be repeated.")
SAMPLES = flags.DEFINE_integer("samples", 1, "Samples per prompt.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: greedy.", lower_bound=0.0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Nucleus sampling: probability to keep.", 1e-6, 1.0)
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 0, "Per answer; 0: as many as fit, up to 4096 with the prompt.", 0
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the samples.")


def _engine(own: Engine, max_tokens: int, num_samples: int) -> Engine:
    """Returns an engine for sequences of `max_tokens`, not for those of the run."""
    network, mesh = own.network, own.mesh
    return Engine(
        network,
        mesh,
        num_slots=cache.fitting_slots(network, mesh, max_tokens, num_samples),
        max_tokens=max_tokens,
        layout=own.layout,
    )


def main():
    if bool(MODEL.value) == bool(WORKDIR.value):
        program.refuse([("model", "give either --model or --workdir")])
    program.keep_compilations(WORKDIR.value or MODEL.value)
    if WORKDIR.value:
        source = saved.from_run(WORKDIR.value)
    else:
        source = saved.from_model(saved.model_config(MODEL.value))
    models = source.models
    texts = PROMPT.value or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    messages = [[{"role": "user", "content": text}] for text in texts]
    tokens, rendered = tokenizer_lib.render_prompts(
        models.tokenizer, messages, source.config.data.chat_template
    )
    room = models.policy.shape.max_positions
    most = room if MAX_TOKENS.value else min(room, saved.MOST_TOKENS)
    least = MAX_TOKENS.value or 1
    program.refuse(
        (
            "prompt",
            f"{text[:200]!r} has {len(ids)} tokens; an answer of {least} more does not fit the"
            f" {most} that are allowed; shorten it, or set --max_tokens (the model holds {room})",
        )
        for text, ids in zip(texts, tokens, strict=True)
        if len(ids) + least > most
    )
    longest = max(map(len, tokens), default=1)
    answer = MAX_TOKENS.value or most - longest
    prompts = [
        Prompt(ids, text, "generate", "", {}, i)
        for i, (ids, text) in enumerate(zip(tokens, rendered, strict=True))
    ]
    sampling = SamplingParams(
        max_tokens=answer,
        temperature=TEMPERATURE.value,
        top_p=TOP_P.value,
        stop_tokens=models.eos_tokens,
    )
    rollouts, _ = episodes.rollout(
        _engine(source.sampler.engine, longest + answer, len(texts) * SAMPLES.value),
        source.weights(),
        models.tokenizer,
        PromptBatch(tuple(prompts)),
        [sampling] * SAMPLES.value,
        jax.random.key(SEED.value),
    )
    for row, response in enumerate(rollouts.responses):
        log_prob = float(rollouts.rollout_log_probs[row].sum())
        line = {
            "prompt": rollouts.prompts[rollouts.group_ids[row]].text,
            "output": response,
            "log_prob": log_prob,
        }
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    program.run(main)
