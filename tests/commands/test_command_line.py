"""The command line: what it accepts, refuses and shows, before any library is loaded."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from jaxrl_llm.commands import command_line
from jaxrl_llm.commands.options import (
    COMMANDS,
    ExportOptions,
    GenerateOptions,
    ServeOptions,
    TrainOptions,
)
from jaxrl_llm.config import RLConfig
from jaxrl_llm.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/grpo_tiny.py"


def main(monkeypatch, *words):
    """Runs `jaxrl_llm WORDS`; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["jaxrl_llm", *words])
    try:
        command_line.main()
    except SystemExit as ended:
        return ended.code
    return 0


def problems(command, *words):
    with pytest.raises(ConfigError) as error:
        command_line.parse(command, words)
    return list(error.value.problems)


def test_options_are_typed():
    options = command_line.parse(
        TrainOptions, [CONFIG, "--workdir", "a b", "--config.trainer.num_steps=3"]
    )
    assert isinstance(options.config, RLConfig) and options.config.trainer.num_steps == 3
    assert (options.workdir, options.dry_run, options.start) == ("a b", False, "auto")
    options = command_line.parse(
        GenerateOptions, ["--model=m", "--prompt=1", "--prompt=2", "--process_id=1"]
    )
    assert options.prompt == ("1", "2") and options.samples == 1 and options.process_id == 1


def test_each_mistake_is_named_with_its_remedy():
    assert problems(TrainOptions, CONFIG) == [
        "--workdir: required: Folder of the job, made if missing; also gs:// or s3://."
    ]
    (said,) = problems(TrainOptions, CONFIG, "--workdir=w", "--config.trainer.minibatch_size=48")
    assert said.startswith("config.trainer.minibatch_size: 48 does not divide")
    (said,) = problems(TrainOptions, CONFIG, "--workdir=w", "--config.trainer.minibatch=48")
    assert "unknown field; did you mean 'minibatch_size'?" in said
    (said,) = problems(TrainOptions, CONFIG, "--workdir=w", "config.seed=1")
    assert said == "'config.seed=1' is no flag; did you mean --config.seed=1?"
    assert "Unknown command line flag 'ouut'" in problems(ExportOptions, "--ouut=a")[0]
    assert problems(ServeOptions, "--port=70000", "--tensor=0") == [
        "--port: must be in [0, 65535] (0: any free port), got 70000",
        "--tensor: must be in [1, 2147483647], got 0",
    ]
    assert problems(ServeOptions, "--model=a", "--workdir=b") == [
        "--model: give either --model or --workdir"
    ]
    assert "flag --dtype=int8: value should be one of" in problems(ServeOptions, "--dtype=int8")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name):
    shown = command_line.usage(name, COMMANDS[name]).splitlines()
    assert len(shown) <= 30 and max(map(len, shown)) <= 100
    assert not [text for text in shown if "Required" in text and "Default" in text]


def test_the_overview_fits_a_narrow_screen():
    shown = command_line.overview().splitlines()
    assert len(shown) <= 30 and max(map(len, shown)) <= 80


@pytest.mark.parametrize(
    "words, code, said",
    [
        ([], 0, "usage: jaxrl_llm COMMAND"),
        (["train", "--help"], 0, "--workdir=TEXT"),
        (["--version"], 0, "."),
        (["trian"], 1, "error: 'trian' is no command; did you mean 'train'?"),
        (["export", "--workdir=a"], 1, "--out: required"),
        (["completion", "bash"], 0, "complete -o filenames"),
        (["completion", "fish"], 1, "jaxrl_llm completion bash"),
    ],
)
def test_the_program_answers(words, code, said, monkeypatch, capsys):
    assert main(monkeypatch, *words) == code
    shown = capsys.readouterr()
    assert said in (shown.err if code else shown.out)


def test_nothing_is_loaded_for_help_and_refusals():
    program = (
        "import sys\n"
        "from jaxrl_llm.commands import command_line\n"
        "for words in (['--help'], ['serve', '--help'], ['completion', 'bash'],\n"
        f"              ['train', {CONFIG!r}, '--workdir=w', '--config.trainer.num_steps=-1']):\n"
        "    sys.argv[1:] = words\n"
        "    try:\n"
        "        command_line.main()\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 1 and words[0] == 'train', ended\n"
        "print([name for name in ('jax', 'flax', 'transformers', 'rich') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n") and "config.trainer.num_steps: must be" in done.stderr


def test_a_reader_may_go_before_the_help_ends():
    program = (
        "import sys; from jaxrl_llm.commands.command_line import main; sys.stdin.read(); main()"
    )
    words = [sys.executable, "-c", program, "serve", "--help"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"" and process.wait() == 1


def test_a_dry_run_allocates_nothing_and_prints_a_config(monkeypatch, capsys, tmp_path):
    workdir = tmp_path / "run"
    words = ["train", CONFIG, f"--workdir={workdir}", "--dry_run", "--config.seed=7"]
    small = {"data.arithmetic_train_prompts": 8, "data.arithmetic_eval_prompts": 4}
    words += [f"--config.{name}={value}" for name, value in small.items()]
    words += ["--config.trainer.max_tokens_per_microbatch=0"]
    assert main(monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    assert not workdir.exists() and not list(tmp_path.iterdir())
    assert "GiB a device" in shown and "# Checked; nothing was allocated" in shown
    (tmp_path / "again.yaml").write_text(shown)
    again = command_line.parse(
        TrainOptions, [f"--config={tmp_path}/again.yaml", f"--workdir={workdir}"]
    ).config
    first = command_line.parse(
        TrainOptions, [word for word in words[1:] if word != "--dry_run"]
    ).config
    assert isinstance(again, RLConfig) and isinstance(first, RLConfig)
    assert again.trainer.max_tokens_per_microbatch > 0  # chosen by the plan
    assert (again.seed, again.rewards) == (7, first.rewards)
    # Hyperparameters that the loss has by default are shown too.
    assert again.algorithm == dataclasses.replace(first.algorithm, loss_args={"dual_clip": 3.0})

    workdir.mkdir()
    (workdir / "metrics.jsonl").write_text("{}")
    assert main(monkeypatch, *words) == 1
    assert "holds metrics.jsonl but no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_arguments_of_another_loss_are_refused_before_any_work(
    monkeypatch, capsys, tmp_path, command
):
    words = [command, CONFIG, "--config.algorithm.loss_args.tau_pos=1.2"]
    words += [f"--workdir={tmp_path / 'run'}"] if command == "train" else []
    assert main(monkeypatch, *words) == 1
    said = capsys.readouterr().err
    assert "config.algorithm.loss_args.tau_pos: a hyperparameter of policy_loss='sapo'" in said
    assert not (tmp_path / "run").exists()


def test_completion_knows_flags_and_keys():
    script = """
source <(echo "$1")
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _jaxrl_llm; echo "${COMPREPLY[*]}"; }
try jaxrl_llm tr
try jaxrl_llm export --wo
try jaxrl_llm train --config.trainer.num
try jaxrl_llm train --config.rewards.fun
try jaxrl_llm train --config = pyproj
"""
    found = subprocess.run(
        ["bash", "-c", script, "bash", command_line.completion.completion_script(["bash"])],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert json.dumps(found.stdout.split()) == json.dumps([
        "train", "--workdir=", "--config.trainer.num_steps=", "--config.rewards.functions.",
        "pyproject.toml",
    ]), found.stderr  # fmt: skip
