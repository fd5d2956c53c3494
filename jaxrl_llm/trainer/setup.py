"""Sets up an RL run: all checks first, then models are loaded or trained."""

import contextlib
import functools
import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from absl import logging

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import RLConfig
from jaxrl_llm.data import curriculum, datasets, prompt_stream
from jaxrl_llm.learner import distillation, job_models, predict, relayout
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.vision import feature_cache
from jaxrl_llm.learner.weights import FrozenModels, LearnerState
from jaxrl_llm.metrics import statistics
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.rewards import truth_checks
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.episode_runner import EpisodeEnvironment
from jaxrl_llm.rollout.session_host import SessionHost
from jaxrl_llm.sampling import async_schedule, dump_source
from jaxrl_llm.sampling import policy_sampler as policy_sampler_lib
from jaxrl_llm.sampling.async_schedule import AsyncSchedule
from jaxrl_llm.sampling.async_source import AsyncSource
from jaxrl_llm.sampling.policy_sampler import PolicySampler
from jaxrl_llm.sampling.source import RolloutSource, SyncSource
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.storage import files
from jaxrl_llm.trainer import relayout_schedule, supervised
from jaxrl_llm.trainer.agent_host import make_agent_host
from jaxrl_llm.trainer.evaluation import Evaluator
from jaxrl_llm.trainer.run import TrainingRun


class ValidatedRun(NamedTuple):
    """The results of the checks before a run."""

    models: Models
    training_set: datasets.Dataset
    held_out: datasets.Dataset
    planned_bytes: float
    world: EpisodeEnvironment | SessionHost | None  # of `config.agent`; None: single-turn


class RunContext(NamedTuple):
    """The parts of a run that do not depend on its layout."""

    run: TrainingRun
    replay: Sequence[pathlib.Path]  # dumps to train on
    training_set: datasets.Dataset
    held_out: datasets.Dataset
    world: EpisodeEnvironment | SessionHost | None
    scorer: rewards_lib.RolloutScorer
    eval_scorer: rewards_lib.RolloutScorer  # scores held-out answers


class RLSetup(NamedTuple):
    """All parts of a run that stay fixed within one layout."""

    config: RLConfig
    models: Models
    frozen: FrozenModels
    sampler: PolicySampler
    source: RolloutSource
    evaluate: Evaluator
    context: RunContext
    width: int  # T of all training rollouts [B, T]


def validate_run(
    config: RLConfig, exit_stack: contextlib.ExitStack, replay: Sequence[pathlib.Path] = ()
) -> ValidatedRun:
    """Checks everything a run needs and reads its rows; allocates and writes nothing.

    Processes of tools and environments are closed with `exit_stack`.
    """
    models = job_models.make_models(config, resolve_sizes.resolved_meshes(config))
    job_models.check_stop_tokens(config, models.policy.shape)
    policy_sampler_lib.check(config, models)
    planned_bytes = resolve_sizes.check_memory(config, mesh_lib.run_devices())
    weights_lib.check_rates(config, models)
    weights_lib.check_folders(config, models, weights_lib.role_folders(config, models))
    distillation.check_teachers(config, models)
    for warning in requirements.warnings(config):
        logging.warning("%s", warning)
    world: EpisodeEnvironment | SessionHost | None = None
    options_of = None
    if config.agent.is_used:
        image_processor = (
            None
            if feature_cache.unsupported_settings(config, bool(replay))
            else models.image_processor
        )
        host = make_agent_host(config, models, image_processor)
        exit_stack.enter_context(host)
        world, options_of = host, host.template_options
    load = functools.partial(
        datasets.load_dataset,
        config.data,
        models.tokenizer,
        seed=config.seed,
        options_of=options_of,
        image_processor=models.image_processor,
    )
    training_set = load("train")
    curriculum.check_curriculum(config.curriculum, training_set.prompts)
    feature_cache.check_image_support(config, training_set.prompts, bool(replay))
    supervised.check_preference_pairs(config, models.tokenizer)
    held_out = datasets.Dataset(())
    if config.evaluation.is_enabled:
        held_out = load("eval")
    prompts = itertools.chain(training_set.prompts, held_out.prompts)
    policy_sampler_lib.check_strict_tools(config, models, prompts)
    splits = truth_checks.without_unreadable_truths({
        "train": (training_set, config.rewards),
        "eval": (held_out, config.evaluation_rewards),
    })  # fmt: skip
    training_set, held_out = splits["train"], splits["eval"]
    rewards_lib.check_rewards(config.rewards, training_set.prompts, config.sources_without_rewards)
    sources = [prompt.data_source for prompt in held_out.prompts]
    locations = [prompt.where for prompt in held_out.prompts]
    rewards_lib.check_sources(
        config.evaluation_rewards, sources, config.environment_sources, locations
    )
    if config.evaluation.functions:
        rewards_lib.check_rewards(config.evaluation_rewards, held_out.prompts)
    for text in relayout_schedule.layouts_by_step(config).values():
        relayout_schedule.config_with_layout(config, text)
    if config.trainer.schedule == "replay":
        async_schedule.read_schedule(files.run_path(config.trainer.schedule_file))
    policy = models.policy
    dump_source.check_dumps(replay, config, policy.shape.vocab_size, policy.suppressed_tokens)
    return ValidatedRun(models, training_set, held_out, planned_bytes, world)


