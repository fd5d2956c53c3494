"""A run that is killed at any moment and started again takes the steps of one that was not."""

import pytest
import runs


def killed_when(moment, name, workdir, cache) -> None:
    """Starts the run and kills it, with no chance to tidy up, once `moment(workdir)` holds."""
    process = runs.start("train", [*runs.flags(name), f"--workdir={workdir}"], cache)
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


def resume(name, workdir, cache) -> str:
    """Runs to the end; returns what was said."""
    process = runs.start("train", [*runs.flags(name), f"--workdir={workdir}"], cache)
    result = runs.finish(process)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stderr


@pytest.mark.parametrize("name", ["grpo_tiny", pytest.param("ppo_tiny", marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_step_7(name, tmp_path, cache, request):
    reference = request.getfixturevalue(name.replace("_tiny", "_run"))
    killed_when(lambda workdir: 6 in runs.metrics_written(workdir), name, tmp_path / "run", cache)
    said = resume(name, tmp_path / "run", cache)
    # The save after step 6 may or may not have been complete.
    assert "resumed after step 6" in said or "resumed after step 3" in said
    check_same_run(tmp_path / "run", reference)


MOMENTS = {
    "warm_start": lambda workdir: (workdir / "config.json").exists(),
    "saving_warm_start": lambda workdir: any(workdir.glob("warm_start*")),
    "between_stages": lambda workdir: 0 in runs.metrics_written(workdir),
    "saving": lambda workdir: any(workdir.glob("checkpoints/*tmp*")),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_another_moment(moment, tmp_path, grpo_run, cache):
    killed_when(MOMENTS[moment], "grpo_tiny", tmp_path / "run", cache)
    resume("grpo_tiny", tmp_path / "run", cache)
    check_same_run(tmp_path / "run", grpo_run)
    assert not [path for path in (tmp_path / "run").rglob("*") if "tmp" in path.name]


@pytest.mark.slow
def test_killed_three_times(tmp_path, ppo_run, cache):
    for step in (2, 5, 9):
        killed_when(
            lambda workdir, step=step: step in runs.metrics_written(workdir),
            "ppo_tiny",
            tmp_path / "run",
            cache,
        )
    resume("ppo_tiny", tmp_path / "run", cache)
    check_same_run(tmp_path / "run", ppo_run)
