"""Runs under `jaxrl_llm run` that fail again and again, and end as if nothing had happened.

The schedule of failures is seeded: after which steps, which process, how, and how long after the
step's line in `metrics.jsonl`. Between two durable checkpoints the runs go on from the copies in
memory, so a failure costs the step in which it occurs and at most the one before it.
"""

import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import letters
import processes
import pytest
import quick_compiler
import runs
import test_kill_points as kill_points

from jaxrl_llm.processes import supervisor

# Steps of an idle machine take milliseconds: the run would end before the signal arrives.
SLOW_REWARD = """
_score = score

def score(*arguments, **named):
    time.sleep(0.1)
    return _score(*arguments, **named)
"""
COMMAND = "from jaxrl_llm.commands import command_line; command_line.main()"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A signal to a process after a step is in the metrics."""

    step: int
    process: int
    signal: signal.Signals
    delay_s: float


def schedule(seed: int, steps: int, count: int, every: int, signals) -> list[Failure]:
    """One failure in every `every` steps, the first after step 2."""
    random_number = random.Random(seed)
    return [
        Failure(
            step + random_number.randrange(every),
            random_number.randrange(count),
            random_number.choice(signals),
            random_number.random(),
        )
        for step in range(2, steps - every + 1, every)
    ]


class Job:
    """A run of `count` processes with two devices each, supervised.

    With a `host`, the process of one of two hosts, which has a memory of its own.
    """

    def __init__(
        self, workdir: pathlib.Path, cache, count: int, settings, hang_s: float = 120.0, host=()
    ):
        self.workdir = workdir
        self.memory = workdir.with_name(f"{workdir.name}_memory")
        self.log = workdir.with_name("".join([workdir.name, *host[-1:], ".log"]))
        if host:
            self.memory = self.memory / host[-1]
        self._count = count
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", COMMAND, "run", f"--processes={count}"),
                    *(f"--hang_s={hang_s}", "--", "train", *runs.flags("grpo_tiny", settings)),
                    f"--workdir={workdir}",
                    *host,
                ],
                stdout=log,
                stderr=log,
                cwd=runs.ROOT,
                env={
                    **quick_compiler.environment(2, cache, [runs.ROOT]),
                    "JAXRL_LLM_MEMORY_FOLDER": str(self.memory),
                },
            )  # fmt: skip

    def pid_of(self, process: int) -> int:
        """The process of the run with this number."""
        for pid in supervisor.descendants(self.process.pid):
            try:
                environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            number = f"JAX_PROCESS_ID={process}".encode()
            is_numbered = self._count == 1 or number in environment
            if is_numbered and b"train" in command.split(b"\0"):
                return pid
        return 0

    def fail(self, failure: Failure) -> None:
        """Waits for the step, then sends the signal."""
        done = lambda: failure.step in runs.metrics_written(self.workdir)  # noqa: E731
        while not done():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.02)
        time.sleep(failure.delay_s)
        while not (pid := self.pid_of(failure.process)):  # between two starts
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.02)
        os.kill(pid, failure.signal)

    def finish(self) -> str:
        assert self.process.wait(timeout=1800) == 0, self.log.read_text()[-6000:]
        return self.log.read_text()


def lost_steps(workdir: pathlib.Path) -> int:
    """Steps that were completed more than once."""
    lines = [json.loads(line) for line in (workdir / "goodput.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "begin" in line]
    return len(steps) - len(set(steps))


def settings_of_drill(folder: pathlib.Path, steps: int, count: int) -> dict:
    reward = folder / "reward.py"
    reward.write_text(f"import time\n{pathlib.Path(letters.__file__).read_text()}{SLOW_REWARD}")
    return {
        **kill_points.SETTINGS,
        "rewards.functions.answer.function": f"{reward}:score",
        "trainer.num_steps": steps,
        "checkpoint.every": 2 * steps,  # none but the last
        "checkpoint.memory_every": 1,
        "checkpoint.best_metric": "",
        "evaluation.every": 0,
        "mesh.fsdp": count,
        "mesh.data": 2,
    }


def drill(tmp_path, cache, count: int, steps: int, failures, hang_s: float = 120.0) -> None:
    settings = settings_of_drill(tmp_path, steps, count)
    job = Job(tmp_path / "run", cache, count, settings, hang_s)
    try:
        for failure in failures:
            job.fail(failure)
        said = job.finish()
    finally:
        job.process.kill()
    assert said.count("starting again in") >= len(failures)
    assert "is read from the memory of the hosts" in said
    assert lost_steps(tmp_path / "run") <= len(failures)
    assert not list(job.memory.glob("*/*"))  # a run that ends leaves nothing behind
    reference = {**settings, "checkpoint.memory_every": 0}
    undisturbed = Job(tmp_path / "reference", cache, count, reference)
    undisturbed.finish()
    kill_points.check_same(tmp_path / "run", tmp_path / "reference", steps, "critic/score/mean")
    print(f"{len(failures)} failures, {lost_steps(tmp_path / 'run')} completed steps lost")


@pytest.mark.slow
def test_a_run_survives_kills_without_a_person(tmp_path, cache):
    failures = [Failure(2, 0, signal.SIGKILL, 0.3), Failure(5, 0, signal.SIGKILL, 0.0)]
    drill(tmp_path, cache, 1, 8, failures)


@pytest.mark.multihost
def test_two_processes_survive_kills_without_a_person(tmp_path, cache):
    failures = [Failure(2, 1, signal.SIGKILL, 0.3), Failure(4, 0, signal.SIGKILL, 0.1)]
    drill(tmp_path, cache, 2, 6, failures)


@pytest.mark.nightly
@pytest.mark.multihost
def test_supervisors_of_two_hosts_meet_again(tmp_path, cache):
    """Each host starts its own process again; nothing but the coordinator's address is shared."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    hosts = [
        Job(
            tmp_path / "run",
            cache,
            1,
            settings_of_drill(tmp_path, 6, 2),
            host=(f"--coordinator={address}", "--num_processes=2", f"--process_id={process}"),
        )
        for process in range(2)
    ]
    try:
        hosts[1].fail(Failure(2, 1, signal.SIGKILL, 0.2))
        hosts[0].fail(Failure(4, 0, signal.SIGKILL, 0.2))
        said = [job.finish() for job in hosts]
    finally:
        for job in hosts:
            job.process.kill()
    assert all("starting again" in text for text in said)
    assert "step 6/6" in said[0] and lost_steps(tmp_path / "run") <= 2


