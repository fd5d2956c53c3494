"""A run ended at any moment, by force or by request, ends up as one that was left alone.

The run is ended at one point, started again and ended at the next, and so on: every start but the
first resumes what the one before left. At the end all numbers of all steps, all samples and the
arrays of the last checkpoint are those of a run that was never interrupted, bit for bit.
"""

import itertools
import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
import quick_compiler
import runs
import starter

# What every change is tried with: in an update, and where a file is half written.
FEW = (
    ("save_begun", "SIGTERM"),  # a checkpoint must be there before there is one to restore
    ("rollout_during", "SIGTERM"),
    ("update_between", "SIGKILL"),
    ("numbers_half", "SIGKILL"),
    ("seal_half", "SIGKILL"),
)
FEW_OF_A_JOB = (
    ("save_begun", "SIGTERM"),
    ("job_update_before", "SIGKILL"),
    ("numbers_half", "SIGKILL"),
    ("seal_half", "SIGKILL"),
)
SETTINGS = {
    # An untaught model gets no sum right; all scores would be 0 and nothing would be learned.
    "rewards.functions.answer.function": f"{pathlib.Path(__file__).with_name('letters.py')}:score",
    "model.hidden_size": 16,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.mlp_size": 32,
    "data.max_prompt_tokens": 8,
    "data.arithmetic_terms": 3,
    "rollout.max_response_tokens": 8,
    "rollout.chunk_steps": 2,
    "rewards.num_workers": 1,
    "warm_start.num_steps": 0,
    "algorithm.samples_per_prompt": 2,
    "trainer.minibatch_size": 4,
    "evaluation.num_prompts": 2,
    "evaluation.every": 2,
    "checkpoint.every": 2,
    "checkpoint.best_metric": "val-core/arithmetic/mean@1",
}

OF_JOBS = {
    "model.path": "",
    **{key: value for key, value in SETTINGS.items() if key.startswith(("model.", "checkpoint."))},
    "data.max_prompt_tokens": 8,
    "data.arithmetic_train_prompts": 100,
    "trainer.batch_size": 4,
    "trainer.optimizer.warmup_steps": 0,
    "evaluation.num_prompts": 6,
    "evaluation.every": 2,
}
JOBS = {"sft_tiny": "sft", "dpo_tiny": "dpo", "reward_model_tiny": "reward_model"}


