"""A finished run: what is in its folder, and what the other programs make of it."""

import json
import pathlib
import re

import commands
import numpy as np
import pytest
import runs

GRPO_NUMBERS = {
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "actor/loss",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/entropy",
    "response_length/mean",
    "training/rollout_probs_diff_mean",
    "timing_s/gen",
    "timing_s/step",
    "perf/throughput",
    "rollout/decode_tokens_per_s",
    "reward/answer/mean",
}
PPO_NUMBERS = {"critic/loss", "critic/vf_explained_var", "critic/values/mean"}


def check_folder(workdir, wanted: set[str]) -> None:
    """Every step has its line, its numbers, its dump; the last steps are kept."""
    found = runs.metrics(workdir)
    assert list(found) == list(range(13))
    held_out = [step for step, data in found.items() if "val-core/arithmetic/mean@1" in data]
    assert held_out == [0, 5, 10, 12]
    for step in range(1, 13):
        assert wanted <= found[step].keys(), wanted - found[step].keys()
        rows = (workdir / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        assert len(rows) == 16
        scores = [json.loads(row)["score"] for row in rows]
        assert np.mean(scores) == pytest.approx(found[step]["critic/score/mean"])
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"9", "12"}
    # Nothing half-written is left: no temporary file or folder of any writer.
    assert not [path for path in workdir.rglob("*") if "tmp" in path.name]


def test_grpo_run_folder_is_complete(grpo_run):
    check_folder(grpo_run, GRPO_NUMBERS)
    row = json.loads((grpo_run / "rollouts" / "1.jsonl").read_text().splitlines()[0])
    assert row["input"].count("+") == 2 and row["step"] == 1
    # Four samples stand next to each other behind one prompt.
    rows = [json.loads(r) for r in (grpo_run / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert all(len({row["input"] for row in rows[i : i + 4]}) == 1 for i in range(0, 16, 4))


@pytest.mark.slow
def test_ppo_run_folder_is_complete(ppo_run):
    check_folder(ppo_run, (GRPO_NUMBERS - {"actor/kl_loss"}) | PPO_NUMBERS)
    assert any((ppo_run / "profile").rglob("*.xplane.pb"))


def test_the_engine_and_the_learner_agree(grpo_run):
    """The same weights and network: what differs is rounding, float32 on both sides."""
    for step, data in runs.metrics(grpo_run).items():
        if step:
            assert data["training/rollout_probs_diff_max"] < 1e-4


def test_run_output_is_readable(grpo_run):
    out = (grpo_run.parent / "stdout").read_text().splitlines()
    assert [line.split()[0] for line in out[:5]] == [
        "policy", "devices", "memory", "steps", "files"
    ]  # fmt: skip
    assert "qwen2 with new weights" in out[0] and str(grpo_run) in out[4]
    numbers = runs.metrics(grpo_run)
    steps = [line for line in out if re.match(r"step \d+/12  reward ", line)]
    assert [int(line[5 : line.index("/")]) for line in steps] == list(range(1, 13))
    for step, line in enumerate(steps, start=1):
        assert len(line) < 120 and line.count("  ") >= 6
        assert f"length {numbers[step]['response_length/mean']:.4g}" in line
    evaluated = [step for step, data in numbers.items() if any("val-core" in n for n in data)]
    told = [line for line in out if re.match(r"step \d+/12  evaluation: arithmetic mean@1 ", line)]
    assert [int(line[5 : line.index("/")]) for line in told] == evaluated
    end = out[out.index(told[-1]) + 1 :]
    assert end[0].startswith("done in ") and end[1].split() == ["step", "0", "step", "12"]
    assert [line.split()[0] for line in end[-4:]] == [
        "numbers", "samples", "weights", "goodput"
    ]  # fmt: skip
    assert all(pathlib.Path(line.split()[1]).exists() for line in end[-4:-1])
    err = (grpo_run.parent / "stderr").read_text()
    assert not re.search(r"^[IWEF]\d{4} |0\.000 MB|read_only|PyTorch", err, re.MULTILINE), err


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(grpo_run, cache):
    before = (grpo_run / "metrics.jsonl").read_bytes()
    runs.launch("train", [*runs.flags("grpo_tiny"), f"--workdir={grpo_run}"], cache)
    assert (grpo_run / "metrics.jsonl").read_bytes() == before


def test_evaluate_repeats_the_run_s_own_number(grpo_run, capsys, one_device):
    """Greedy on the same prompts with the last checkpoint: what the run found after step 12."""
    flags = [f"--workdir={grpo_run}", "--num_prompts=8"]
    code, out, log = commands.call(capsys, "evaluate", *flags)
    assert code == 0, log
    found = json.loads(out)
    last = runs.metrics(grpo_run)[12]
    assert found["step"] == 12
    assert found["data"] == {name: last[name] for name in found["data"]}
    assert {"val-core/arithmetic/mean@1", "val-core/arithmetic/pass@1"} <= found["data"].keys()


@pytest.mark.slow
def test_evaluate_output_is_readable(grpo_run, cache):
    flags = [f"--workdir={grpo_run}", "--num_prompts=8"]
    result = runs.finish(runs.start("evaluate", flags, cache))
    assert result.returncode == 0, result.stderr[-4000:]
    assert "read_only" not in result.stderr
    assert json.loads(result.stdout)["step"] == 12


def test_generate_answers_each_prompt(grpo_run, capsys, one_device):
    # The run's own prompts have at most 16 tokens, and so have its answers.
    asked = ["3+4+2=", "1+" * 20]
    options = [*(f"--prompt={text}" for text in asked), "--samples=2", "--temperature=1.0"]
    flags = [f"--workdir={grpo_run}", *options, "--max_tokens=20"]
    code, out, log = commands.call(capsys, "generate", *flags)
    assert code == 0, log
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == [text for text in asked for _ in range(2)]
    assert all(row["log_prob"] < 0 for row in rows)


@pytest.mark.parametrize("program", ["evaluate", "generate", "export"])
def test_a_folder_that_is_no_run_is_named(tmp_path, capsys, program):
    flags = {
        "evaluate": [],
        "generate": ["--prompt=1+2="],
        "export": [f"--out={tmp_path / 'out'}"],
    }[program]
    said = commands.refused(capsys, program, f"--workdir={tmp_path}", *flags)
    assert f"{tmp_path}/config.json: cannot be read" in said
    assert not (tmp_path / "out").exists()
