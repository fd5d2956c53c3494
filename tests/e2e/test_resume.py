"""A run that is killed at any moment and started again takes the steps of one that was not."""

import pytest
import runs

# The built-in reward, but in step 7 it waits to be killed; the numbers are the same.
REWARD = """
import pathlib, time
from jaxrl_llm.rewards.functions import arithmetic

HERE = pathlib.Path(__file__).parent

def score(data_source, solution_str, ground_truth, extra_info):
    if (HERE / "run/rollouts/6.jsonl").exists() and not (HERE / "killed").exists():
        (HERE / "in_step_7").touch()
        time.sleep(3600)
    return arithmetic(data_source, solution_str, ground_truth, extra_info)
"""


def killed_when(moment, arguments, workdir, cache) -> None:
    """Starts the run and kills it, with no chance to tidy up, once `moment(workdir)` holds."""
    process = runs.start("train", arguments, cache)
    runs.wait_until(lambda: moment(workdir), process)
    process.kill()
    process.communicate()
    assert 12 not in runs.metrics_written(workdir)


def check_same_run(workdir, reference) -> None:
    """All numbers of all steps and all samples are the same, bit for bit."""
    found, wanted = runs.metrics(workdir), runs.metrics(reference)
    assert list(found) == list(wanted) == list(range(13))
    for step in wanted:
        assert runs.repeatable(found[step]) == runs.repeatable(wanted[step]), step
    for step in range(1, 13):
        dump = f"rollouts/{step}.jsonl"
        assert (workdir / dump).read_bytes() == (reference / dump).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("grpo_tiny", marks=pytest.mark.nightly),  # tests/faults kill it everywhere
        pytest.param("ppo_tiny", marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_of_step_7(name, tmp_path, cache, request):
    reference = request.getfixturevalue(name.replace("_tiny", "_run"))
    (tmp_path / "reward.py").write_text(REWARD)
    workdir = tmp_path / "run"
    function = {"answer": {"function": f"{tmp_path}/reward.py:score"}}
    arguments = [*runs.flags(name, {"rewards.functions": function}), f"--workdir={workdir}"]
    killed_when(lambda _: (tmp_path / "in_step_7").exists(), arguments, workdir, cache)
    assert max(runs.metrics_written(workdir)) == 6
    (tmp_path / "killed").touch()
    result = runs.finish(runs.start("train", arguments, cache))
    assert result.returncode == 0, result.stderr[-4000:]
    # The save after step 6 may or may not have been complete.
    assert any(f"resumed after step {step}" in result.stderr for step in (3, 6))
    check_same_run(workdir, reference)
    if name == "ppo_tiny":
        steps = list(runs.metrics(reference).values())[1:]
        coefficients = [data["actor/reward_kl_penalty_coeff"] for data in steps]
        assert len(set(coefficients)) == len(steps)  # the controller moved it in every step


MOMENTS = {
    "warm_start": lambda workdir: (workdir / "config.json").exists(),
    "saving_warm_start": lambda workdir: any(workdir.glob("warm_start/product*")),
    "between_stages": lambda workdir: 0 in runs.metrics_written(workdir),
    "saving": lambda workdir: any(workdir.glob("checkpoints/*tmp*")),
}


@pytest.mark.parametrize(
    "moment",
    [
        # At the others tests/faults and tests/trainer/test_stages.py end it.
        pytest.param(m, marks=pytest.mark.slow if m == "between_stages" else pytest.mark.nightly)
        for m in MOMENTS
    ],
)
def test_killed_at_another_moment(moment, tmp_path, grpo_run, cache):
    arguments = [*runs.flags("grpo_tiny"), f"--workdir={tmp_path / 'run'}"]
    killed_when(MOMENTS[moment], arguments, tmp_path / "run", cache)
    runs.launch("train", arguments, cache)
    check_same_run(tmp_path / "run", grpo_run)
    assert not [path for path in (tmp_path / "run").rglob("*") if "tmp" in path.name]


@pytest.mark.nightly
def test_run_killed_three_times_repeats_itself(tmp_path, ppo_run, cache):
    arguments = [*runs.flags("ppo_tiny"), f"--workdir={tmp_path / 'run'}"]
    for step in (2, 4, 6):
        killed_when(
            lambda workdir, step=step: step in runs.metrics_written(workdir),
            arguments,
            tmp_path / "run",
            cache,
        )
    runs.launch("train", arguments, cache)
    check_same_run(tmp_path / "run", ppo_run)
