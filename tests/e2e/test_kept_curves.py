"""The numbers of two seeded runs are those that were kept: a change of numbers is a decision."""

import json
import subprocess

import curves
import pytest

# Another processor, number of cores or compiler rounds otherwise. The weights after the warm start
# then differ in their last digits; once one sampled token differs, all that follows it does, and
# later steps are other samples of nearly the same distribution. So only the numbers before the
# first update are compared. Of right answers, a share of 0.08 of 512 and of 256, two runs differ by
# a standard error of 0.017 and 0.024, and lengths (deviation 8) by 0.5 and 0.7: three are allowed.
ELSEWHERE = {
    "val-core/arithmetic/mean@4": 0.05,
    "val-aux/response_length/mean": 1.5,
    "critic/rewards/mean": 0.07,
    "response_length/mean": 2.1,
    "actor/entropy": 0.05,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "grpo_tiny" else pytest.mark.nightly)
        for name in curves.CONFIGS
    ],
)
def test_numbers_are_those_that_were_kept(name, tmp_path, cache):
    by_machine = json.loads(curves.FILE.read_text())
    for kept in by_machine:
        if kept["made_by"] == curves.machine():
            assert curves.curves(name, tmp_path / "run", cache) == kept[name]
            return
    kept = by_machine[0]
    found = curves.curves(name, tmp_path / "run", cache, num_steps=1)
    for metric, tolerance in ELSEWHERE.items():
        first = next(i for i, number in enumerate(kept[name][metric]) if number is not None)
        assert found[metric][first] == pytest.approx(kept[name][metric][first], abs=tolerance)


TRAIN = """
import json, pathlib, sys

flags = dict(word.split("=", 1) for word in sys.argv[1:])
workdir = pathlib.Path(flags["--workdir"])
workdir.mkdir(parents=True)
for step in range(int(flags["--config.trainer.num_steps"]) + 1):
    data = {"actor/loss": LOSS * step, "NAME": 1.0, "timing_s/step": id(data_of := [step])}
    print(json.dumps({"step": step, "data": data}), file=open(workdir / "metrics.jsonl", "a"))
"""


def test_two_versions_are_compared_in_one_session(tmp_path, capsys):
    """The working tree against a commit; times and names of one version alone do not count."""
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a"]
    train = tmp_path / "launch" / "train.py"
    train.parent.mkdir()
    train.write_text(TRAIN.replace("LOSS", "0.1").replace("NAME", "old"))
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=first"], check=True)
    train.write_text(TRAIN.replace("LOSS", "0.1").replace("NAME", "new"))
    assert curves.compare("HEAD", ["a"], 2, root=tmp_path) == {"a": ""}
    assert "a: 1 numbers are the same at every step from 0 to 2" in capsys.readouterr().out
    train.write_text(TRAIN.replace("LOSS", "(0.1 + 2.0 ** -54 * (step - 1))"))
    said = "step 2: actor/loss is 0.20000000000000012 here, 0.2 there"
    assert curves.compare("HEAD", ["a"], 2, root=tmp_path) == {"a": said}
    worktrees = subprocess.run([*git, "worktree", "list"], capture_output=True, text=True)
    assert worktrees.stdout.count("\n") == 1  # nothing is left behind


def test_the_first_difference_of_two_runs():
    one = {0: {"a": float("nan")}, 1: {"a": 1.0, "b": 2.0}}
    assert curves.first_difference(one, one) == ""
    assert curves.first_difference(one, {**one, 1: {"a": 1.0}}) == ""  # no step there has a b
    two = {0: {"a": float("nan"), "b": 1.0}, 1: {"a": 1.0, "b": 2.0}}
    assert curves.first_difference(one, two) == "step 0: b is None here, 1.0 there"
