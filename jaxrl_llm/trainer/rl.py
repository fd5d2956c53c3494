"""Reinforcement learning from rewards: the synchronous loop.

    repeat
        x ~ D                                  prompts      data/datasets.py
        y ~ pi_theta(. | x)                    rollout      rollout/agent.py
        r = R(x, y)                            reward       rewards/base.py
        log pi_old, log pi_ref, V  at (x, y)   predict      learner/experience.py
        A = advantages(r, V)                   estimate     algorithms/advantages.py
        theta <- theta - lr grad L(theta)      update       learner/update.py
        rollout weights <- theta               reshard      sharding/reshard.py

Everything the algorithms differ in is named by `config.algorithm`; this file is the same
for PPO, GRPO, RLOO and the others.
"""

import functools
import os
import pathlib
from typing import Any

import jax
from absl import logging

from jaxrl_llm import checkpoint
from jaxrl_llm.algorithms import custom
from jaxrl_llm.config import Config
from jaxrl_llm.config.folder import check_workdir, claim_workdir
from jaxrl_llm.console import screen
from jaxrl_llm.data import datasets
from jaxrl_llm.folder_lock import FolderLock
from jaxrl_llm.learner import (
    automatic,
    collection,
    experience,
    planned,
    replicas,
    throughput,
    update,
)
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.metrics import alerts as alerts_lib
from jaxrl_llm.metrics import statistics
from jaxrl_llm.metrics import writer as writer_lib
from jaxrl_llm.metrics.alerts import Alerts
from jaxrl_llm.metrics.clock import Clock, Profiler
from jaxrl_llm.metrics.writer import Writer
from jaxrl_llm.models import finite
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.sharding import hosts
from jaxrl_llm.trainer import report, supervised
from jaxrl_llm.trainer.evaluate import Evaluator, judge
from jaxrl_llm.trainer.interruption import Interruption


def train(config: Config, workdir: str | os.PathLike[str]) -> roles_lib.LearnerState:
    """Trains a policy for `config.trainer.num_steps` steps.

    Resumes from the last checkpoint in `workdir` if there is one; a resumed run takes the
    same steps as an uninterrupted one. SIGTERM, SIGINT and alerts that say so end it early,
    after a save.

    Args:
      config: The validated run.
      workdir: Folder for checkpoints, metrics, rollouts and the config itself.

    Returns:
      The learner state after the last step.

    Raises:
      ConfigError: If the mesh does not fit the devices, a function of the user's cannot work, or
        `workdir` belongs to another run.
      OccupiedError: If another process is training in `workdir`.
      DataError, CheckpointError, RewardError: If rows, folders or reward functions cannot work.
      Interrupted: If it was asked to end before the last step.
    """
    with Interruption(config.checkpoint.grace_s) as interruption, FolderLock() as lock:
        return _train(config, pathlib.Path(workdir), interruption, lock)


