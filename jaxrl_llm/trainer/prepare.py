"""What an RL run begins with: all checks first, then models are read or trained."""

import contextlib
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
from absl import logging

from jaxrl_llm.agents.world import World
from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.data import curriculum, datasets, prompt_stream
from jaxrl_llm.learner import distillation, planned, predict, sampler, schedule
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import replay as replay_lib
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.ahead import SampledAhead
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.sampler import Sampler
from jaxrl_llm.learner.schedule import Schedule
from jaxrl_llm.learner.source import SampledNow, Source
from jaxrl_llm.learner.weights import Frozen, LearnerState
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.trainer import supervised
from jaxrl_llm.trainer.evaluate import Evaluator
from jaxrl_llm.trainer.run import Run


class Checked(NamedTuple):
    """What the checks before a run found."""

    models: Models
    training_set: datasets.Dataset
    held_out: datasets.Dataset
    planned_bytes: float
    world: World | None  # what answers the policy; None: nothing does


class Prepared(NamedTuple):
    """The fixed side of a run."""

    models: Models
    frozen: Frozen
    sampler: Sampler
    source: Source
    evaluate: Evaluator


def checked(
    config: RLConfig, open_until: contextlib.ExitStack, replay: Sequence[pathlib.Path] = ()
) -> Checked:
    """Checks all that a run needs, and reads its rows; allocates and writes nothing.

    Processes of tools and environments end with `open_until`.
    """
    models = models_lib.of_job(config, planned.meshes(config))
    models_lib.check_stop_tokens(config, models.policy.shape)
    planned_bytes = planned.check(config, jax.devices())
    weights_lib.check_folders(config, models)
    distillation.check(config, models)
    for warning in needs.warnings(config):
        logging.warning("%s", warning)
    world, options_of = None, None
    if config.agent.is_used:
        world = open_until.enter_context(World(config.agent, models.tokenizer))
        options_of = world.options
    load = functools.partial(
        datasets.load_dataset,
        config.data,
        models.tokenizer,
        seed=config.seed,
        options_of=options_of,
    )
    training_set = load("train")
    curriculum.check(config.curriculum, training_set.prompts)
    supervised.check_pairs(config)
    held_out = datasets.Dataset(())
    if config.evaluation.wanted:
        held_out = load("eval")
    rewards_lib.check(config.rewards, training_set.prompts, config.taught_sources)
    sources = [prompt.data_source for prompt in held_out.prompts]
    rewards_lib.check_sources(config.evaluation_rewards, sources, config.judged_sources)
    if config.evaluation.functions:
        rewards_lib.check(config.evaluation_rewards, held_out.prompts)
    if config.trainer.schedule == "replay":
        schedule.read(pathlib.Path(config.trainer.schedule_file))
    replay_lib.check(replay, config, models.policy.shape.vocab_size)
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
    samples = sampler.build(config, models, frozen.base, world)
    prompts = prompt_stream.PromptIterator(
        training_set, config.data, config.seed, config.curriculum
    )
    source: Source = SampledNow(config, samples, prompts, scorer.score)
    if config.trainer.sampling == "ahead" and not replay:
        source = SampledAhead(
            config, samples, prompts, scorer.score, Schedule.of(config, run.workdir)
        )
    if replay:
        source = replay_lib.Replayed(replay, config, models.policy.shape.vocab_size)
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31)
    evaluate = Evaluator(config, samples, held_out, judge.score, key)
    return Prepared(models, frozen, samples, source, evaluate), state
