"""Reinforcement learning from rewards: the synchronous loop.

    repeat
        x ~ D,  y ~ pi_theta(. | x)            sample       learner/source.py, rollout/episodes.py
        r = R(x, y)                            score        rewards/base.py
        log pi_teacher             at (x, y)   teach        learner/distillation.py
    log pi_old, log pi_ref, V  at (x, y)   predict      learner/predict.py
        A = advantages(r, V)                   estimate     learner/estimate.py
        minibatches of (x, y, A)               batch        learner/batches.py
        theta <- theta - lr grad L(theta)      update       learner/update.py
        rollout weights <- theta               reshard      sharding/reshard.py

`config.algorithm` names everything that PPO, GRPO, RLOO and the others differ in. What surrounds
the loop of every job is in `run.py`.
"""

import functools
import os
from collections.abc import Sequence

from jaxrl_llm.config import RLConfig
from jaxrl_llm.learner import batches, planned
from jaxrl_llm.learner import replay as replay_lib
from jaxrl_llm.learner import source as source_lib
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.metrics import dumps, statistics
from jaxrl_llm.trainer import phases, prepare
from jaxrl_llm.trainer.layouts import Layouts
from jaxrl_llm.trainer.run import Run
from jaxrl_llm.types import Weights


def train(
    config: RLConfig, workdir: str | os.PathLike[str], replay: Sequence[str | os.PathLike[str]] = ()
) -> LearnerState:
    """Returns the learner state after `config.trainer.num_steps` steps.

    With `replay`, dumps of rollouts or folders of them, it samples nothing: a step learns from a
    dump, and the run ends with the last of them. The schedules stay those of the config.

    Resumes from the last checkpoint in `workdir`, which also holds metrics, rollouts and the config
    itself; a resumed run takes the same steps as an uninterrupted one. SIGTERM, SIGINT and alerts
    with action "stop" end it early, after a save.

    Raises:
      ConfigError: If the mesh does not fit the devices, a function of the user's cannot work, or
        `workdir` belongs to another run.
      OccupiedError: If another process is training in `workdir`.
      DataError, CheckpointError, RewardError: If rows, folders or reward functions cannot work.
      Interrupted: If it was asked to end before the last step.
    """
    config = planned.settled(config, workdir)
    dumps_to_replay = replay_lib.find(replay)
    with Run(config, workdir) as run:
        if dumps_to_replay:
            run.total = min(run.total, len(dumps_to_replay))
        prepared, state = prepare.rl(config, run, dumps_to_replay)
        state = run.resume(state, prepared.source, prepared.models.packer)
        layouts, critic = Layouts(config, workdir), bool(state.critic.params)
        tokenizer = prepared.models.tokenizer
        sampler, source, evaluate = prepared.sampler, prepared.source, prepared.evaluate
        phase = phases.of(prepared, state)
        weights = Weights(sampler.weights(state.policy.params), run.first)
        if run.evaluates(0):
            run.writer.write(0, evaluate(weights))

        for step in run.steps():
            # Another mesh or placement from this step on, if one is due.
            if layout := layouts.change(step):
                prepared, state = prepare.changed(layout, prepared, state)
                sampler, source, evaluate = prepared.sampler, prepared.source, prepared.evaluate
                phase = phases.of(prepared, state)
                weights = Weights(sampler.weights(state.policy.params), step - 1)
            clock = run.begin(step, state)
            sample_key, update_key = source_lib.step_keys(config.seed, step)

            # Sample and score.
            samples = source.take(weights, sample_key, clock)
            rollouts, rewards = samples.rollouts, samples.rewards  # [B, T], [B]
            sampler.release(weights)
            order = batches.order(config, len(rollouts.lengths), update_key)

            # What teachers and models predict for those tokens.
            rollouts = phase.lessons_of(rollouts, clock)  # lessons: [B, T, k]
            predictions, rollouts = phase.predictions_of(state, rollouts, clock)  # each [B, T]

            # Rewards become advantages. No model runs here.
            estimates, state, of_estimates = phase.estimates_of(
                state, rollouts, rewards, predictions, clock
            )  # advantages, returns: [B, T]
            batch = batches.assemble(rollouts, predictions, estimates)

            # Learn, unless an alert forbids it or there is nothing to learn from.
            run.hold()
            of_rewards = statistics.of_rewards(rewards, rollouts.group_ids)
            of_updates: dict[str, float] = {}
            allowed = run.alerts.allow_update({**of_estimates, **of_rewards})
            if allowed and phase.has_signal(of_rewards, estimates):
                state, of_updates = phase.learn(step, state, rollouts, batch, order, clock)

            # Hand the new weights to the engine.
            weights = sampler.reshard(state.policy.params, weights, step, clock)
            source.meanwhile(weights.params)

            of_evaluation = evaluate(weights, clock) if run.evaluates(step) else {}
            of_tokens = functools.partial(
                dumps.of_tokens, rollouts, rewards, predictions, estimates, tokenizer
            )
            run.writer.write_rollouts(step, rollouts, rewards, of_tokens)
            seconds = clock.seconds()
            numbers = {
                **of_rewards,
                **statistics.of_rollouts(
                    config, rollouts, rewards, predictions, estimates, critic=critic
                ),
                **of_updates,
                "training/updates_left_out": float(not of_updates),
                **of_estimates,
                **source.metrics(),
                **samples.engine.metrics(),
                **sampler.metrics(),
                **statistics.of_speed(
                    rollouts,
                    seconds,
                    len(phase.devices),
                    flops=phase.learn.flops(rollouts.lengths),
                    peak_flops=phase.peak_flops,
                    critic=critic,
                ),
                **statistics.of_memory(phase.devices, run.planned_bytes),
                **seconds,
            }
            run.end(step, state, numbers, of_evaluation)
            layouts.see(numbers)
    return state


def check(
    config: RLConfig, workdir: str | os.PathLike[str], replay: Sequence[str | os.PathLike[str]] = ()
) -> RLConfig:
    """Checks all that `train` does before it begins; returns the config with its chosen sizes."""
    config = planned.settled(config, workdir)
    with Run(config, workdir) as run:
        prepare.checked(config, run, replay_lib.find(replay))
    return config
