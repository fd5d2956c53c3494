"""Starts runs of `launch/train.py` that end themselves at a chosen moment.

A process that has imported what a run needs and forks one child a run: a run then costs what it
does, not what its imports cost. Reads a JSON object a line: `arguments`, `point` ("" to let the
run finish), `signal`, `log`; answers with the exit code of the run, negative for a signal.

A point is a call of the product, wrapped here, in the test's process: the product knows nothing.
"""

import functools
import inspect
import itertools
import json
import os
import pathlib
import runpy
import signal
import sys
import time

import orbax.checkpoint as ocp
from orbax.checkpoint._src.path import atomicity

from jaxrl_llm.agents import agent_pool as agents_pool
from jaxrl_llm.agents import env_manager, episode
from jaxrl_llm.checkpoint import saver, seal
from jaxrl_llm.learner import batches, objectives, weights
from jaxrl_llm.metrics import alerts, statistics, writer
from jaxrl_llm.rewards import reward_pool
from jaxrl_llm.rollout import episode_runner, episodes
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.sampling import async_schedule, async_source, policy_sampler, source
from jaxrl_llm.storage import files, lease, line_log
from jaxrl_llm.trainer import evaluation, supervised
from jaxrl_llm.trainer import rl as rl  # imported once, for all runs

ROOT = pathlib.Path(__file__).parents[2]

# Name -> (where the function is, its name, "before" or "after" it, at which call).
POINTS = {
    "setup": (weights, "initial_state", "before", 1),
    "restore_before": (saver.Saver, "restore", "before", 1),
    "restore_checked": (saver, "_read_step", "before", 1),
    "restored": (saver.Saver, "restore", "after", 1),
    "numbers_opened": (writer, "keep_lines_before", "before", 1),
    "rollout_before": (source.SyncSource, "next_batch", "before", 1),
    "rollout_during": (Engine, "_read_chunk", "after", 2),
    "rollout_after": (episodes, "rollout", "after", 1),
    "reward_during": (reward_pool, "_request", "after", 5),
    "collected": (source.SyncSource, "next_batch", "after", 1),
    "predicted": (batches, "assemble", "before", 1),
    "estimated": (alerts.Alerts, "allow_update", "before", 1),
    "update_before": (batches, "assemble", "after", 1),
    "update_between": (batches.Packer, "pack", "after", 5),
    "update_after": (statistics, "mean_metrics", "after", 1),
    "reshard_before": (policy_sampler.PolicySampler, "weights", "before", 2),
    "reshard_after": (policy_sampler.PolicySampler, "weights", "after", 2),
    "evaluation": (evaluation.Evaluator, "__call__", "before", 1),
    "numbers_before": (writer.Writer, "write", "before", 2),
    "numbers_half": (writer, "write_all", "half", 2),
    "numbers_after": (writer.Writer, "write", "after", 2),
    "dump_half": (os, "replace", "before", 3),
    "dumped": (writer.Writer, "write_rollouts", "after", 1),
    "save_before": (ocp.CheckpointManager, "save", "before", 1),
    "save_begun": (ocp.CheckpointManager, "save", "after", 1),
    "save_writing": (atomicity.AtomicRenameTemporaryPath, "finalize", "before", 1),
    "part_complete": (atomicity.AtomicRenameTemporaryPath, "finalize", "after", 1),
    "commit_before": (seal.SealedPath, "finalize", "before", 3),
    "seal_before": (seal, "write_seal", "before", 1),
    "seal_half": (seal, "write_seal", "half", 1),
    "seal_after": (seal, "write_seal", "after", 1),
    "commit_after": (seal.SealedPath, "finalize", "after", 3),
    "saved": (ocp.CheckpointManager, "wait_until_finished", "after", 2),
}

