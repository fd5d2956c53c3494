"""Evaluates a policy on held-out prompts."""

import contextlib
import dataclasses
import json

import jax

from jaxrl_llm import errors, program
from jaxrl_llm.agents.world import World
from jaxrl_llm.commands.options import Evaluate
from jaxrl_llm.data import datasets
from jaxrl_llm.learner import saved
from jaxrl_llm.learner.saved import SavedPolicy
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.rewards import truth_checks
from jaxrl_llm.trainer.evaluate import Evaluator


def _load(options: Evaluate) -> SavedPolicy:
    if options.workdir:
        return saved.from_run(options.workdir)
    assert options.config is not None  # as `Evaluate.rules` asks
    config = options.config.require_rl()
    model = dataclasses.replace(config.model, path=options.model)
    return saved.from_model(dataclasses.replace(config, model=model))


def main(options: Evaluate) -> None:
    folder = options.workdir or options.model
    program.keep_compilations(folder)
    source = _load(options)
    wanted = dataclasses.replace(
        source.config.evaluation,
        samples_per_prompt=options.samples_per_prompt,
        temperature=options.temperature,
        num_prompts=options.num_prompts,
    )
    errors.refuse(wanted.problems())
    config = dataclasses.replace(source.config, evaluation=wanted)
    rewards = config.evaluation_rewards
    if rewards.models:
        message = f"{folder}: its rewards are models; set evaluation.functions"
        errors.refuse([("workdir" if options.workdir else "config", message)])
    only_functions = dataclasses.replace(rewards, cost_functions={}, cost_models={})
    tokenizer, environments = source.models.tokenizer, config.judged_sources
    with contextlib.ExitStack() as stack:
        sampler, options_of = source.sampler, None
        if config.agent.is_used:
            world = stack.enter_context(World(config.agent, tokenizer, source.models.pictures))
            sampler, options_of = dataclasses.replace(sampler, world=world), world.options
        held_out = datasets.load_dataset(
            config.data, tokenizer, "eval", config.seed, options_of, source.models.pictures
        )
        held_out = truth_checks.readable({"eval": (held_out, only_functions)})["eval"]
        scorer = stack.enter_context(
            rewards_lib.Scorer(only_functions, {}, environments, bool(environments))
        )
        key = jax.random.key(options.seed)
        evaluate = Evaluator(config, sampler, held_out, scorer.score, key)
        weights = source.weights()
        found = evaluate(weights)
    print(json.dumps({"step": weights.version, "data": found}))