@pytest.mark.nightly
@pytest.mark.multihost
@pytest.mark.parametrize("seed", [0])
def test_eight_processes_and_two_hundred_steps(seed, tmp_path, cache):
    """One failure in ten steps: processes that are killed, and processes that stop."""
    signals = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
    failures = schedule(seed, 200, 8, 10, signals)
    drill(tmp_path, cache, 8, 200, failures, hang_s=120.0)


# Each process has a memory of its own, as on hosts of their own. In its last start process 1 finds
# an empty one: its host was replaced.
LOST_HOST = """
import os, shutil, sys
os.environ["JAXRL_LLM_MEMORY_FOLDER"] = f"{sys.argv[1]}/host{os.environ['JAX_PROCESS_ID']}"
from jaxrl_llm import program
def main():
    import jax, pathlib, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from jaxrl_llm.checkpoint.memory_copies import MemoryCopies
    from jaxrl_llm.checkpoint.saver import Saver
    from jaxrl_llm.config import CheckpointConfig
    from jaxrl_llm.sharding import multihost
    workdir = pathlib.Path(sys.argv[1]) / "run"
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    def state(step, spec):
        sharding = NamedSharding(mesh, spec)
        values = np.arange(40.0, dtype=np.float32).reshape(8, 5) + step
        return {"w": jax.make_array_from_callback((8, 5), sharding, lambda index: values[index])}
    saver = Saver(workdir / "checkpoints", CheckpointConfig(), memory=MemoryCopies(workdir))
    if sys.argv[2] == "write":
        for step in (1, 2, 3):
            saver.copy_to_memory(step, state(step, PartitionSpec("a")), {"position": step})
        saver._memory.wait()
        multihost.allgather("all are sent")
        os._exit(0)
    spec = PartitionSpec(*eval(sys.argv[3]))
    abstract = {"w": jax.ShapeDtypeStruct((8, 5), np.float32, sharding=NamedSharding(mesh, spec))}
    assert saver.has_steps
    found, extra, step = saver.restore(abstract)
    assert step == 3 and extra == {"position": 3}, step
    for shard, wanted in zip(found["w"].addressable_shards, state(3, spec)["w"].addressable_shards):
        np.testing.assert_array_equal(shard.data, wanted.data)
    saver.close()
program.run(main)
"""


@pytest.mark.multihost
def test_a_lost_host_is_made_up_for_by_its_partner(tmp_path, cache):
    processes.run(["-c", LOST_HOST, tmp_path, "write"], 2, 2, cache)
    for host in (0, 1):
        names = {path.name for path in tmp_path.glob(f"host{host}/*/*-2")}
        assert names >= {f"{step}.{owner}-2" for step in (2, 3) for owner in (0, 1)}
        assert len(names) <= 6  # what arrives is trimmed with the next step
    (folder,) = tmp_path.glob("host1/*")
    for path in folder.iterdir():
        path.unlink()
    # Sharded in the other dimension, each process needs the shards of both.
    processes.run(["-c", LOST_HOST, tmp_path, "read", "(None, None)"], 2, 2, cache)
    assert not list(tmp_path.glob("host*/*/*-2"))
