"""Folders that contradict themselves are refused by name, or load as their contents say.

The folders are made by `contradictory.py`. Those without a contradiction load as before.
"""

import itertools
import json

import contradictory
import hf_checkpoints
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.data.tokenizer_folder import PROBES
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.hf import checkpoint, config_reader
from jaxrl_llm.models.transformer import Network

NUM_FOLDERS = 500
# Seldom seen by chance: class names and model types have 64 combinations.
_OFTEN = {contradictory.class_and_model_type: 4}
CASES = [
    case
    for case in (*contradictory.TOKENIZERS, *contradictory.MODELS)
    for _ in range(_OFTEN.get(case, 1))
]


def assert_as_in_file(folder):
    """The tokenizer of a folder gives the ids of its tokenizer.json."""
    tokenizer = load_tokenizer(str(folder))
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.no_truncation()
    for text in (*PROBES, *CONTENTS):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected, text


CONTENTS = (
    "the quick  brown\tfox\r\n\r\n  12 345,678.90",
    "x</s> <|im_end|>y<s> z <unk>.",
    "HELLO World \u00c9\u00e8 E\u0301 \ufb03 \u2167",
    "if a<=b: c=[1, 2]\n\t\treturn  # d",
)


def open_model(folder):
    """What a run reads of a model folder."""
    config_reader.eos_token_ids(folder)
    network = Network(checkpoint.read_architecture(folder))
    checkpoint.check(folder, network)
    return checkpoint.load(folder, network)


def fault(case, seed, folder):
    """What is wrong with the reading of a folder; "" if it is refused by name, or right."""
    word = contradictory.make(case, seed, folder)
    try:
        if case in contradictory.TOKENIZERS:
            assert_as_in_file(folder)
        else:
            open_model(folder)
            return f"{case.__name__}, seed {seed}: loads, although {word} differs"
    except UserError as error:
        if word not in str(error) or str(folder) not in str(error):
            return f"{case.__name__}, seed {seed}: does not name {word}: {error}"
    return ""


@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=lambda case: case.__name__)
def test_every_single_contradiction_is_named(case, tmp_path):
    assert not fault(case, 0, tmp_path / "folder")


@pytest.mark.slow
def test_five_hundred_contradictions(tmp_path):
    cases = itertools.islice(itertools.cycle(CASES), NUM_FOLDERS)
    faults = [fault(case, seed, tmp_path / "folder") for seed, case in enumerate(cases, 1)]
    assert len(faults) == NUM_FOLDERS and not list(filter(None, faults))


def test_settings_that_replace_the_splits_are_not_followed(tmp_path):
    """Distilled models: a Qwen 2 config beside a generic class, over a tokenizer of their own."""
    random = np.random.default_rng(0)
    for number, (name, kind) in enumerate(
        [("qwen2", "PreTrainedTokenizerFast"), ("llama", "LlamaTokenizerFast")]
    ):
        folder = tmp_path / str(number)
        contradictory.make_tokenizer(folder, random, "digits")
        change = {"tokenizer_class": kind}
        contradictory.edit(
            folder / "tokenizer_config.json", lambda c, change=change: c.update(change)
        )
        contradictory.write_json(folder / "config.json", {"model_type": name})
        assert_as_in_file(folder)  # not refused


@pytest.mark.parametrize("kind", contradictory.KINDS)
def test_valid_tokenizers_load(kind, tmp_path):
    folder = tmp_path / "folder"
    contradictory.make_tokenizer(folder, np.random.default_rng(0), kind)
    assert_as_in_file(folder)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.convert_tokens_to_ids(["<s>", "</s>"]) == [1, 2]
    assert tokenizer.eos_token_id == 2 and tokenizer.bos_token_id == 1


def test_a_declared_addition_is_no_contradiction(tmp_path):
    """A token for padding that only the settings have, with the next free id."""
    folder = tmp_path / "folder"
    contradictory.make_tokenizer(folder, np.random.default_rng(0), "bytes")
    free = max(contradictory.ids_of(folder).values()) + 1
    entry = {"content": "[PAD]", "special": True}
    more = {"pad_token": "[PAD]", "added_tokens_decoder": {str(free): entry}}
    contradictory.edit(folder / "tokenizer_config.json", lambda c: c.update(more))
    assert load_tokenizer(str(folder)).pad_token_id == free
    assert_as_in_file(folder)


@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"max_shard_bytes": 20_000}], ids=["whole", "shards"])
def test_valid_models_load(family, changes, tmp_path):
    hf_checkpoints.make(tmp_path, family, **changes)
    open_model(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": None},
        {"rope_scaling": None, "rope_parameters": None, "rope_theta": 5e5},
        {
            "rope_theta": 1e4,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        {
            "rope_theta": 1e4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {"rope_type": "default"},
        },
        {"torch_dtype": "bfloat16"},
        {"eos_token_id": [1, 2]},
        {"quantization_config": {"quant_method": "fp8"}},  # of weights that are plain by now
    ],
)
def test_places_that_agree_are_no_contradiction(changes, tmp_path):
    hf_checkpoints.make(tmp_path, "llama")
    hf_checkpoints.edit_config(tmp_path, **changes)
    open_model(tmp_path)


def test_a_stored_projection_that_is_the_tied_one(tmp_path):
    hf_checkpoints.make(tmp_path, "qwen2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, file)
    hf_checkpoints.edit_config(tmp_path, tie_word_embeddings=True)
    assert "head" not in open_model(tmp_path)


def test_equal_copies_of_a_tensor_in_two_shards(tmp_path):
    hf_checkpoints.make(tmp_path, "qwen3", max_shard_bytes=20_000)
    first, *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: tensor}, last)
    open_model(tmp_path)


def test_errors_at_the_first_row_come_at_load(tmp_path):
    folder = tmp_path / "folder"
    contradictory.make(contradictory.no_token_for_unknown_text, 0, folder)
    with pytest.raises(DataError, match=r"cannot encode '.*add the token for unknown text"):
        load_tokenizer(str(folder))


def test_a_large_vocabulary_is_compared_quickly(tmp_path):
    """The comparison reads the file twice, and every token once."""
    folder = tmp_path / "folder"
    contradictory.make_tokenizer(folder, np.random.default_rng(0), "bytes")

    def grow(file):
        first = len(file["model"]["vocab"])
        file["model"]["vocab"] |= {f"word{n}": first + n for n in range(50_000)}

    contradictory.edit(folder / "tokenizer.json", grow)
    assert_as_in_file(folder)
    assert len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) > 50_000