class Starter:
    """Starts runs of one algorithm in one folder."""

    def __init__(
        self, name: str, workdir: pathlib.Path, cache: pathlib.Path, address: str = "", **settings
    ):
        """`address` is that of a folder in a bucket, which takes the place of `workdir`."""
        self.workdir = workdir
        self.log = workdir.with_suffix(".log")
        self._arguments = [*runs.flags(name, settings), f"--workdir={address or workdir}"]
        self._process = subprocess.Popen(
            [sys.executable, pathlib.Path(starter.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=runs.ROOT,
            env=quick_compiler.environment(1, cache, [runs.ROOT]),
        )

    def run(self, point: str = "", number: str = "SIGKILL") -> int:
        """Starts the run once; returns its exit code, negative for the signal that ended it."""
        order = {"arguments": self._arguments, "point": point, "signal": number}
        self._process.stdin.write(json.dumps({**order, "log": str(self.log)}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._process.stdin.close()
        self._process.wait()


def arrays(step: pathlib.Path) -> dict[str, np.ndarray]:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        saved = checkpointer.metadata(step / "arrays").item_metadata.tree
        # As host arrays, whatever devices they were saved from.
        to_host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in saved}
        return checkpointer.restore(step / "arrays", ocp.args.PyTreeRestore(restore_args=to_host))


def check_same(workdir: pathlib.Path, reference: pathlib.Path, last: int, learned: str) -> None:
    found, wanted = runs.metrics(workdir), runs.metrics(reference)
    assert list(found) == list(wanted) == list(range(last + 1))
    for step in wanted:
        assert runs.repeatable(found[step]) == runs.repeatable(wanted[step]), step
    dumps = [f"rollouts/{step}.jsonl" for step in range(1, last + 1)]
    for dump in dumps if learned.startswith("critic/") else ():
        assert (workdir / dump).read_bytes() == (reference / dump).read_bytes()
    mine, other = (arrays(folder / "checkpoints" / str(last)) for folder in (workdir, reference))
    assert mine.keys() == other.keys()
    for name in mine:
        assert np.asarray(mine[name]).tobytes() == np.asarray(other[name]).tobytes(), name
    assert not [path for path in workdir.rglob("*") if "tmp" in path.name or "damaged" in path.name]
    assert len({wanted[step][learned] for step in range(1, last + 1)}) > last // 2


def end_at(start: Starter, point: str, number: str) -> None:
    before = len(start.log.read_text()) if start.log.exists() else 0
    code = start.run(point, number)
    said = start.log.read_text()[before:]
    assert f"{number} at {point}" in said, said[-3000:]
    assert "Traceback" not in said, said[-3000:]
    if number == "SIGKILL":
        assert code == -signal.SIGKILL, said[-3000:]
    else:
        assert code == 75, said[-3000:]
        assert f"{number}: ended " in said


def chain(name: str, tmp_path, cache, moments, last: int, learned: str, settings=SETTINGS) -> None:
    """Ends one run at all moments, one after the other, and compares it to one left alone."""
    settings = {**settings, "trainer.num_steps": last}
    with Starter(name, tmp_path / "reference", cache, **settings) as start:
        assert start.run() == 0, start.log.read_text()[-3000:]
    with Starter(name, tmp_path / "run", cache, **settings) as start:
        for point, number in moments:
            end_at(start, point, number)
        assert last not in runs.metrics_written(tmp_path / "run")
        assert start.run() == 0, start.log.read_text()[-3000:]
    check_same(tmp_path / "run", tmp_path / "reference", last, learned)


def test_every_point_names_a_function():
    for point, (owner, name, when, at) in {
        **starter.POINTS,
        **starter.OF_JOBS,
        **starter.OF_AGENTS,
        **starter.OF_AHEAD,
    }.items():
        assert callable(getattr(owner, name, None)), point
        assert when in ("before", "after", "half") and at >= 1, point


def steps_of(moments) -> int:
    """A start takes one step on average, and every second is saved."""
    return len(moments) // 2 * 2 + 4


@pytest.mark.slow
def test_run_killed_at_some_points_resumes(tmp_path, cache):
    chain("grpo_tiny", tmp_path, cache, FEW, steps_of(FEW), "critic/score/mean")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["grpo_tiny", "ppo_tiny"])
def test_run_killed_at_every_point_resumes(name, tmp_path, cache):
    assert len(starter.POINTS) >= 20
    every = itertools.product(starter.POINTS, ("SIGKILL", "SIGTERM"))
    moments = [FEW[0], *every]
    chain(name, tmp_path, cache, moments, steps_of(moments), "critic/score/mean")


# Of a run that samples ahead: in flight, in the buffer, between record and checkpoint.
AHEAD_FEW = ("rollout_during", "ahead_between", "save_before")
AHEAD_ALL = (
    *AHEAD_FEW, "ahead_restored", "rollout_before", "ahead_scheduled", "reward_during",
    "collected", "update_after", "seal_half", "numbers_half", "save_begun",
)  # fmt: skip


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(AHEAD_FEW, marks=pytest.mark.slow),
        pytest.param(AHEAD_ALL, marks=pytest.mark.nightly),
    ],
    ids=["few", "all"],
)
def test_points_of_samples_ahead(points, tmp_path, cache):
    """What is in flight or buffered is saved; a schedule recorded in pieces is replayed at once."""
    signals = itertools.cycle(("SIGKILL", "SIGTERM"))
    moments = [FEW[0], *zip(points, signals, strict=False)]
    last = steps_of(moments)
    ahead = {"trainer.sampling": "async", "trainer.max_staleness": 2, "rollout.num_slots": 8}
    recorded = {**SETTINGS, **ahead, "trainer.schedule": "record"}
    chain("grpo_tiny", tmp_path, cache, moments, last, "critic/score/mean", recorded)
    schedules = [
        [json.loads(line) for line in (tmp_path / name / "schedule.jsonl").read_text().splitlines()]
        for name in ("run", "reference")
    ]
    assert any(line["restored"] for line in schedules[0])
    groups = [[line["groups"] for line in lines] for lines in schedules]
    assert groups[0] == groups[1]
    # Every prompt is learned from once.
    numbers = [number for step in groups[0] for number, _, _ in step]
    assert sorted(numbers) == list(range(4 * last))
    replayed = {
        **recorded,
        "trainer.schedule": "replay",
        "trainer.schedule_file": str(tmp_path / "run" / "schedule.jsonl"),
        "trainer.num_steps": last,
    }
    with Starter("grpo_tiny", tmp_path / "replayed", cache, **replayed) as start:
        assert start.run() == 0, start.log.read_text()[-3000:]
    check_same(tmp_path / "replayed", tmp_path / "reference", last, "critic/score/mean")


def chain_of_a_job(name: str, rank: int, tmp_path, cache, moments) -> None:
    job, settings = JOBS[name], {**OF_JOBS, "lora.rank": rank}
    settings["checkpoint.best_metric"] = f"val/{job}/loss"
    chain(name, tmp_path, cache, moments, steps_of(moments), f"{job}/loss", settings)


@pytest.mark.slow
def test_a_few_points_of_a_job(tmp_path, cache):
    chain_of_a_job("sft_tiny", 0, tmp_path, cache, FEW_OF_A_JOB)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", JOBS)
def test_every_point_of_a_job(name, rank, tmp_path, cache):
    assert len(starter.OF_JOBS) >= 10
    moments = [FEW_OF_A_JOB[0], *((point, "SIGKILL") for point in starter.OF_JOBS)]
    chain_of_a_job(name, rank, tmp_path, cache, moments)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(("tool_asked", "turn_heard"), marks=pytest.mark.slow),
        pytest.param(tuple(starter.OF_AGENTS), marks=pytest.mark.nightly),
    ],
    ids=["two", "all"],
)
def test_points_of_episodes_with_tools(points, tmp_path, cache):
    """An untaught policy talks to an environment; what it says depends on what that answers."""
    moments = [("save_begun", "SIGTERM"), *((point, "SIGKILL") for point in points)]
    settings = {
        **SETTINGS,
        "rewards.functions": {"answer": {"function": "arithmetic"}},
        "agent.tools": (),
        "agent.environments": {
            "talker": {"environment": f"{pathlib.Path(__file__).with_name('talker.py')}:Talker"}
        },
        "data.chat_template": True,
        "data.arithmetic_train_prompts": 100,
        "data.task": "arithmetic",
        "data.max_prompt_tokens": 16,
        "rollout.max_response_tokens": 48,
        "rollout.stop_tokens": tuple(range(20, 28)),
        "evaluation.functions": {},
    }
    del settings["rewards.functions.answer.function"]
    name, last = "agent_calculator_tiny", steps_of(moments)
    chain(name, tmp_path, cache, moments, last, "critic/score/mean", settings)
    numbers = runs.metrics(tmp_path / "run")[last]
    assert numbers["num_turns/max"] > 2 and numbers["critic/score/spread"] > 0
