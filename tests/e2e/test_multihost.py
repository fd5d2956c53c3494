"""Runs of several processes, from the command line, equal the run of one process.

All have eight devices in a mesh of data 2 x fsdp 2 x tensor 2, so every kind of collective
crosses the border between processes.
"""

import functools
import json
import pathlib
import time
from collections.abc import Sequence

import processes
import pytest
import runs

from jaxrl_llm.viewer import timeline
from jaxrl_llm.viewer.timeline import ProgramRun

pytestmark = pytest.mark.multihost

# Whether digits are answered: something the policy can move, different within every group. In
# step 3, process 1 waits to be killed if the test asks for it.
REWARD = """
import os, pathlib, time

HERE = pathlib.Path(__file__).parent

def score(data_source, solution_str, ground_truth, extra_info):
    wanted = (HERE / "wait").exists() and os.environ.get("JAX_PROCESS_ID") == "1"
    if wanted and (HERE / "run/rollouts/2.jsonl").exists():
        (HERE / "in_step_3").touch()
        time.sleep(3600)
    return sum(c.isdigit() for c in solution_str) / 16
"""
STEPS = 4


def together(some: Sequence[ProgramRun], others: Sequence[ProgramRun]) -> float:
    """Returns the share of their time in which `some` ran while one of `others` did.

    Each sequence is of one device, whose runs follow each other.
    """
    both = sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.begin_s, b.begin_s)) for a in some for b in others
    )
    return both / sum(run.end_s - run.begin_s for run in some)


def arguments(name: str, folder, num_steps: int = STEPS, **changes) -> list[str]:
    """Returns the command of a run in `folder`/run; the same for any number of processes."""
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "rewards.functions": {"answer": {"function": f"{folder}/reward.py:score"}},
        "rewards.num_workers": 1,
        "rewards.environment": ("JAX_PROCESS_ID",),
        "rewards.timeout_s": 3600.0,
        "trainer.num_steps": num_steps,
        # The length of the run must not decide the learning rate: it is cut in two.
        "trainer.optimizer.schedule": "constant",
        "trainer.optimizer.warmup_steps": 0,
        "evaluation.num_prompts": 4,
        "evaluation.every": 0,
        "evaluation.after": False,
        "checkpoint.every": 2,
        "checkpoint.keep": 4,
        "mesh.data": 2,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        **changes,
    }
    return ["launch/train.py", *runs.flags(name, settings), f"--workdir={folder / 'run'}"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, cache):
    """Returns `reference(name) -> folder` of a run by one process, made once."""

    @functools.cache
    def make(name: str):
        folder = tmp_path_factory.mktemp(name)
        processes.run(arguments(name, folder), 1, 8, cache)
        return folder / "run"

    return make