def set_up_run(
    config: RLConfig, run: TrainingRun, replay: Sequence[pathlib.Path] = ()
) -> tuple[RLSetup, LearnerState]:
    """The fixed parts of a run and its initial learner state; raises as `set_up_run.train`.

    All checks come before anything is allocated or written. With dumps in `replay` the rollouts
    come from them.
    """
    models, training_set, held_out, planned_bytes, world = validate_run(config, run, replay)
    run.claim(models, training_set, held_out, planned_bytes=planned_bytes)

    # Initial weights of policy, reference, critic and reward models.
    policy = supervised.warm_start(config, models, run)
    reward_params = supervised.reward_models(config, models, policy, run)
    frozen = weights_lib.load_frozen(config, models, policy, reward_params)
    state = weights_lib.initial_state(config, models, policy)

    model_scorers = predict.model_scorers(models, frozen)
    has_environments = config.agent.gives_rewards
    scorer = run.enter_context(
        rewards_lib.RolloutScorer(
            config.rewards, model_scorers, config.sources_without_rewards, has_environments
        )
    )
    judge = scorer
    if config.evaluation.functions:
        judge = run.enter_context(
            rewards_lib.RolloutScorer(
                config.evaluation_rewards, {}, config.environment_sources, has_environments
            )
        )
    parts = RunContext(run, replay, training_set, held_out, world, scorer, judge)
    return _prepare_layout(config, models, frozen, parts), state


def relayout_run(
    config: RLConfig, prepared: RLSetup, state: LearnerState
) -> tuple[RLSetup, LearnerState]:
    """Moves the run to the layout of `config`, with the result of a restart from a checkpoint.

    To be called between steps. Consumes the old weights; logs time and memory.
    """
    parts, start = prepared.context, time.perf_counter()
    parts.run.wait_for_save()
    prepared.sampler.close()
    models = job_models.make_models(config, resolve_sizes.resolved_meshes(config))
    state = relayout.relayout_state(config, models, state)
    frozen = relayout.relayout_frozen(config, models, prepared.frozen)
    parts.scorer.set_model_scorers(predict.model_scorers(models, frozen))
    relaid_run = _prepare_layout(config, models, frozen, parts)
    parts.run.replace_sources(relaid_run.source, models.packer)
    jax.block_until_ready(state)
    memory = statistics.memory_metrics(device_pools.all_devices(models.meshes.values()))
    peaks = {name: value for name, value in memory.items() if "max_" in name}
    logging.info(
        "layout %s: in %.1f s; memory in GiB: %s",
        {role: dict(mesh.shape) for role, mesh in models.meshes.items()},
        time.perf_counter() - start,
        ", ".join(f"{name} {value:.2f}" for name, value in peaks.items()),
    )
    return relaid_run, state


def _prepare_layout(
    config: RLConfig, models: Models, frozen: FrozenModels, parts: RunContext
) -> RLSetup:
    """Builds the parts of a run that depend on its layout."""
    run, score = parts.run, parts.scorer.score
    begin_scoring = parts.scorer.start_early if parts.scorer.can_start_early else None
    longest = max(parts.training_set.max_prompt_tokens, parts.held_out.max_prompt_tokens)
    if config.agent.harness:  # it writes its own prompts
        longest = config.max_sequence_tokens - 1
    policy_sampler = policy_sampler_lib.make_sampler(
        config, models, frozen.base_params, parts.world, longest
    )
    run.callback(policy_sampler.close)
    prompts = prompt_stream.PromptIterator(
        parts.training_set, config.data, config.seed, config.curriculum
    )
    width = config.max_sequence_tokens
    if parts.world is None:
        max_response = config.rollout.max_response_tokens
        width = episodes.sequence_width(prompts.max_prompt_tokens, max_response, width)
    source: RolloutSource = SyncSource(config, policy_sampler, prompts, score, begin_scoring)
    if parts.replay:
        vocab_size, suppressed = models.policy.shape.vocab_size, models.policy.suppressed_tokens
        source = dump_source.DumpSource(parts.replay, config, vocab_size, width, suppressed)
    elif config.trainer.sampling == "async":
        run_schedule = AsyncSchedule.from_config(config, run.workdir)
        source = AsyncSource(config, policy_sampler, prompts, score, run_schedule, begin_scoring)
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31)
    evaluate = Evaluator(config, policy_sampler, parts.held_out, parts.eval_scorer.score, key)
    return RLSetup(config, models, frozen, policy_sampler, source, evaluate, parts, width)
