"""Evaluates a run's policy on its held-out prompts: `python launch/evaluate.py --workdir=DIR`.

Prints one JSON object: mean@k, pass@k and maj@k of each data source.
"""

import dataclasses
import json

import jax
from absl import flags

from jaxrl_llm import program
from jaxrl_llm.data import datasets
from jaxrl_llm.learner import saved
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.trainer.evaluate import Evaluator
from jaxrl_llm.types import Weights

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
SAMPLES = flags.DEFINE_integer("samples_per_prompt", 1, "k of mean@k, pass@k and maj@k.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: greedy; needed above 0 for k > 1.")
PROMPTS = flags.DEFINE_integer("num_prompts", 0, "How many prompts; 0: all.")
SEED = flags.DEFINE_integer("seed", 0, "Of the samples.")


def main():
    program.keep_compilations(WORKDIR.value)
    policy = saved.load_policy(WORKDIR.value)
    wanted = dataclasses.replace(
        policy.config.evaluation,
        samples_per_prompt=SAMPLES.value,
        temperature=TEMPERATURE.value,
        num_prompts=PROMPTS.value,
    )
    program.refuse(wanted.problems())
    config = dataclasses.replace(policy.config, evaluation=wanted)
    held_out = datasets.load_dataset(config.data, policy.models.tokenizer, "eval", config.seed)
    rewards = config.evaluation_rewards
    if rewards.models:
        message = f"{WORKDIR.value}: this run's rewards are models; set evaluation.functions in it"
        program.refuse([("workdir", message)])
    only_functions = dataclasses.replace(rewards, cost_functions={}, cost_models={})
    with rewards_lib.build(only_functions, {}) as scorer:
        key = jax.random.key(SEED.value)
        evaluate = Evaluator(config, policy.sampler, held_out, scorer.score, key)
        found = evaluate(Weights(policy.sampler.weights(policy.params), policy.step))
    print(json.dumps({"step": policy.step, "data": found}))


if __name__ == "__main__":
    program.run(main)
