"""The command trains whatever job a config names; a job that ended in its middle goes on."""

import json
import os
import shutil
import signal
import sys

import commands
import numpy as np
import orbax.checkpoint as ocp
import pytest
import runs
from chat_dialogues import DROPPING

import jaxrl_llm
from jaxrl_llm import program
from jaxrl_llm.config import ConfigError
from jaxrl_llm.metrics.writer import Writer

FILE = """
from jaxrl_llm.config.bridge import default_config_dict


def get_config():
    config = default_config_dict("sft")
    config.model.hidden_size = 32
    config.model.num_layers = 1
    config.model.num_heads = 2
    config.model.num_kv_heads = 1
    config.model.mlp_size = 64
    config.data.max_prompt_tokens = 16
    config.trainer.num_steps = 10
    config.trainer.batch_size = 64
    config.trainer.max_sequence_tokens = 64
    config.trainer.optimizer.learning_rate = 3e-3
    config.checkpoint.every = 4
    config.metrics.tensorboard = config.metrics.console = False
    return config
"""


@pytest.fixture
def start(tmp_path, capsys, monkeypatch, one_device):
    """Returns `start(workdir, *flags)`, which runs the command; its exit code and what it said."""
    (tmp_path / "sft.py").write_text(FILE)
    monkeypatch.setattr(program, "_exit_at_once", sys.exit)  # it ends a process at once

    def run(workdir, *flags):
        code, printed, logged = commands.call(
            capsys, "train", f"--config={tmp_path / 'sft.py'}", f"--workdir={workdir}", *flags
        )
        return code, printed + logged

    return run


def arrays(step):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(step / "arrays")


def test_sft_by_the_command_resumes_and_is_the_same_as_by_a_call(start, tmp_path, monkeypatch):
    small = "--config.trainer.batch_size=16"
    module: dict = {}
    exec(FILE, module)
    config = module["get_config"]()
    config.trainer.batch_size = 16
    state = jaxrl_llm.train(config, tmp_path / "whole")
    assert int(state.num_updates) == 10
    whole = runs.metrics(tmp_path / "whole")
    assert list(whole) == list(range(11))
    assert whole[10]["sft/loss"] < whole[1]["sft/loss"]
    assert whole[10]["val/sft/loss"] < whole[0]["val/sft/loss"]
    assert whole[10]["val/sft/token_accuracy"] > whole[0]["val/sft/token_accuracy"]
    assert whole[10]["perf/total_num_tokens"] > 0 and "timing_s/update" in whole[10]

    write = Writer.write

    def ending(self, step, *numbers):
        write(self, step, *numbers)
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "write", ending)
        code, _ = start(tmp_path / "cut", small)
    assert code == 75 and max(runs.metrics(tmp_path / "cut")) == 6
    assert (tmp_path / "cut" / "checkpoints" / "6").exists()
    code, said = start(tmp_path / "cut", small)
    assert code == 0, said
    cut = runs.metrics(tmp_path / "cut")
    assert list(cut) == list(whole)
    for step in whole:
        assert runs.repeatable(cut[step]) == runs.repeatable(whole[step]), step
    mine, other = (arrays(tmp_path / name / "checkpoints" / "10") for name in ("cut", "whole"))
    assert mine.keys() == other.keys() and len(mine) > 3
    for name in mine:
        assert np.asarray(mine[name]).tobytes() == np.asarray(other[name]).tobytes(), name

    # The folder is that job's.
    (tmp_path / "sft.py").write_text(FILE.replace('"sft"', '"dpo"'))
    code, said = start(tmp_path / "whole", small)
    assert code == 1 and "belongs to another run" in said and "config.job: 'dpo'" in said


