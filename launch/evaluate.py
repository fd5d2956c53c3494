"""Evaluates a run's policy on its held-out prompts: `python launch/evaluate.py --workdir=DIR`.

Or the model of a Hugging Face folder on those of a config: `--model=FOLDER --config=FILE`. Prints
one JSON object: mean@k, pass@k and maj@k of each data source.
"""

import dataclasses
import json

import jax
from absl import flags
from ml_collections import config_flags

from jaxrl_llm import program
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.data import datasets
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.learner import saved
from jaxrl_llm.learner.roles import Roles
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.trainer.evaluate import Evaluator

WORKDIR = flags.DEFINE_string("workdir", "", "Folder of a run.")
MODEL = flags.DEFINE_string("model", "", "Hugging Face folder, in the place of a run.")
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "For --model: whose data and rewards; may be changed as for a run."
)
SAMPLES = flags.DEFINE_integer("samples_per_prompt", 1, "k of mean@k, pass@k and maj@k.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: greedy; needed above 0 for k > 1.")
PROMPTS = flags.DEFINE_integer("num_prompts", 0, "How many prompts; 0: all.")
SEED = flags.DEFINE_integer("seed", 0, "Of the samples.")


def _load() -> tuple[Roles, Params, int]:
    if WORKDIR.value:
        return saved.load_policy(WORKDIR.value)
    config = from_config_dict(CONFIG.value)
    model = dataclasses.replace(config.model, path=MODEL.value)
    roles = saved.model_roles(dataclasses.replace(config, model=model))
    return roles, roles_lib.initial_policy(roles), 0


def main():
    if bool(MODEL.value) == bool(WORKDIR.value):
        program.refuse([("model", "give either --model or --workdir")])
    if bool(MODEL.value) != bool(CONFIG.value):
        message = "--model needs a config file: whose data and rewards; a run has its own"
        program.refuse([("config", message)])
    source = WORKDIR.value or MODEL.value
    program.keep_compilations(source)
    roles, params, step = _load()
    wanted = dataclasses.replace(
        roles.config.evaluation,
        samples_per_prompt=SAMPLES.value,
        temperature=TEMPERATURE.value,
        num_prompts=PROMPTS.value,
    )
    program.refuse(wanted.problems())
    roles = dataclasses.replace(roles, config=dataclasses.replace(roles.config, evaluation=wanted))
    config = roles.config
    held_out = datasets.load_dataset(config.data, roles.tokenizer, "eval", config.seed)
    rewards = config.evaluation_rewards
    if rewards.models:
        message = f"{source}: its rewards are models; set evaluation.functions"
        program.refuse([("workdir" if WORKDIR.value else "config", message)])
    only_functions = dataclasses.replace(rewards, cost_functions={}, cost_models={})
    with rewards_lib.build(only_functions, {}) as scorer:
        evaluator = Evaluator(roles, held_out, scorer.score)
        found = evaluator.run(roles.rollout_layout(params), jax.random.key(SEED.value))
    print(json.dumps({"step": step, "data": found}))


if __name__ == "__main__":
    program.run(main)
