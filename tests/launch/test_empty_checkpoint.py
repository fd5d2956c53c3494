"""A folder `checkpoints/7` without a file counts as no step: not to a run, not to its readers."""

import pytest
import recipe_settings
from commands import call, refused

import jaxrl_llm
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.workdir import claim_workdir
from jaxrl_llm.planning import resolve_sizes

SETTINGS = {
    "trainer": {"num_steps": 2},
    "metrics": {"tensorboard": False, "console": False},
    "evaluation": {"before": False},
}


def config():
    return from_config_dict(recipe_settings.merged(recipe_settings.SUMS, SETTINGS))


@pytest.mark.parametrize("name", ["evaluate", "generate", "export", "serve"])
def test_readers_of_a_run_without_a_checkpoint_say_so(capsys, tmp_path, name):
    claim_workdir(config(), tmp_path)
    (tmp_path / "checkpoints" / "7" / "arrays").mkdir(parents=True)
    more = {"generate": ["--prompt=1+1="], "export": [f"--out={tmp_path / 'out'}"]}
    message = refused(capsys, name, f"--workdir={tmp_path}", *more.get(name, ()))
    assert "checkpoints: no complete checkpoint; wait until the run has saved one" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_goes_on_and_is_read_beside_it(capsys, tmp_path, caplog):
    for step in ("7", "2"):  # more than the run has; the one that it will save
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    claim = tmp_path / "config.json"
    claim_workdir(resolve_sizes.resolve(config(), tmp_path / "other"), tmp_path / "other")
    (tmp_path / "other" / "config.json").rename(claim)
    jaxrl_llm.train(config(), tmp_path)
    assert (tmp_path / "checkpoints" / "2" / "sha256.json").exists()
    assert "7: empty, no checkpoint; it is removed" in caplog.text
    (tmp_path / "checkpoints" / "7").mkdir()
    code, out, said = call(capsys, "generate", f"--workdir={tmp_path}", "--prompt=1+1=")
    assert code == 0, said
    assert '"output"' in out
