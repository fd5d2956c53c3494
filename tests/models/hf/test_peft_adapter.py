"""Adapter folders, tensor by tensor; test_lora has what adapters compute."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models.finite import NotFiniteError
from jaxrl_llm.models.hf import peft_adapter
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q", "down"))
NETWORK = dataclasses.replace(tiny.NETWORK, lora=LORA)
CRITIC = dataclasses.replace(NETWORK, head="scalar")
ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def adapters(network=NETWORK):
    """Adapters, and the head of a critic, whose numbers are all different."""
    abstract = network.abstract_adapters()
    if network.head == "scalar":
        abstract = abstract | {"score": network.abstract_params()["score"]}
    leaves, structure = jax.tree.flatten(abstract)
    arrays = [
        (np.arange(leaf.size).reshape(leaf.shape) / 8 + 1000 * i).astype(leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return structure.unflatten(arrays)


def tensors(folder):
    return safetensors.numpy.load_file(folder / "adapter_model.safetensors")


def settings(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def change_settings(folder, **changes):
    (folder / "adapter_config.json").write_text(json.dumps({**settings(folder), **changes}))


def shardings(tree):
    return jax.tree.map(lambda _: ONE, tree)


def test_factors_are_stored_by_layer_and_transposed(tmp_path):
    trained = adapters()
    peft_adapter.save(tmp_path, NETWORK, trained)
    layers, written = trained["layers"]["0"], tensors(tmp_path)
    assert len(written) == 2 * 2 * 2  # layers, modules, factors
    prefix = "base_model.model.model.layers"
    for layer in range(2):
        query, down = layers["attention"]["q"], layers["mlp"]["down"]
        for name, factors in [("self_attn.q_proj", query), ("mlp.down_proj", down)]:
            lora_a = written[f"{prefix}.{layer}.{name}.lora_A.weight"]
            lora_b = written[f"{prefix}.{layer}.{name}.lora_B.weight"]
            # Inputs come first here and last in torch: A is [r, in], B is [out, r].
            np.testing.assert_array_equal(lora_a, factors["lora_a"][layer].T)
            np.testing.assert_array_equal(lora_b, factors["lora_b"][layer].T)


def test_the_settings_are_those_of_the_network(tmp_path):
    peft_adapter.save(tmp_path, NETWORK, adapters(), "models/base")
    assert settings(tmp_path) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "modules_to_save": None,
        "base_model_name_or_path": "models/base",
        "r": 3,
        "lora_alpha": 6.0,
        "target_modules": ["down_proj", "q_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


@pytest.mark.parametrize("network", [NETWORK, CRITIC], ids=["policy", "critic"])
def test_adapters_are_loaded_bit_for_bit(tmp_path, network):
    trained = adapters(network)
    peft_adapter.save(tmp_path, network, trained)
    peft_adapter.check(tmp_path, network)
    loaded = peft_adapter.load(tmp_path, network, shardings(trained))
    jax.tree.map(np.testing.assert_array_equal, loaded, trained)


def test_adapters_are_loaded_into_their_layout(tmp_path):
    trained, mesh = adapters(), tiny.make_mesh(fsdp=2)
    peft_adapter.save(tmp_path, NETWORK, trained)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None))
    loaded = peft_adapter.load(tmp_path, NETWORK, jax.tree.map(lambda _: rows, trained))
    assert {array.sharding for array in jax.tree.leaves(loaded)} == {rows}


def test_adapters_on_pipeline_stages_are_stored_in_the_order_of_layers(tmp_path):
    """Stages of several rounds stack layers as 0, 2, 1, 3; a folder knows no stages."""
    shape = dataclasses.replace(tiny.SHAPE, num_layers=4)
    flat = dataclasses.replace(NETWORK, shape=shape)
    staged = dataclasses.replace(NETWORK, shape=shape.with_stages(2, 2))
    assert list(staged.shape.layer_stacks["0"].layer_indices) == [0, 2, 1, 3]
    trained = adapters(flat)
    restacked = jax.tree.map(lambda a: a[np.array([0, 2, 1, 3])], trained)
    peft_adapter.save(tmp_path / "flat", flat, trained)
    peft_adapter.save(tmp_path / "staged", staged, restacked)
    expected = tensors(tmp_path / "flat")
    written = tensors(tmp_path / "staged")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor)
    loaded = peft_adapter.load(tmp_path / "flat", staged, shardings(restacked))
    jax.tree.map(np.testing.assert_array_equal, loaded, restacked)


def test_the_head_of_a_critic_is_stored_in_full(tmp_path):
    trained = adapters(CRITIC)
    peft_adapter.save(tmp_path, CRITIC, trained)
    assert settings(tmp_path)["task_type"] == "SEQ_CLS"
    assert settings(tmp_path)["modules_to_save"] == ["score"]
    np.testing.assert_array_equal(
        tensors(tmp_path)["base_model.model.score.weight"], trained["score"]
    )
    with pytest.raises(CheckpointFormatError, match=r"modules_to_save is .'score'.; only plain"):
        peft_adapter.check(tmp_path, NETWORK)  # a policy has no such head


def test_a_critic_takes_adapters_without_a_head(tmp_path):
    trained = adapters()
    peft_adapter.save(tmp_path, NETWORK, trained)
    loaded = peft_adapter.load(tmp_path, CRITIC, shardings(adapters(CRITIC)))
    jax.tree.map(np.testing.assert_array_equal, loaded, trained)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_numbers_are_refused(tmp_path, value):
    trained = adapters()
    trained["layers"]["0"]["mlp"]["down"]["lora_b"][1, 2, 0] = value
    peft_adapter.save(tmp_path, NETWORK, trained)
    peft_adapter.check(tmp_path, NETWORK)  # reads no weights
    with pytest.raises(NotFiniteError, match="take another copy"):
        peft_adapter.load(tmp_path, NETWORK, shardings(trained))


@pytest.mark.parametrize("rank, alpha, remedy", [(4, 6.0, "lora.rank"), (3, 12.0, "lora.alpha")])
def test_adapters_of_another_scale_are_refused(tmp_path, rank, alpha, remedy):
    """alpha / r scales the product: with another one the adapters would be other weights."""
    peft_adapter.save(tmp_path, NETWORK, adapters())
    lora = dataclasses.replace(LORA, rank=rank, alpha=alpha)
    with pytest.raises(CheckpointFormatError, match=f"set {remedy} to it"):
        peft_adapter.check(tmp_path, dataclasses.replace(NETWORK, lora=lora))


def test_missing_and_unknown_modules_are_refused(tmp_path):
    peft_adapter.save(tmp_path, NETWORK, adapters())
    more, fewer = (
        dataclasses.replace(NETWORK, lora=dataclasses.replace(LORA, targets=targets))
        for targets in (("q", "down", "up"), ("q",))
    )
    with pytest.raises(CheckpointFormatError, match=r"up_proj.lora_A.weight is missing, expected"):
        peft_adapter.check(tmp_path, more)
    with pytest.raises(CheckpointFormatError, match=r"down_proj.*not of this network \(4 such"):
        peft_adapter.check(tmp_path, fewer)


@pytest.mark.parametrize(
    "key, value",
    [("use_rslora", True), ("use_dora", True), ("bias", "all"), ("fan_in_fan_out", True),
     ("rank_pattern", {"q_proj": 8}), ("layers_to_transform", [0]), ("init_lora_weights", "olora")],
)  # fmt: skip
def test_variants_with_other_arithmetic_are_refused(tmp_path, key, value):
    peft_adapter.save(tmp_path, NETWORK, adapters())
    change_settings(tmp_path, **{key: value})
    with pytest.raises(CheckpointFormatError, match=f"{key} is .*; only plain adapters"):
        peft_adapter.check(tmp_path, NETWORK)


def test_settings_without_effect_are_accepted(tmp_path):
    peft_adapter.save(tmp_path, NETWORK, adapters())
    change_settings(
        tmp_path, lora_dropout=0.1, use_dora=False, rank_pattern={}, init_lora_weights=True
    )
    peft_adapter.check(tmp_path, NETWORK)