# Of episodes with tools, beside those of RL.
OF_AGENTS = {
    "world_before": (env_manager.EnvManager, "begin", "before", 2),
    "tool_asked": (agents_pool.AgentPool, "ask", "after", 5),
    "tool_answered": (agents_pool.AgentPool, "_receive_answers", "after", 6),
    "turn_heard": (episode.Episode, "observe", "after", 4),
    "turn_submitted": (Engine, "_extend", "before", 2),
    "episode_judged": (episode.Episode, "apply_reward", "after", 3),
    **{name: POINTS[name] for name in ("rollout_during", "reward_during", "update_between")},
    "save_writing": POINTS["save_writing"],
}

# Of samples ahead of their step, beside those of RL.
OF_AHEAD = {
    "ahead_restored": (episode_runner.EpisodeRunner, "resume", "after", 1),
    "ahead_between": (async_source.AsyncSource, "on_wait", "after", 2),
    "ahead_scheduled": (async_schedule.AsyncSchedule, "end_step", "after", 3),
}

# Of a run in a bucket, beside those of RL.
OF_BUCKETS = {
    "lease_taken": (lease.Lease, "acquire", "after", 1),
    "log_flush_before": (line_log.BucketLog, "flush", "before", 1),
    "log_flush_after": (line_log.BucketLog, "flush", "after", 1),
    "object_half": (files, "replace_bytes", "before", 4),
    **{name: POINTS[name] for name in ("restored", "update_between", "dumped", "save_begun")},
    "item_before": (seal.SealedObjects, "finalize", "before", 1),
    "item_complete": (seal.SealedObjects, "finalize", "after", 1),
    "sealing_before": (seal.SealedObjects, "finalize", "before", 3),
    **{name: POINTS[name] for name in ("seal_before", "seal_half", "seal_after", "saved")},
}

# Of jobs on given answers; the others are as in RL.
OF_JOBS = {
    "job_setup": (weights, "initial_params", "before", 1),
    **{name: POINTS[name] for name in ("restore_checked", "restored", "numbers_opened")},
    "job_batch_before": (objectives.SupervisedBatch, "from_rows", "before", 5),
    "job_update_before": (batches.Packer, "pack", "after", 5),
    "job_update_after": (supervised, "padding_share", "after", 1),
    "job_evaluation": (evaluation.HeldOutLoss, "__call__", "before", 1),
    **{name: POINTS[name] for name in ("numbers_half", "numbers_after", "save_begun")},
    **{name: POINTS[name] for name in ("save_writing", "commit_before", "seal_half", "saved")},
}


def halved(function, die):
    """Does the first half of a write, then what `die` does."""

    def write_all(file, data):
        file.write(data[: len(data) // 2])
        die()
        return file.write(data[len(data) // 2 :])

    def write(folder, digests):
        (folder / seal.SEAL_FILE).write_text('{"meta/')
        die()
        return function(folder, digests)

    return {"write_all": write_all, "write_seal": write}[function.__name__]


def arm(point: str, number: signal.Signals) -> None:
    """Makes this process send itself a signal at a point, once."""
    owner, name, when, at = {
        **POINTS,
        **OF_JOBS,
        **OF_AGENTS,
        **OF_AHEAD,
        **OF_BUCKETS,
    }[point]
    function = getattr(owner, name)
    calls = itertools.count(1)

    def die():
        if next(calls) == at:
            print(f"{number.name} at {point}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), number)
            if number == signal.SIGKILL:
                time.sleep(60)

    if when == "half":
        setattr(owner, name, halved(function, die))
        return

    @functools.wraps(function)
    async def awaited(*args, **kwargs):
        if when == "before":
            die()
        result = await function(*args, **kwargs)
        if when == "after":
            die()
        return result

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if when == "before":
            die()
        result = function(*args, **kwargs)
        if when == "after":
            die()
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(function) else wrapped)


def child(order) -> None:
    with open(order["log"], "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if order["point"]:
        arm(order["point"], signal.Signals[order["signal"]])
    sys.argv = [str(ROOT / "launch" / "train.py"), *order["arguments"]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    for line in sys.stdin:
        process = os.fork()
        if not process:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            child(json.loads(line))
            sys.exit(0)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
