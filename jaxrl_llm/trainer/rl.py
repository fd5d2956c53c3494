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
from jaxrl_llm.learner import batches, distillation, estimate, planned, predict, update
from jaxrl_llm.learner import replay as replay_lib
from jaxrl_llm.learner import source as source_lib
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.metrics import dumps, statistics
from jaxrl_llm.planning import devices as hardware
from jaxrl_llm.sharding import pools
from jaxrl_llm.trainer import prepare
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
        models, frozen, sampler, source, evaluate = prepared
        state = run.resume(state, source, models.packer)
        lessons_of = distillation.teaching(config, models, frozen)
        predictions_of = predict.predictor(config, models, frozen)
        estimates_of = estimate.estimator(config, models.mesh)
        learn = update.updater(config, models, frozen.base, state, source.meanwhile)
        has_signal = estimate.signal_check(config)
        devices, critic = pools.devices(models.meshes.values()), bool(state.critic.params)
        peak_flops = hardware.peak_flops(devices)
        weights = Weights(sampler.weights(state.policy.params), run.first)
        if run.evaluates(0):
            run.writer.write(0, evaluate(weights))

        for step in run.steps():
            clock = run.begin(step, state)
            sample_key, update_key = source_lib.step_keys(config.seed, step)

            # Sample and score.
            samples = source.take(weights, sample_key, clock)
            rollouts, rewards = samples.rollouts, samples.rewards  # [B, T], [B]

            # What teachers and models predict for those tokens.
            rollouts = lessons_of(rollouts, clock)  # lessons: [B, T, k]
            predictions, rollouts = predictions_of(state, rollouts, clock)  # each field [B, T]

            # Rewards become advantages. No model runs here.
            estimates, state, of_estimates = estimates_of(
                state, rollouts, rewards, predictions, clock
            )  # advantages, returns: [B, T]
            batch = batches.assemble(rollouts, predictions, estimates)

            # Learn, unless an alert forbids it or there is nothing to learn from.
            run.hold()
            of_rewards = statistics.of_rewards(rewards, rollouts.group_ids)
            of_updates: dict[str, float] = {}
            allowed = run.alerts.allow_update({**of_estimates, **of_rewards})
            if allowed and has_signal(of_rewards, estimates):
                state, of_updates = learn(step, state, rollouts, batch, update_key, clock)

            # Hand the new weights to the engine.
            weights = sampler.reshard(state.policy.params, weights, step, clock)
            source.meanwhile(weights.params)

            of_evaluation = evaluate(weights, clock) if run.evaluates(step) else {}
            of_tokens = functools.partial(
                dumps.of_tokens, rollouts, rewards, predictions, estimates, models.tokenizer
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
                    len(devices),
                    flops=learn.flops(rollouts.lengths),
                    peak_flops=peak_flops,
                    critic=critic,
                ),
                **statistics.of_memory(devices, run.planned_bytes),
                **seconds,
            }
            run.end(step, state, numbers, of_evaluation)
    return state


def check(
    config: RLConfig, workdir: str | os.PathLike[str], replay: Sequence[str | os.PathLike[str]] = ()
) -> RLConfig:
    """Checks all that `train` does before it begins; returns the config with its chosen sizes."""
    config = planned.settled(config, workdir)
    with Run(config, workdir) as run:
        prepare.checked(config, run, replay_lib.find(replay))
    return config
