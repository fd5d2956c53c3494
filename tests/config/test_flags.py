"""Config files that cannot be read end with file, line and remedy."""

import pytest

from jaxrl_llm.commands import command_line
from jaxrl_llm.commands.options import PlanOptions
from jaxrl_llm.config.flags import unknown_overrides
from jaxrl_llm.errors import ConfigError

GOOD = """from jaxrl_llm.config.bridge import default_config_dict
def get_config(size="small"):
    config = default_config_dict()
    config.rewards.functions.answer = dict(function="arithmetic")
    return config
"""


@pytest.mark.parametrize(
    "content, message",
    [
        (b"x = 1\ndef get_config(:\n", ", line 2: SyntaxError: invalid syntax; mend the file"),
        (b"\nimport absent_package\n", ", line 2: ModuleNotFoundError: No module named 'absent_"),
        (b"x = 1\n", ": has no function get_config(); see configs/grpo_tiny.py"),
        (b"def get_config():\n  return [1][2]\n", ", line 2: IndexError: list index out of range"),
        (b"def get_config():\n  pass\n", ": get_config() returned None; return the config"),
        (b"raise SystemExit(3)\n", ", line 1: SystemExit: 3; mend the file"),
        (b"\xff\xfe\x00", ": SyntaxError: "),
        (b"def get_config():\n  raise SystemError('no')\n", ", line 2: SystemError: no"),
        (b"def get_config(): return 3\n", ": get_config() returned 3; return the config"),
        (b"def get_config(): raise OSError(2, 'gone')\n", ", line 1: FileNotFoundError"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_named_with_its_line(tmp_path, content, message):
    file = tmp_path / "run.py"
    file.write_bytes(content)
    (said,) = unknown_overrides(["train.py", f"--config={file}", "--config.no_such=1"])
    assert said.startswith(f"--config: {file}") and message in said


@pytest.mark.parametrize("name", ["absent.py", "", "a\0b", "x" * 5000])
def test_missing_config_file_is_named(tmp_path, name):
    (said,) = unknown_overrides(["train.py", "--config", f"{tmp_path}/{name}"])
    assert ": no such file; " in said and said.endswith("lists those that come with the package")


def test_overrides_of_an_entry_that_the_file_has(tmp_path):
    file = tmp_path / "run.py"
    file.write_text(GOOD)
    key = "--config.rewards.functions.answer"
    assert unknown_overrides(["train.py", f"--config={file}:large", f"{key}.weight=2"]) == []
    (said,) = unknown_overrides(["train.py", f"--config={file}", f"{key}.wait=2"])
    assert said.startswith("config.rewards.functions.answer.wait: unknown field")


@pytest.mark.parametrize(
    "file, words, loss_args",
    [
        ("", ["tau_pos=1.2"], {"tau_pos": 1.2}),
        ("", ["tau_pos=2", "tau_neg=inf"], {"tau_pos": 2.0, "tau_neg": float("inf")}),
        # Over the entries of the file, in Python and in YAML; 3 is a whole number there.
        ("{'tau_pos': 3}", ["tau_pos=0.5"], {"tau_pos": 0.5}),
        ("{'tau_pos': 3}", ["tau_neg=0.5"], {"tau_pos": 3.0, "tau_neg": 0.5}),
    ],
)
@pytest.mark.parametrize("suffix", ["py", "yaml"])
def test_loss_arguments_on_the_command_line(tmp_path, suffix, file, words, loss_args):
    text = GOOD.replace(
        "    return", f"    config.algorithm.loss_args = {file or '{}'}\n    return"
    )
    if suffix == "yaml":
        text = f"algorithm: {{loss_args: {file or '{}'}}}\n".replace("'", "")
        text += "rewards: {functions: {answer: {function: arithmetic}}}\n"
    (tmp_path / f"run.{suffix}").write_text(text)
    flags = [f"--config={tmp_path}/run.{suffix}"]
    flags += [f"--config.algorithm.loss_args.{word}" for word in words]
    config = command_line.parse(PlanOptions, flags).config
    assert config.algorithm.loss_args == loss_args


def test_a_whole_group_of_loss_arguments_on_the_command_line(tmp_path):
    (tmp_path / "run.py").write_text(GOOD)
    flag = "--config.algorithm.loss_args={'tau_pos': 1.2}"
    config = command_line.parse(PlanOptions, [f"--config={tmp_path}/run.py", flag]).config
    assert config.algorithm.loss_args == {"tau_pos": 1.2}


def test_a_loss_argument_is_a_number(tmp_path):
    (tmp_path / "run.py").write_text(GOOD)
    for word, message in (
        ("tau_pos=x", "--config.algorithm.loss_args.tau_pos=x"),
        ("tau_pos.x=1", "config.algorithm.loss_args.tau_pos is float and has no fields"),
    ):
        flags = [f"--config={tmp_path}/run.py", f"--config.algorithm.loss_args.{word}"]
        with pytest.raises(ConfigError, match=message):
            command_line.parse(PlanOptions, flags)
