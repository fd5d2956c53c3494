"""Evaluates a run's policy on its held-out prompts: `python launch/evaluate.py --workdir=DIR`.

Or evaluates a Hugging Face folder on the prompts of a config: `--model=FOLDER --config=FILE`.
Prints one JSON object with mean@k, pass@k and maj@k of each data source.
"""

import dataclasses
import json

import jax
from absl import flags
from ml_collections import config_flags

from jaxrl_llm import program
from jaxrl_llm.config.bridge import from_config_dict, rl_config
from jaxrl_llm.data import datasets
from jaxrl_llm.learner import saved
from jaxrl_llm.learner.saved import SavedPolicy
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.trainer.evaluate import Evaluator

WORKDIR = flags.DEFINE_string("workdir", "", "Folder of a run.")
MODEL = flags.DEFINE_string("model", "", "Hugging Face folder, instead of a run.")
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "For --model: config with data and rewards; settings can be changed."
)
SAMPLES = flags.DEFINE_integer("samples_per_prompt", 1, "k of mean@k, pass@k and maj@k.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: greedy; must be above 0 for k > 1.")
PROMPTS = flags.DEFINE_integer("num_prompts", 0, "Number of prompts; 0: all.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the samples.")


def _load() -> SavedPolicy:
    if WORKDIR.value:
        return saved.from_run(WORKDIR.value)
    config = rl_config(from_config_dict(CONFIG.value))
    model = dataclasses.replace(config.model, path=MODEL.value)
    return saved.from_model(dataclasses.replace(config, model=model))


def main():
    if bool(MODEL.value) == bool(WORKDIR.value):
        program.refuse([("model", "give either --model or --workdir")])
    if bool(MODEL.value) != bool(CONFIG.value):
        message = "--model needs a config file with data and rewards; a run has its own"
        program.refuse([("config", message)])
    folder = WORKDIR.value or MODEL.value
    program.keep_compilations(folder)
    source = _load()
    wanted = dataclasses.replace(
        source.config.evaluation,
        samples_per_prompt=SAMPLES.value,
        temperature=TEMPERATURE.value,
        num_prompts=PROMPTS.value,
    )
    program.refuse(wanted.problems())
    config = dataclasses.replace(source.config, evaluation=wanted)
    held_out = datasets.load_dataset(config.data, source.models.tokenizer, "eval", config.seed)
    rewards = config.evaluation_rewards
    if rewards.models:
        message = f"{folder}: its rewards are models; set evaluation.functions"
        program.refuse([("workdir" if WORKDIR.value else "config", message)])
    only_functions = dataclasses.replace(rewards, cost_functions={}, cost_models={})
    with rewards_lib.Scorer(only_functions, {}) as scorer:
        key = jax.random.key(SEED.value)
        evaluate = Evaluator(config, source.sampler, held_out, scorer.score, key)
        weights = source.weights()
        found = evaluate(weights)
    print(json.dumps({"step": weights.version, "data": found}))


if __name__ == "__main__":
    program.run(main)