@pytest.fixture
def dialogues(tmp_path):
    """Flags of a job on ten dialogues of three turns, each rewritten; and their file."""
    (tmp_path / "template.jinja").write_text(DROPPING)
    turn = lambda i: [("user", f"{i}+1="), ("assistant", f"{i}|{i + 1}")]  # noqa: E731
    path = tmp_path / "dialogues.jsonl"
    with path.open("w") as file:
        for i in range(10):
            turns = [*turn(i), *turn(i + 1), *turn(i + 2)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    flags = (
        f"--config.model.chat_template={tmp_path / 'template.jinja'}",
        "--config.data.task=files",
        f"--config.data.train_files=('{path}',)",
        "--config.evaluation.before=False",
        "--config.evaluation.after=False",
        "--config.trainer.batch_size=4",
    )
    return flags, path


def test_the_command_says_how_many_sequences_rows_give_and_names_rows(start, tmp_path, dialogues):
    flags, path = dialogues
    code, said = start(tmp_path / "run", *flags, "--dry_run")
    assert code == 0 and "train split: 10 rows gave 30 sequences" in said
    code, said = start(tmp_path / "run", *flags, "--dry_run", "--config.data.rewritten_turns=whole")
    assert code == 0 and "10 rows have 20 turns that are trained as the chat template" in said
    empty = [{"role": "user", "content": "1"}, {"role": "assistant", "content": ""}]
    with path.open("a") as file:
        file.write(json.dumps({"messages": empty}) + "\n")
    code, said = start(tmp_path / "run", *flags, "--dry_run")
    assert code == 1
    assert f"{path}, row 11: message 2, of the assistant, is empty and would be trained" in said


@pytest.mark.slow
def test_sft_on_streamed_dialogues_resumes_inside_a_row(start, tmp_path, dialogues, monkeypatch):
    flags = *dialogues[0], "--config.data.stream=True", "--config.trainer.num_steps=6"
    code, said = start(tmp_path / "whole", *flags)
    assert code == 0 and "2 rows so far gave 6 sequences" in said
    whole = runs.metrics(tmp_path / "whole")
    write = Writer.write

    def ending(self, step, *numbers):
        write(self, step, *numbers)
        if step == 4:  # after 16 sequences: one of the sixth row
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "write", ending)
        code, _ = start(tmp_path / "cut", *flags)
    assert code == 75
    code, said = start(tmp_path / "cut", *flags)
    assert code == 0, said
    cut = runs.metrics(tmp_path / "cut")
    for step in whole:
        assert runs.repeatable(cut[step]) == runs.repeatable(whole[step]), step


def test_a_reward_model_is_a_job(tmp_path, one_device):
    config = jaxrl_llm.default_config("reward_model")
    config.model.hidden_size, config.model.num_layers = 32, 1
    config.data.max_prompt_tokens = 16
    config.trainer.num_steps, config.trainer.batch_size = 3, 8
    config.trainer.max_sequence_tokens = 128
    config.metrics.tensorboard = config.metrics.console = False
    state = jaxrl_llm.train(config, tmp_path / "run")
    assert state.params["score"].shape[0] == 1 and int(state.num_updates) == 3
    found = runs.metrics(tmp_path / "run")
    assert list(found) == [0, 1, 2, 3]
    assert found[1]["reward_model/loss"] == pytest.approx(np.log(2))
    assert found[0]["val/reward_model/loss"] == pytest.approx(np.log(2))
    assert (tmp_path / "run" / "checkpoints" / "3").exists()


