"""Model folders and data files that cannot be used are named before anything is written."""

import dataclasses
import json

import pytest
import runs
import tiny
from safetensors.numpy import load_file, save_file

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.models.finite import NotFiniteError
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.safetensors_file import open_folder
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.trainer import rl


@pytest.fixture
def folder(tmp_path):
    """A random model with the tokenizer of characters."""
    path = tmp_path / "model"
    network = Network(dataclasses.replace(tiny.SHAPE, vocab_size=104, mlp_size=64))
    checkpoint.save(path, network, tiny.params(network), character_tokenizer())
    return path


def refused(tmp_path, settings, error, name="grpo_tiny") -> str:
    with pytest.raises(error) as raised:
        rl.train(runs.config(name, settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    return str(raised.value)


# Models.


@pytest.mark.parametrize("role", ["model", "critic", "reference"])
def test_a_missing_model_folder(tmp_path, role):
    path = tmp_path / "none"
    said = refused(
        tmp_path, {f"{role}.path": str(path)}, (CheckpointFormatError, DataError), "ppo_tiny"
    )
    assert str(path) in said and "no such folder" in said


def test_a_missing_folder_of_a_reward_model(tmp_path):
    settings = {"rewards.models": {"judge": {"path": str(tmp_path / "none")}}}
    assert "none: no such folder" in refused(tmp_path, settings, CheckpointFormatError)


def test_weights_that_are_no_numbers(tmp_path, folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(tensors, file)
    with pytest.raises(NotFiniteError, match="NaN or infinite numbers") as raised:
        rl.train(runs.config("grpo_tiny", {"model.path": str(folder)}), tmp_path / "run")
    said = str(raised.value)
    assert said.startswith(str(folder)) and "layers.0.mlp.up" in said and "is damaged" in said


def test_safetensors_that_are_cut_short(tmp_path, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = refused(tmp_path, {"model.path": str(folder)}, CheckpointFormatError)
    assert str(file) in said and "copy it again" in said


def test_a_tensor_that_is_missing(tmp_path, folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert name in open_folder(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = refused(tmp_path, {"model.path": str(folder)}, CheckpointFormatError)
    assert f"{name} is missing, expected [64, 32]" in said


def test_a_vocabulary_smaller_than_the_tokenizer(tmp_path, folder):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings = {"model.path": str(folder), "model.tokenizer": str(tmp_path / "tokenizer")}
    said = refused(tmp_path, settings, CheckpointFormatError)
    assert "the tokenizer has 106 tokens, the model's vocabulary only 104" in said


def test_a_folder_without_tokenizer(tmp_path, folder):
    for file in folder.glob("*token*"):
        file.unlink()
    said = refused(tmp_path, {"model.path": str(folder)}, DataError)
    assert f"tokenizer {str(folder)!r}: no tokenizer file" in said


@pytest.mark.parametrize("model", ["", "folder"])
def test_a_chat_template_that_is_a_folder(tmp_path, folder, model):
    path = str(folder) if model else ""
    settings = {"model.path": path, "model.chat_template": str(tmp_path)}
    assert "cannot be read" in refused(tmp_path, settings, DataError)


# Data.

GOOD = {"data_source": "sums", "prompt": "1+2=", "reward_model": {"ground_truth": "3"}}


def from_rows(tmp_path, *rows) -> dict:
    """Returns the settings that train on these rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = (str(file),)
    return {
        "data.task": "files",
        "data.train_files": files,
        "data.eval_files": files,
        "warm_start.num_steps": 0,
    }


def test_a_row_without_a_prompt(tmp_path):
    settings = from_rows(tmp_path, GOOD, {"data_source": "sums"})
    said = refused(tmp_path, settings, DataError)
    assert "rows.jsonl, row 2: prompt is missing; it must be a list of {role, content}" in said


def test_a_file_without_rows(tmp_path):
    assert "no rows in this file" in refused(tmp_path, from_rows(tmp_path), DataError)


def test_missing_file_is_named(tmp_path):
    settings = from_rows(tmp_path, GOOD) | {"data.eval_files": ()}
    said = refused(tmp_path, settings, DataError)
    assert "config.data.eval_files" in said and "or set evaluation.before=False" in said


def test_no_prompt_that_is_short_enough(tmp_path):
    settings = from_rows(tmp_path, GOOD, GOOD | {"prompt": "1+2+3="}) | {
        "data.max_prompt_tokens": 3
    }
    said = refused(tmp_path, settings, DataError)
    assert (
        "config.data.max_prompt_tokens: all 2 prompts of the train split are longer than 3 tokens,"
        " the shortest has 4; raise it" in said
    )


def test_a_prompt_longer_than_allowed(tmp_path):
    rows = GOOD, GOOD | {"prompt": "1+" * 10}
    settings = from_rows(tmp_path, *rows) | {"data.long_rows": "error"}
    said = refused(tmp_path, settings, DataError)
    assert (
        "rows.jsonl, row 2: the prompt has 20 tokens, more than data.max_prompt_tokens=16" in said
    )


def test_a_data_source_without_a_reward(tmp_path):
    terms = {"answer": {"function": "arithmetic", "data_source": "products"}}
    settings = from_rows(tmp_path, GOOD, GOOD) | {"rewards.functions": terms}
    said = refused(tmp_path, settings, RewardError)
    assert "no reward applies to data source 'sums'" in said


@pytest.mark.parametrize("value", ["258", [[258]], 9999, True])
def test_end_tokens_that_are_none(tmp_path, folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    said = refused(tmp_path, {"model.path": str(folder)}, CheckpointFormatError)
    assert str(folder / "generation_config.json") in said and "eos_token_id" in said
    assert ("9999 is not in the vocabulary, tokens 0 to 103" in said) == (value == 9999)
    assert "token id" in said or value == 9999
