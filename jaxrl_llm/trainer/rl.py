"""Reinforcement learning from rewards: the training loop.

    repeat
        x ~ D,  y ~ pi_theta(. | x)            sample       sampling/source.py, rollout/episodes.py
        r = R(x, y)                            score        rewards/base.py
        log pi_teacher             at (x, y)   teach        learner/distillation.py
        log pi_old, log pi_ref, V  at (x, y)   predict      learner/predict.py
        A = advantages(r, V)                   estimate     learner/estimate.py
        minibatches of (x, y, A)               batch        learner/batches.py
        theta <- theta - lr grad L(theta)      update       learner/update.py
        rollout weights <- theta               reshard      sharding/reshard.py

`config.algorithm` sets everything in which PPO, GRPO, RLOO and the others differ. Checkpoints,
metrics and interruption, common to all jobs, are in `run.py`.
"""

import functools
import os
from collections.abc import Sequence

from jaxrl_llm.config import RLConfig
from jaxrl_llm.learner import batches
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.metrics import rollout_dump, statistics
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.sampling import dump_source
from jaxrl_llm.sampling import source as source_lib
from jaxrl_llm.trainer import setup, step_functions
from jaxrl_llm.trainer.relayout_schedule import RelayoutSchedule
from jaxrl_llm.trainer.run import TrainingRun
from jaxrl_llm.types import Weights


def train(
    config: RLConfig, workdir: str | os.PathLike[str], replay: Sequence[str | os.PathLike[str]] = ()
) -> LearnerState:
    """Trains for `config.trainer.num_steps` steps; returns the learner state.

    With `replay`, rollout dumps or folders of them, nothing is sampled: each step trains on one
    dump, and the run ends with the last. Schedules still follow the config.

    Resumes from the last checkpoint in `workdir`, which also holds metrics, rollouts and the
    config; a resumed run takes the same steps as an uninterrupted one. SIGTERM, SIGINT and alerts
    with action "stop" end it early, after a checkpoint.

    Raises:
      ConfigError: If the mesh does not fit the devices, a user function cannot work, or
        `workdir` belongs to another run.
      OccupiedError: If another process is training in `workdir`.
      DataError, CheckpointError, RewardError: If rows, folders or reward functions cannot work.
      Interrupted: If it was asked to end before the last step.
    """
    config = resolve_sizes.resolve(config, workdir)
    dumps_to_replay = dump_source.find_dumps(replay)
    with TrainingRun(config, workdir) as run:
        if dumps_to_replay:
            run.total_steps = min(run.total_steps, len(dumps_to_replay))
        prepared, state = setup.set_up_run(config, run, dumps_to_replay)
        state = run.resume(state, prepared.source, prepared.models.packer)
        layouts, has_critic = RelayoutSchedule(config, workdir), bool(state.critic.params)
        tokenizer = prepared.models.tokenizer
        sampler, source, evaluate = prepared.sampler, prepared.source, prepared.evaluate
        phase = step_functions.make_step_functions(prepared, state)
        weights = Weights(sampler.weights(state.policy.params), run.resumed_step)
        if run.should_evaluate(0):
            run.writer.write(0, evaluate(weights))

        for step in run.steps():
            # Another mesh or placement from this step on, if one is due.
            if layout := layouts.new_config(step):
                prepared, state = setup.relayout_run(layout, prepared, state)
                sampler, source, evaluate = prepared.sampler, prepared.source, prepared.evaluate
                phase = step_functions.make_step_functions(prepared, state)
                weights = Weights(sampler.weights(state.policy.params), step - 1)
            clock = run.begin_step(step, state)
            sample_key, update_key = source_lib.step_keys(config.seed, step)

            # Sample and score.
            samples = source.next_batch(weights, sample_key, clock)
            rollouts, rewards = samples.rollouts, samples.rewards  # [B, T], [B]
            sampler.release(weights)
            order = batches.update_order(config, len(rollouts.lengths), update_key)

            # Teacher, policy, reference and critic outputs for those tokens.
            rollouts = phase.add_teacher_log_probs(rollouts, clock)  # lessons: [B, T, k]
            predictions, rollouts = phase.predict(state, rollouts, clock)  # each [B, T]

            # Rewards become advantages. No model runs here.
            estimates, state, estimate_metrics = phase.estimate(
                state, rollouts, rewards, predictions, clock
            )  # advantages, returns: [B, T]
            batch = batches.assemble(rollouts, predictions, estimates)

            # Learn, unless an alert forbids it or there is nothing to learn from.
            run.commit_step()
            reward_metrics = statistics.reward_metrics(rewards, rollouts.comparison_ids)
            update_metrics: dict[str, float] = {}
            update_allowed = run.alerts.allow_update({**estimate_metrics, **reward_metrics})
            if update_allowed and phase.has_signal(reward_metrics, estimates):
                state, update_metrics = phase.update(step, state, rollouts, batch, order, clock)

            # Hand the new weights to the engine.
            weights = sampler.reshard(state.policy.params, weights, step, clock)
            source.on_wait(weights.params)

            eval_metrics = evaluate(weights, clock) if run.should_evaluate(step) else {}
            token_fields = functools.partial(
                rollout_dump.token_records, rollouts, rewards, predictions, estimates, tokenizer
            )
            run.writer.write_rollouts(step, rollouts, rewards, token_fields)
            seconds = clock.seconds()
            metrics = {
                **reward_metrics,
                **statistics.rollout_metrics(
                    config, rollouts, rewards, predictions, estimates, critic=has_critic
                ),
                **update_metrics,
                "training/updates_left_out": float(not update_metrics),
                **estimate_metrics,
                **source.metrics(),
                **samples.engine_statistics.metrics(),
                **sampler.metrics(),
                **statistics.throughput_metrics(
                    rollouts,
                    seconds,
                    len(phase.devices),
                    flops=phase.update.flops(rollouts.lengths),
                    peak_flops=phase.peak_flops,
                    critic=has_critic,
                ),
                **statistics.memory_metrics(phase.devices, run.planned_bytes),
                **seconds,
            }
            run.end_step(step, state, metrics, eval_metrics)
            layouts.observe(metrics)
    return state


def check(
    config: RLConfig, workdir: str | os.PathLike[str], replay: Sequence[str | os.PathLike[str]] = ()
) -> RLConfig:
    """Runs the checks of `train` without training; returns the config with all sizes resolved."""
    config = resolve_sizes.resolve(config, workdir)
    with TrainingRun(config, workdir) as run:
        setup.validate_run(config, run, dump_source.find_dumps(replay))
    return config