@pytest.mark.parametrize(
    "learns", ["all weights", pytest.param("adapters", marks=pytest.mark.slow)]
)
def test_dpo_is_a_job(learns, tmp_path, one_device):
    """The reference is the policy's first weights; sampled answers are scored on the way."""
    config = jaxrl_llm.default_config("dpo")
    config.model.hidden_size, config.model.num_layers, config.model.head_size = 32, 1, 8
    config.data.max_prompt_tokens = 16
    config.data.arithmetic_eval_prompts = 8
    config.rollout.max_response_tokens = 8
    config.trainer.num_steps, config.trainer.batch_size = 3, 8
    config.trainer.max_sequence_tokens = 128
    config.trainer.optimizer.learning_rate = 1e-2
    config.lora.rank = 4 if learns == "adapters" else 0
    config.evaluation.functions.answer = {"function": "arithmetic"}
    config.metrics.tensorboard = config.metrics.console = False
    state = jaxrl_llm.train(config, tmp_path / "run")
    assert int(state.num_updates) == 3
    assert state.params.keys() == {"layers"} | (
        {"embed", "norm"} if not config.lora.rank else set()
    )
    found = runs.metrics(tmp_path / "run")
    assert list(found) == [0, 1, 2, 3]
    assert found[1]["dpo/loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert abs(found[1]["rewards/margins"]) < 1e-5 < found[3]["rewards/margins"]
    assert found[0]["val/rewards/margins"] == 0.0 < abs(found[3]["val/rewards/margins"])
    assert found[3]["val/logps/chosen"] < 0 <= found[3]["val-core/arithmetic/mean@1"]
    assert "timing_s/ref" in found[3] and "timing_s/testing" in found[3]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", "aot_unpaired", "orpo"])
def test_losses_of_other_rows_are_the_same_job(loss, tmp_path, one_device):
    """Single answers, a pass before the update, no reference: evaluated, and resumed exactly."""
    config = jaxrl_llm.default_config("dpo")
    config.model.hidden_size, config.model.num_layers, config.model.head_size = 32, 1, 8
    config.data.max_prompt_tokens = 16
    config.data.arithmetic_eval_prompts = 8
    config.dpo.loss = loss
    config.trainer.num_steps, config.trainer.batch_size = 3, 8
    config.trainer.max_sequence_tokens = 128
    config.trainer.optimizer.learning_rate = 1e-2
    config.checkpoint.every = 2
    config.metrics.tensorboard = config.metrics.console = False
    jaxrl_llm.train(config, tmp_path / "run")
    found = runs.metrics(tmp_path / "run")
    assert list(found) == [0, 1, 2, 3]
    first = {"kto": 0.5, "aot_unpaired": np.log(2)}.get(loss)
    for key in ("dpo/loss", "val/dpo/loss"):
        values = [step[key] for step in found.values() if key in step]
        assert np.isfinite(values).all() and len(set(values)) > 1
        assert first is None or values[0] == pytest.approx(first, rel=1e-4)
    assert ("timing_s/ref" in found[1]) == (loss != "orpo")
    assert ("dpo/baseline" in found[1]) == (loss == "kto")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    names = {"kto": {"desirable_weight", "undesirable_weight"}, "orpo": {"nll_on_prompt"}}
    assert saved["dpo"]["loss_args"].keys() == names.get(loss, set())
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "3")
    jaxrl_llm.train(config, tmp_path / "again")
    again = runs.metrics(tmp_path / "again")
    assert runs.repeatable(again[3]) == runs.repeatable(found[3])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"job": "kto"}, "config.job: unknown job 'kto'; known: rl, sft, dpo, reward_model"),
        ({"job": "reward_model", "rollout": {}}, "config.rollout: unknown field"),
        (
            {"job": "dpo", "dpo": {"loss": "ipo", "label_smoothing": 0.1}},
            "config.dpo.label_smoothing: no effect on loss='ipo'; set it to 0, or use",
        ),
        (
            {
                "job": "sft",
                "data": {"task": "gsm8k", "train_files": ["a"]},
                "evaluation": {"every": 2},
            },
            "config.evaluation.every: 2, but no rows are held out; name data.eval_files",
        ),
        (
            {"job": "sft", "trainer": {"max_sequence_tokens": 8}},
            "config.trainer.max_sequence_tokens: the longest row has .* raise it",
        ),
        (
            {"job": "sft", "trainer": {"max_tokens_per_microbatch": 32}},
            "config.trainer.max_tokens_per_microbatch: ",
        ),
    ],
    ids=str,
)
def test_unknown_jobs_are_refused(changes, message, tmp_path, one_device):
    with pytest.raises(ConfigError, match=message):
        jaxrl_llm.train(changes, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
