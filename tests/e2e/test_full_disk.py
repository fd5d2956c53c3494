"""A disk that is full or read-only: a message, nothing half-written, and the run can go on."""

import resource

import commands
import pytest
import runs

# Compiled programs that such a run keeps may be cut short, so it has a folder of its own for them.
# Root ignores file permissions; a limit on the size of a file stops a writer as a full disk does.


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    """Bytecode of modules that is cut short would end every later process that reads it."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def limited(num_bytes: int):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    return limit


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_bytes, what",
    [(100, "config.json"), (10_000, "warm_start/checkpoints/4: could not be saved")],
)
def test_the_run_ends_with_a_message(tmp_path, num_bytes, what):
    workdir = tmp_path / "run"
    arguments = [*runs.flags("grpo_tiny"), f"--workdir={workdir}"]
    said = runs.refused("train", arguments, tmp_path / "compiled", preexec_fn=limited(num_bytes))
    assert f"{workdir}/{what}" in said and "File too large" in said and "check free space" in said
    assert not (workdir / "warm_start" / "product").exists()
    assert [path.name for path in workdir.iterdir() if path.is_file()] == (
        [] if what == "config.json" else ["config.json"]
    )


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_saved(tmp_path, cache):
    """The steps before it are kept, and a later start goes on from them."""
    workdir = tmp_path / "run"
    settings = {"warm_start.num_steps": 0, "metrics.rollouts_every": 0}
    arguments = [*runs.flags("grpo_tiny", settings), f"--workdir={workdir}"]
    said = runs.refused("train", arguments, tmp_path / "compiled", preexec_fn=limited(20_000))
    assert f"{workdir}/checkpoints/3: could not be saved" in said
    assert "File too large" in said and "earlier checkpoints are untouched" in said
    assert not (workdir / "checkpoints" / "3").exists()
    runs.launch("train", arguments, cache)
    assert list(runs.metrics(workdir)) == list(range(13))


@pytest.mark.slow
def test_going_on_without_a_checkpoint(tmp_path):
    workdir = tmp_path / "run"
    settings = {
        "warm_start.num_steps": 0,
        "metrics.rollouts_every": 0,
        "trainer.num_steps": 4,
        "checkpoint.on_failure": "continue",
    }
    arguments = [*runs.flags("grpo_tiny", settings), f"--workdir={workdir}"]
    result = runs.finish(
        runs.start("train", arguments, tmp_path / "compiled", preexec_fn=limited(20_000))
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "going on without this checkpoint" in result.stderr
    assert list(runs.metrics(workdir)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("program", ["train", pytest.param("export", marks=pytest.mark.slow)])
def test_a_folder_that_cannot_be_made(tmp_path, capsys, one_device, request, program):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "run"
    if program == "train":
        arguments = [*runs.flags("grpo_tiny"), f"--workdir={target}"]
    else:
        arguments = [f"--workdir={request.getfixturevalue('grpo_run')}", f"--out={target}"]
    said = commands.refused(capsys, program, *arguments)
    assert str(tmp_path / "file") in said
    assert (tmp_path / "file").read_text() == ""
