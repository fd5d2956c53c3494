"""Folders of a family that is not in the table: which known one they could be read as."""

import json

import hf_checkpoints
import pytest

from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError


@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
def test_a_folder_of_known_parts_names_the_family_that_has_them(family, tmp_path):
    hf_checkpoints.make(tmp_path, family)
    hf_checkpoints.edit_config(tmp_path, model_type="other", architectures=["OtherForCausalLM"])
    known = f"'other', which is unknown; its config and tensors .* be read as '{family}'"
    with pytest.raises(CheckpointFormatError, match=known) as caught:
        checkpoint.read_architecture(tmp_path)
    name = str(caught.value).split("architectures ['")[1].split("'")[0]
    hf_checkpoints.edit_config(tmp_path, model_type=family, architectures=[name])
    assert checkpoint.read_architecture(tmp_path).family == family


def test_a_key_that_no_reader_knows_is_named(tmp_path):
    hf_checkpoints.make(tmp_path, "qwen3")
    hf_checkpoints.edit_config(tmp_path, model_type="other", residual_multiplier=0.5, fancy=False)
    with pytest.raises(CheckpointFormatError, match="no reader of qwen3 knows residual_multiplier"):
        checkpoint.read_architecture(tmp_path)


def test_tensors_that_no_family_has_are_no_known_parts(tmp_path):
    hf_checkpoints.make(tmp_path, "llama")
    hf_checkpoints.edit_config(tmp_path, model_type="other", head_dim=4)
    with pytest.raises(CheckpointFormatError, match="no known family has its config and tensors"):
        checkpoint.read_architecture(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # a folder without weights: keys alone
    with pytest.raises(CheckpointFormatError, match="its config has only known parts: it could be"):
        checkpoint.read_architecture(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config["model_type"]}))
    with pytest.raises(CheckpointFormatError, match="no known family has its config; known"):
        checkpoint.read_architecture(tmp_path)
