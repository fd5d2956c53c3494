"""Evaluates a policy on held-out prompts."""

import contextlib
import dataclasses
import importlib
import json

import jax

from jaxrl_llm import errors, program, saved_policy
from jaxrl_llm.commands.options import EvaluateOptions
from jaxrl_llm.data import datasets
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.rewards import truth_checks
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.saved_policy import SavedPolicy
from jaxrl_llm.trainer.agent_host import make_agent_host
from jaxrl_llm.trainer.evaluation import Evaluator


def _load(options: EvaluateOptions) -> SavedPolicy:
    if options.workdir:
        return saved_policy.policy_from_run(options.workdir)
    assert options.config is not None  # checked by `EvaluateOptions.rules`
    config = options.config.require_rl()
    model = dataclasses.replace(config.model, path=options.model)
    return saved_policy.policy_from_model(dataclasses.replace(config, model=model))


def main(options: EvaluateOptions) -> None:
    if options.tasks:
        importlib.import_module("jaxrl_llm.commands.lm_eval_tasks").main(options)
        return
    folder = options.workdir or options.model
    program.enable_compilation_cache(options.workdir, options.model)
    source = _load(options)
    evaluation = dataclasses.replace(
        source.config.evaluation,
        samples_per_prompt=options.samples_per_prompt,
        temperature=options.temperature,
        num_prompts=options.num_prompts,
    )
    errors.raise_flag_problems(evaluation.problems())
    config = dataclasses.replace(source.config, evaluation=evaluation)
    rewards = config.evaluation_rewards
    if rewards.models:
        message = f"{folder}: its rewards are models; set evaluation.functions"
        errors.raise_flag_problems([("workdir" if options.workdir else "config", message)])
    only_functions = dataclasses.replace(rewards, cost_functions={}, cost_models={})
    tokenizer, environments = source.models.tokenizer, config.environment_sources
    with contextlib.ExitStack() as stack:
        sampler, chat_options = source.sampler, None
        if config.agent.is_used:
            world = make_agent_host(config, source.models, source.models.image_processor)
            stack.enter_context(world)
            sampler = dataclasses.replace(sampler, world=world)
            chat_options = world.template_options
        held_out = datasets.load_dataset(
            config.data, tokenizer, "eval", config.seed, chat_options, source.models.image_processor
        )
        held_out = truth_checks.without_unreadable_truths({"eval": (held_out, only_functions)})[
            "eval"
        ]
        policy_sampler.check_strict_tools(config, source.models, held_out.prompts)
        scorer = stack.enter_context(
            rewards_lib.RolloutScorer(only_functions, {}, environments, bool(environments))
        )
        key = jax.random.key(options.seed)
        evaluate = Evaluator(config, sampler, held_out, scorer.score, key)
        weights = source.weights()
        metrics = evaluate(weights)
    print(json.dumps({"step": weights.version, "data": metrics}))