def _train(
    config: Config, workdir: pathlib.Path, interruption: Interruption, lock: FolderLock
) -> roles_lib.LearnerState:
    for warning in config.warnings():
        logging.warning("%s", warning)
    total = config.trainer.num_steps

    # Nothing is allocated before everything that can be checked has been.
    check_workdir(config, workdir)
    roles = roles_lib.build(automatic.repeated(config, workdir))
    config = automatic.with_sizes_of(config, roles.config)
    budget = planned.check(config, jax.devices())
    training_set = datasets.load_dataset(config.data, roles.tokenizer, "train", config.seed)
    held_out = datasets.Dataset(())
    if config.evaluation.wanted:
        held_out = datasets.load_dataset(config.data, roles.tokenizer, "eval", config.seed)
    prompts = datasets.PromptIterator(training_set, config.data, config.seed)
    roles_lib.check_folders(roles)
    custom.check(config.algorithm)
    rewards_lib.check(config.rewards)
    rewards_lib.check(config.evaluation_rewards)
    writer_lib.check(config.metrics)
    alerts_lib.check(config.alerts)
    replicas.check_start(config, (training_set, held_out))
    if hosts.is_first():
        lock.take(workdir)
    claim_workdir(config, workdir, write=hosts.is_first())
    saver = checkpoint.Saver(workdir / "checkpoints", config.checkpoint)
    tell_end = report.opened(roles, budget, workdir)

    # Policy, reference, critic, reward model: what each begins as.
    policy = supervised.warm_start(roles, roles_lib.initial_policy(roles), workdir)
    trained = supervised.reward_models(roles, policy, workdir)
    roles = roles_lib.with_frozen_models(roles, policy, trained)
    state = roles_lib.initial_state(roles, policy)
    del policy, trained
    first, extra = 0, dict[str, Any]()
    if saver.latest_step():
        with screen.work("reading the last checkpoint"):
            state, extra, first = saver.restore(roles_lib.abstract(state))
        finite.check(
            state,
            f"{workdir}/checkpoints/{first}",
            "remove this step to go on from the one before it, or start in another --workdir",
        )
        prompts.set_state(extra["prompts"])
        roles.layout.set_state(extra["layout"])
        logging.info("resumed after step %d", first)

    predict = experience.predictor(roles)
    estimate = experience.estimator(roles)
    learn = update.updater(roles, state)
    rollout_params = roles.rollout_layout(state.policy.params)
    root = jax.random.key(config.seed)
    eval_key = jax.random.fold_in(root, 2**31)  # the same at every evaluation

    with (
        rewards_lib.build(config.rewards, experience.model_scorers(roles)) as scorer,
        judge(config, scorer) as score_held_out,
        Writer(
            workdir, config.metrics, first + bool(first), total, extra.get("metrics", {})
        ) as writer,
        Alerts(config.alerts, workdir, interruption.request) as alerts,
        Profiler(config.profiler, workdir / "profile") as profiler,
    ):
        alerts.set_state(extra.get("alerts", {}))
        tracked: dict[str, Any] = {
            "prompts": prompts,
            "layout": roles.layout,
            "alerts": alerts,
            "metrics": writer,
        }
        evaluator = Evaluator(roles, held_out, score_held_out)
        if first == 0 and evaluator.due(0):
            writer.write(0, evaluator.run(rollout_params, eval_key))

        for step in range(first + 1, total + 1):
            clock = Clock()
            positions = {name: thing.get_state() for name, thing in tracked.items()}
            interruption.resume_point(
                step - 1, functools.partial(saver.ensure, step - 1, state, positions)
            )
            profiler.begin(step)
            rollout_key, shuffle_key = jax.random.split(jax.random.fold_in(root, step))

            # Sample and score. One wave of prompts; more when the algorithm drops groups.
            rollouts, rewards = collection.collect(
                roles, rollout_params, prompts, scorer.score, rollout_key, clock
            )  # [B, T], [B]
            of_engine = statistics.of_engine(*roles.engine.speed())
            laid_out = experience.minibatches(roles, rollouts, shuffle_key)

            # What the models say about those tokens.
            predictions = predict(state, rollouts, clock)  # each field [B, T]

            # Turn rewards into advantages. No model runs here.
            with clock("adv"):
                estimates, state, of_estimates = estimate(
                    state, rollouts, rewards, predictions
                )  # advantages, returns: [B, T]

            # Learn, unless an alert says that there is nothing good to learn.
            saver.release()
            interruption.hold()
            allowed = alerts.allow_update(rewards, of_estimates)
            with clock("update") as watch:
                batch = learn.spread(experience.assemble(rollouts, predictions, estimates))
                updates = []
                for plan, key in laid_out if allowed else ():
                    state, of_update = learn(
                        state,
                        batch,
                        plan,
                        key,
                        train_policy=step > config.algorithm.critic_warmup_steps,
                    )
                    of_layout = statistics.of_balance(rollouts.lengths, roles.layout.shares(plan))
                    updates.append({**watch(of_update), **of_layout})
                of_updates = statistics.mean(updates)
                replicas.check_learned(step, state)

            # Hand the new weights to the engine.
            with clock("reshard") as watch:
                rollout_params = watch(roles.rollout_layout(state.policy.params, rollout_params))

            if evaluator.due(step):
                with clock("testing"):
                    of_evaluation = evaluator.run(rollout_params, eval_key)
            else:
                of_evaluation = {}
            seconds = clock.seconds()
            of_speed = throughput.of_step(roles, rollouts, seconds)
            on_host = {**of_updates, **of_speed, **seconds}
            of_alerts = alerts.check(step, rewards, of_estimates, on_host)
            if writer.due(step) or of_evaluation or any(of_alerts.values()):
                writer.write(
                    step,
                    statistics.of_rollouts(config, rollouts, rewards, predictions, estimates),
                    of_updates,
                    of_estimates,
                    of_evaluation,
                    of_engine,
                    roles.resharder.report().metrics(),
                    of_speed,
                    budget.metrics(jax.local_devices()),
                    seconds,
                    of_alerts,
                )
                writer.write_rollouts(step, rollouts, rewards)

            # Last, so that a step that was saved is a step whose numbers were written.
            due = saver.due(step, total, {**of_updates, **of_evaluation})
            if interruption.outlasts_grace(saver.saving) or due:
                positions = {name: thing.get_state() for name, thing in tracked.items()}
                saver.save(step, state, positions)

    with screen.work("saving the last step"):
        saver.close()
    tell_end()
    return state