def check_same_run(workdir, wanted, other_mesh: bool = False) -> None:
    """Tokens are identical; numbers are equal but for the order of sums in collectives."""
    found, expected = runs.metrics(workdir), runs.metrics(wanted)
    assert list(found) == list(expected) == list(range(STEPS + 1))
    assert all(expected[step]["actor/grad_norm"] > 1e-2 for step in range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        mine, other = (
            [json.loads(line) for line in (run / f"rollouts/{step}.jsonl").read_text().splitlines()]
            for run in (workdir, wanted)
        )
        assert mine == other, step
        numbers = runs.repeatable(found[step])
        assert numbers.keys() == runs.repeatable(expected[step]).keys()
        for name, value in numbers.items():
            if name.startswith("global_seqlen/"):  # per shard: halves of the devices have half
                continue
            # Another mesh moves other bytes, and shares out the slots in another way.
            if other_mesh and name.startswith(("reshard/", "rollout/slot_occupancy")):
                continue
            close = pytest.approx(expected[step][name], rel=1e-5, abs=1e-5)
            assert value == close, (step, name)


@pytest.mark.parametrize(
    "name, counts",
    [("grpo_tiny", (2, 4)), pytest.param("ppo_tiny", (4, 2), marks=pytest.mark.nightly)],
    ids=["grpo", "ppo"],
)
def test_processes_equal_one_and_others_resume(name, counts, reference, tmp_path, cache):
    first, second = counts
    processes.run(arguments(name, tmp_path, num_steps=2), first, 8 // first, cache)
    said = processes.run(arguments(name, tmp_path), second, 8 // second, cache)
    assert all("resumed after step 2" in text for text in said)
    check_same_run(tmp_path / "run", reference(name))
    assert not [path for path in (tmp_path / "run").rglob("*") if "tmp" in path.name]


@pytest.mark.nightly
def test_layers_with_a_state(tmp_path, cache):
    """Samples of gated delta nets with drafts, and their updates."""
    changes = {"model.num_layers": 4, "warm_start.num_steps": 0, "trainer.minibatch_size": 8}
    changes |= {"rollout.speculation.draft_tokens": 2, "rollout.speculation.ngram_tokens": 1}
    for folder, count in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        command = arguments("grpo_hybrid_tiny", tmp_path / folder, **changes)
        processes.run(command, count, 8 // count, cache)
    check_same_run(tmp_path / "two/run", tmp_path / "one/run")


@pytest.mark.nightly
def test_a_stage_on_each_process(tmp_path, cache):
    """Only the permutes between the stages, and the ends, cross the border."""
    layers, stages = {"model.num_layers": 2}, {"mesh.stage": 2, "mesh.data": 1}
    for folder, changes, count in (("one", {}, 1), ("two", stages, 2)):
        (tmp_path / folder).mkdir()
        command = arguments("grpo_tiny", tmp_path / folder, **layers, **changes)
        processes.run(command, count, 8 // count, cache)
    check_same_run(tmp_path / "two/run", tmp_path / "one/run", other_mesh=True)
    for numbers in list(runs.metrics(tmp_path / "two/run").values())[1:]:
        assert numbers["reshard/bytes_moved"] == numbers["reshard/lower_bound_bytes"]


@pytest.mark.parametrize(
    "job",
    ["dpo", *(pytest.param(job, marks=pytest.mark.nightly) for job in ("sft", "reward_model"))],
)
def test_a_job_of_two_processes_is_that_of_one_and_resumes(job, tmp_path, cache):
    def command(folder, num_steps):
        settings = {
            "model.path": "",
            "trainer.num_steps": num_steps,
            "trainer.batch_size": 8,
            "trainer.optimizer.schedule": "constant",
            # Adam's usual eps would move a weight whose gradient is rounding alone.
            "trainer.optimizer.eps": 1e-3,
            "data.arithmetic_train_prompts": 100,
            "evaluation.after": num_steps == STEPS,
            "evaluation.every": 0,
            "mesh.data": 2,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
        }
        return ["launch/train.py", *runs.flags(f"{job}_tiny", settings), f"--workdir={folder}"]

    processes.run(command(tmp_path / "one", STEPS), 1, 8, cache)
    processes.run(command(tmp_path / "two", 2), 2, 4, cache)
    said = processes.run(command(tmp_path / "two", STEPS), 2, 4, cache)
    assert all("resumed after step 2" in text for text in said)
    found, wanted = (runs.metrics(tmp_path / name) for name in ("two", "one"))
    assert list(found) == list(wanted) == list(range(STEPS + 1))
    assert f"val/{job}/loss" in wanted[STEPS] and f"{job}/grad_norm" in wanted[1]
    for step in wanted:
        numbers = runs.repeatable(wanted[step])
        close = pytest.approx(numbers, rel=1e-5, abs=1e-5)
        assert runs.repeatable(found[step]) == close, step


def test_roles_on_halves_of_every_host_equal_roles_together(reference, tmp_path, cache):
    split = {"placement.choice": "split", "mesh.data": 1}
    said = processes.run(arguments("ppo_tiny", tmp_path, **split), 2, 4, cache)
    assert len(said) == 2
    check_same_run(tmp_path / "run", reference("ppo_tiny"))


def test_halves_of_every_host_work_at_the_same_time(tmp_path, cache):
    """Critic and policy overlap in a trace, and the numbers are those of roles together.

    Each process has one device in each half: XLA's CPU client runs programs of several of its
    devices one after the other. Microbatches are small, so that programs take their time.
    """
    sizes = {
        "trainer.prompts_per_step": 32,
        "trainer.minibatch_size": 64,
        "trainer.max_tokens_per_microbatch": 64,
        "mesh.data": 1,
        "mesh.fsdp": 2,
        "mesh.tensor": 1,
    }
    (tmp_path / "together").mkdir()
    (tmp_path / "apart").mkdir()
    processes.run(arguments("ppo_tiny", tmp_path / "together", **sizes), 1, 2, cache)
    split = {"placement.choice": "split", "profiler.first_step": 3, "profiler.num_steps": 2}
    processes.run(arguments("ppo_tiny", tmp_path / "apart", **sizes, **split), 2, 2, cache)
    check_same_run(tmp_path / "apart/run", tmp_path / "together/run")
    found = [trace.program_runs for trace in timeline.read_traces(tmp_path / "apart/run")]
    assert len(found) == 2
    for process in found:
        half, other = sorted({run.device for run in process if run.program == "jit_update"})
        programs = {
            device: {
                name: [run for run in process if (run.program, run.device) == (name, device)]
                for name in ("jit_of_policy", "jit_of_critic", "jit_update")
            }
            for device in (half, other)
        }
        policy, critic = programs[half], programs[other]
        # Two updates a step; old log-probs and the reference's.
        assert len(policy["jit_update"]) == len(critic["jit_update"]) == 4
        assert len(policy["jit_of_policy"]) == 4 and len(critic["jit_of_critic"]) == 2
        assert not policy["jit_of_critic"] and not critic["jit_of_policy"]
        learning = together(critic["jit_update"], policy["jit_update"])
        scoring = max(
            together([run], policy["jit_of_policy"]) for run in critic["jit_of_critic"]
        )  # in a step whose programs were compiled before
        print(f"the critic's half: {learning:.0%} of its updates, {scoring:.0%} of its scoring")
        # One after the other they share no moment; a busy machine takes from what they share.
        assert learning > 0.25 and scoring > 0.25


def test_a_killed_process_ends_the_other_and_the_next_start_resumes(reference, tmp_path, cache):
    command = arguments("grpo_tiny", tmp_path)
    (tmp_path / "wait").touch()
    both = processes.start(command, 2, 4, cache)
    try:
        for process in both:
            runs.wait_until(lambda: (tmp_path / "in_step_3").exists(), process)
        both[1].kill()
        killed = time.monotonic()
        _, said = both[0].communicate(timeout=300)
        seconds = time.monotonic() - killed
    finally:
        for process in both:
            process.kill()
    assert both[0].returncode == 70
    assert "process 1 gave no sign of life" in said and "start the run again to resume" in said
    print(f"the other process ended {seconds:.1f} s after the kill")
    (tmp_path / "wait").unlink()
    said = processes.run(command, 2, 4, cache)
    assert all("resumed after step 2" in text for text in said)
    check_same_run(tmp_path / "run", reference("grpo_tiny"))


def test_another_setting_on_one_host_stops_all_before_the_first_step(tmp_path, cache):
    both = processes.start(arguments("grpo_tiny", tmp_path), 2, 4, cache, {1: ["--config.seed=1"]})
    for process, text in zip(both, processes.finish(both), strict=True):
        assert process.returncode == 1
        assert "the processes disagree, first about config.seed (process 0: " in text
        assert "Traceback" not in text
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.nightly
def test_episodes_with_an_environment(tmp_path, cache):
    """Each process asks the environments of its own half; both hear all answers."""
    talker = pathlib.Path(__file__).parents[1] / "faults" / "talker.py"
    settings = {
        "rewards.functions": {},
        "agent.tools": (),
        "agent.environments": {"talker": {"environment": f"{talker}:Talker"}},
        "data.task": "arithmetic",
        "data.arithmetic_train_prompts": 100,
        "rollout.max_response_tokens": 48,
        "rollout.stop_tokens": tuple(range(20, 28)),
    }
    name = "agent_calculator_tiny"
    for folder, count in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        command = arguments(name, tmp_path / folder, **settings)
        processes.run(command, count, 8 // count, cache)
    check_same_run(tmp_path / "two/run", tmp_path / "one/run")
    assert runs.metrics(tmp_path / "two/run")[STEPS]["num_turns/max"] > 2


AHEAD = {
    "trainer.sampling": "async",
    "trainer.max_staleness": 2,
    "placement.choice": "by_hand",
    "placement.pools": {"learn": {"devices": 2}, "sample": {"devices": 2}},
    "placement.roles": {
        **dict.fromkeys(("policy", "critic", "reference", "reward"), "learn"),
        "rollout": "sample",
    },
    "mesh.data": 1,
    "mesh.fsdp": 2,
    "mesh.tensor": 1,
}


@pytest.mark.nightly
def test_samples_ahead_on_halves_of_every_host_are_replayed_by_one_process(tmp_path, cache):
    """What depended on time was process 0's to say; one process repeats it without a clock."""
    ahead = AHEAD
    for folder in ("two", "one"):
        (tmp_path / folder).mkdir()
    recorded = {**ahead, "trainer.schedule": "record"}
    processes.run(arguments("grpo_tiny", tmp_path / "two", **recorded), 2, 2, cache)
    schedule = tmp_path / "two" / "run" / "schedule.jsonl"
    replay = {**ahead, "trainer.schedule": "replay", "trainer.schedule_file": str(schedule)}
    processes.run(arguments("grpo_tiny", tmp_path / "one", **replay), 1, 4, cache)
    check_same_run(tmp_path / "one/run", tmp_path / "two/run")
    numbers = runs.metrics(tmp_path / "two/run")
    assert numbers[STEPS]["training/off_policy/staleness/max"] > 0


@pytest.mark.nightly
def test_a_process_learns_and_another_samples(tmp_path, cache):
    """Each pool has a host of its own. Resumed, and by one process, its schedule gives its bits."""
    own = {**AHEAD, "placement.hosts": "own"}
    schedule = tmp_path / "two/run/schedule.jsonl"
    replay = {**own, "trainer.schedule": "replay", "trainer.schedule_file": str(schedule)}

    def start(name: str, settings, num_steps: int, count: int) -> list[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        command = arguments("grpo_tiny", tmp_path / name, num_steps, **settings)
        return processes.run(command, count, 4 // count, cache)

    start("two", {**own, "trainer.schedule": "record"}, STEPS, 2)
    wanted = runs.metrics(tmp_path / "two/run")
    for name, count in (("resumed", 2), ("one", 1)):
        start(name, replay, 2, count)
        said = start(name, replay, STEPS, count)
        assert all("resumed after step 2" in text for text in said)
        check_same_run(tmp_path / name / "run", tmp_path / "two/run")
        found = runs.metrics(tmp_path / name / "run")
        for step in range(1, STEPS + 1):
            assert runs.repeatable(found[step]) == runs.repeatable(wanted[step]), (name, step)
    assert wanted[STEPS]["training/off_policy/staleness/max"] > 0
    assert wanted[STEPS]["reshard/copied_bytes"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [1, 0], ids=["sampler", "learner"])
def test_a_killed_pool_ends_the_other(killed, tmp_path, cache):
    """One waits for samples, or for weights, that never come.

    It is told who is silent; without process 0, jax ends it with words of its own.
    """
    own = {**AHEAD, "placement.hosts": "own"}
    command = arguments("grpo_tiny", tmp_path, **own)
    (tmp_path / "wait").touch()
    both = processes.start(command, 2, 2, cache)
    try:
        for process in both:
            runs.wait_until(lambda: (tmp_path / "in_step_3").exists(), process)
        both[killed].kill()
        at = time.monotonic()
        _, said = both[1 - killed].communicate(timeout=300)
        print(f"the other one ended {time.monotonic() - at:.1f} s after the kill")
    finally:
        for process in both:
            process.kill()
    if killed == 0:
        assert both[1].returncode != 0 and "coordination service" in said, said[-3000:]
        return
    assert both[0].returncode == 70, said[-3000:]
    assert "process 1 gave no sign of life" in said and "start the run again to resume" in said


@pytest.mark.nightly
def test_a_layout_changes_on_all_processes(tmp_path, cache):
    """Two processes change their mesh between two steps, as one process does."""
    changes = {"trainer.layouts": ("3 mesh.data=1 mesh.fsdp=4",)}
    for folder, count in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        command = arguments("grpo_tiny", tmp_path / folder, **changes)
        said = processes.run(command, count, 8 // count, cache)
        assert all("layout" in text for text in said)
    check_same_run(tmp_path / "two/run", tmp_path / "one/run")


@pytest.mark.nightly
def test_images_and_a_tower_that_learns(tmp_path, cache):
    """Two processes with a mesh of 2 x 2 x 2 are one device that reads the same images."""
    settings = {
        "data.max_prompt_tokens": 40,
        "data.arithmetic_train_prompts": 64,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.vision.hidden_size": 32,
        "model.vision.mlp_size": 32,
        "trainer.tower_learning_rate": 1e-3,
        # Adam's usual eps would move a weight whose gradient is rounding alone.
        "trainer.optimizer.eps": 1e-3,
        "warm_start.optimizer.eps": 1e-3,
    }
    alone = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}
    for folder, count, devices, mesh in (("one", 1, 1, alone), ("two", 2, 4, {})):
        (tmp_path / folder).mkdir()
        command = arguments("grpo_shapes_tiny", tmp_path / folder, **settings, **mesh)
        processes.run(command, count, devices, cache)
    check_same_run(tmp_path / "two/run", tmp_path / "one/run", other_mesh=True)
    found = runs.metrics(tmp_path / "two/run")[STEPS]
    assert found["actor/grad_norm/vision"] > 1e-2
