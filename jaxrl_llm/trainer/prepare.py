"""What an RL run begins with: all checks first, then models are read or trained."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from absl import logging

from jaxrl_llm.agents.world import World
from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.data import curriculum, datasets, prompt_stream
from jaxrl_llm.learner import distillation, gallery, layout, planned, predict, sampler, schedule
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import replay as replay_lib
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.ahead import SampledAhead
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.sampler import Sampler
from jaxrl_llm.learner.schedule import Schedule
from jaxrl_llm.learner.source import SampledNow, Source
from jaxrl_llm.learner.weights import Frozen, LearnerState
from jaxrl_llm.metrics import statistics
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.rewards import truth_checks
from jaxrl_llm.rollout import episodes
from jaxrl_llm.sharding import pools
from jaxrl_llm.trainer import layouts, supervised
from jaxrl_llm.trainer.evaluate import Evaluator
from jaxrl_llm.trainer.run import Run


class Checked(NamedTuple):
    """What the checks before a run found."""

    models: Models
    training_set: datasets.Dataset
    held_out: datasets.Dataset
    planned_bytes: float
    world: World | None  # what answers the policy; None: nothing does


class Parts(NamedTuple):
    """What a run has whatever its layout is."""

    run: Run
    replay: Sequence[pathlib.Path]  # dumps that are learned from
    training_set: datasets.Dataset
    held_out: datasets.Dataset
    world: World | None
    scorer: rewards_lib.Scorer
    judge: rewards_lib.Scorer  # of held-out answers


class Prepared(NamedTuple):
    """The fixed side of a run, while its layout lasts."""

    config: RLConfig
    models: Models
    frozen: Frozen
    sampler: Sampler
    source: Source
    evaluate: Evaluator
    parts: Parts
    width: int  # of all rollouts [B, T] of training


def checked(
    config: RLConfig, open_until: contextlib.ExitStack, replay: Sequence[pathlib.Path] = ()
) -> Checked:
    """Checks all that a run needs, and reads its rows; allocates and writes nothing.

    Processes of tools and environments end with `open_until`.
    """
    models = models_lib.of_job(config, planned.meshes(config))
    models_lib.check_stop_tokens(config, models.policy.shape)
    planned_bytes = planned.check(config, jax.devices())
    weights_lib.check_folders(config, models, weights_lib.folders_of_roles(config, models))
    distillation.check(config, models)
    for warning in needs.warnings(config):
        logging.warning("%s", warning)
    world, options_of = None, None
    if config.agent.is_used:
        pictures = None if gallery.refused(config, bool(replay)) else models.pictures
        world = open_until.enter_context(World(config.agent, models.tokenizer, pictures))
        options_of = world.options
    load = functools.partial(
        datasets.load_dataset,
        config.data,
        models.tokenizer,
        seed=config.seed,
        options_of=options_of,
        pictures=models.pictures,
    )
    training_set = load("train")
    curriculum.check(config.curriculum, training_set.prompts)
    gallery.check(config, training_set.prompts, bool(replay))
    supervised.check_pairs(config, models.tokenizer)
    held_out = datasets.Dataset(())
    if config.evaluation.wanted:
        held_out = load("eval")
    splits = truth_checks.readable({
        "train": (training_set, config.rewards),
        "eval": (held_out, config.evaluation_rewards),
    })  # fmt: skip
    training_set, held_out = splits["train"], splits["eval"]
    rewards_lib.check(config.rewards, training_set.prompts, config.taught_sources)
    sources = [prompt.data_source for prompt in held_out.prompts]
    wheres = [prompt.where for prompt in held_out.prompts]
    rewards_lib.check_sources(config.evaluation_rewards, sources, config.judged_sources, wheres)
    if config.evaluation.functions:
        rewards_lib.check(config.evaluation_rewards, held_out.prompts)
    for text in layouts.scheduled(config).values():
        layouts.checked(config, text)
    if config.trainer.schedule == "replay":
        schedule.read(pathlib.Path(config.trainer.schedule_file))
    policy = models.policy
    replay_lib.check(replay, config, policy.shape.vocab_size, policy.suppressed_tokens)
    return Checked(models, training_set, held_out, planned_bytes, world)


def rl(
    config: RLConfig, run: Run, replay: Sequence[pathlib.Path] = ()
) -> tuple[Prepared, LearnerState]:
    """Returns the fixed side of a run and the state that RL begins with; raises as `rl.train`.

    All checks come before anything is allocated or written. The samples are those of the dumps
    `replay`, if there are any.
    """
    models, training_set, held_out, planned_bytes, world = checked(config, run, replay)
    run.claim(models, training_set, held_out, planned_bytes=planned_bytes)

    # Policy, reference, critic, reward models: what each begins as.
    policy = supervised.warm_start(config, models, run)
    trained = supervised.reward_models(config, models, policy, run)
    frozen = weights_lib.frozen(config, models, policy, trained)
    state = weights_lib.initial_state(config, models, policy)

    model_scorers = predict.model_scorers(models, frozen)
    environments = bool(config.agent.environments)
    scorer = run.enter_context(
        rewards_lib.Scorer(config.rewards, model_scorers, config.taught_sources, environments)
    )
    judge = scorer
    if config.evaluation.functions:
        judge = run.enter_context(
            rewards_lib.Scorer(config.evaluation_rewards, {}, config.judged_sources, environments)
        )
    parts = Parts(run, replay, training_set, held_out, world, scorer, judge)
    return _on(config, models, frozen, parts), state


def changed(
    config: RLConfig, prepared: Prepared, state: LearnerState
) -> tuple[Prepared, LearnerState]:
    """Returns the run in the layout of `config`, as a restart from a checkpoint would have it.

    To be called between two steps. Consumes the old weights; logs its time and memory.
    """
    parts, began = prepared.parts, time.perf_counter()
    parts.run.wait_for_save()
    models = models_lib.of_job(config, planned.meshes(config))
    state = layout.moved_state(config, models, state)
    frozen = layout.moved_frozen(config, models, prepared.frozen)
    parts.scorer.use(predict.model_scorers(models, frozen))
    found = _on(config, models, frozen, parts)
    parts.run.replace(found.source, models.packer)
    jax.block_until_ready(state)
    memory = statistics.of_memory(pools.devices(models.meshes.values()))
    peaks = {name: value for name, value in memory.items() if "max_" in name}
    logging.info(
        "layout %s: in %.1f s; memory in GiB: %s",
        {role: dict(mesh.shape) for role, mesh in models.meshes.items()},
        time.perf_counter() - began,
        ", ".join(f"{name} {value:.2f}" for name, value in peaks.items()),
    )
    return found, state


def _on(config: RLConfig, models: Models, frozen: Frozen, parts: Parts) -> Prepared:
    """Returns what a layout has."""
    run, score = parts.run, parts.scorer.score
    begin = parts.scorer.begin if parts.scorer.begins_early else None
    longest = max(parts.training_set.longest, parts.held_out.longest)
    samples = sampler.build(config, models, frozen.base, parts.world, longest)
    prompts = prompt_stream.PromptIterator(
        parts.training_set, config.data, config.seed, config.curriculum
    )
    width = config.max_sequence_tokens
    if parts.world is None:
        response = config.rollout.max_response_tokens
        width = episodes.sequence_width(prompts.longest, response, width)
    source: Source = SampledNow(config, samples, prompts, score, begin)
    if parts.replay:
        vocab_size, suppressed = models.policy.shape.vocab_size, models.policy.suppressed_tokens
        source = replay_lib.Replayed(parts.replay, config, vocab_size, width, suppressed)
    elif config.trainer.sampling == "async":
        schedule_of_run = Schedule.of(config, run.workdir)
        source = SampledAhead(config, samples, prompts, score, schedule_of_run, begin)
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31)
    evaluate = Evaluator(config, samples, parts.held_out, parts.judge.score, key)
    return Prepared(config, models, frozen, samples, source, evaluate, parts, width)
