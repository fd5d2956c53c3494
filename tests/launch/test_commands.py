"""Commands on a model's own folder, without a run; and packages of extras that are missing."""

import json
import sys

import commands
import pytest
import runs
import serving_model

TINY = [f"--config.{name}={value}" for name, value in runs.TINY.items()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    serving_model.make_folder(folder)
    return folder


def test_a_chart_that_cannot_be_drawn_is_told_first(capsys, monkeypatch, tmp_path):
    plan = ["--config=configs/grpo_8b.py", "--devices=16", "--device=h100", "--json"]
    chart = tmp_path / "plan.png"
    code, out, log = commands.call(capsys, "plan", *plan, f"--chart={tmp_path}/none/plan.pdf")
    assert (code, out) == (1, "") and "--chart: " in log
    assert "must end in .png" in log and "no such folder; make it first" in log
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        code, out, log = commands.call(capsys, "plan", *plan, f"--chart={chart}")
    assert (code, out) == (1, "") and not chart.exists()
    assert "--chart: needs the package matplotlib" in log
    assert "pip install 'jaxrl_llm[plot]', or leave it out" in log
    code, out, _ = commands.call(capsys, "plan", *plan, f"--chart={chart}")
    assert code == 0 and json.loads(out)["num_devices"] == 16
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_model_folder_is_evaluated(capsys, model):
    config = ["--config=configs/grpo_tiny.py", *TINY]
    code, out, log = commands.call(
        capsys, "evaluate", f"--model={model}", *config, "--num_prompts=4"
    )
    assert code == 0, log
    found = json.loads(out)
    assert found["step"] == 0 and 0.0 <= found["data"]["val-core/arithmetic/mean@1"] <= 1.0

    code, _, log = commands.call(capsys, "evaluate", f"--workdir={model}")
    assert code == 1 and len(log.splitlines()) == 2, log
    assert f"{model}: the folder of a model, not of a run; give it as --model" in log
    code, _, log = commands.call(capsys, "evaluate", f"--model={model}")
    assert code == 1 and "--config: --model needs a config file" in log
    code, _, log = commands.call(capsys, "evaluate")
    assert code == 1 and "give either --model or --workdir" in log


def test_a_model_folder_answers(capsys, model):
    """Prompts and answers as long as the model allows, which is 256 tokens together."""
    prompts = ["--prompt=In the beginning", "--prompt=" + "fox " * 20]
    code, out, log = commands.call(
        capsys, "generate", f"--model={model}", *prompts, "--max_tokens=6"
    )
    assert code == 0, log
    short, long = map(json.loads, out.splitlines())
    assert short["prompt"] == "user: In the beginning\nassistant:" and short["log_prob"] < 0
    assert long["output"]
    code, _, log = commands.call(capsys, "generate", f"--model={model}", "--prompt=" + "fox " * 200)
    assert code == 1 and "an answer of 1 more does not fit the 256 that are allowed" in log
    code, _, log = commands.call(capsys, "generate", "--model=Qwen/Qwen3-8B", "--prompt=a")
    assert code == 1 and "Qwen/Qwen3-8B: is not (whole) in the cache" in log
    assert "unset HF_HUB_OFFLINE" in log and "no such local folder" in log
    assert "tokenizer" not in log


@pytest.mark.slow
def test_a_run_without_evaluation_needs_no_held_out_rows(capsys, tmp_path):
    row = {"data_source": "sums", "prompt": "1+2=", "reward_model": {"ground_truth": "3"}}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    settings = {
        **runs.TINY,
        "data.task": "files",
        "data.train_files": (str(rows),),
        "warm_start.num_steps": 0,
        "trainer.num_steps": 1,
        "evaluation.before": False,
        "evaluation.after": False,
        "evaluation.every": 0,
    }
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    workdir = f"--workdir={tmp_path / 'run'}"
    code, _, log = commands.call(capsys, "train", "--config=configs/grpo_tiny.py", *flags, workdir)
    assert code == 0, log
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
