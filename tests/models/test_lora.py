"""Adapters: beside the kernels, merged into them, and as `peft` reads them."""

import collections
import dataclasses
import json
import re

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
import transformers
from flax import traverse_util

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.config.learner import PROJECTIONS
from jaxrl_llm.models import lora
from jaxrl_llm.models.architecture import Experts, LayerType
from jaxrl_llm.models.hf import checkpoint, peft_adapter
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.transformer import Network

LORA = LoraConfig(rank=3, alpha=6.0)
NETWORK = dataclasses.replace(tiny.NETWORK, lora=LORA)
PEFT_NAME = r"base_model\.model\.model\.layers\.(\d)\.(\w+)\.(\w+)_proj\.(lora_[AB])\.weight"
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 12)).astype(np.int32)


def adapters(network=NETWORK, size=0.3):
    """Adapters that have learned something: neither factor is zero."""
    found = jax.jit(network.init_adapters)(jax.random.key(1))
    random = np.random.default_rng(2)
    return jax.tree.map(lambda a: size * random.standard_normal(a.shape).astype(np.float32), found)


def logits(network, params, tokens=TOKENS):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = tiny.hidden_states(network)(params, tokens, positions, jnp.ones_like(tokens))
    return network.logits(params, hidden)


def test_fresh_adapters_change_nothing():
    base = tiny.params()
    fresh = jax.jit(NETWORK.init_adapters)(jax.random.key(0))
    assert all(a.any() for a in jax.tree.leaves(fresh["layers"]["0"]["mlp"]["up"]["lora_a"]))
    whole = lora.combine_params(base, fresh)
    np.testing.assert_array_equal(logits(NETWORK, whole), logits(tiny.NETWORK, base))
    jax.tree.map(np.testing.assert_array_equal, lora.merge_adapters(whole, LORA.scale), base)


def test_merged_weights_compute_the_same():
    whole = lora.combine_params(tiny.params(), adapters())
    plain = lora.merge_adapters(whole, LORA.scale)
    assert jax.tree.structure(plain) == jax.tree.structure(tiny.params())
    found, wanted = logits(NETWORK, plain), logits(NETWORK, whole)
    assert np.abs(logits(NETWORK, tiny.params()) - wanted).max() > 0.1  # they are felt
    np.testing.assert_allclose(found, wanted, atol=2e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("targets", [("q", "down"), PROJECTIONS], ids=len)
def test_adapters_lie_beside_their_targets(targets):
    network = dataclasses.replace(NETWORK, lora=dataclasses.replace(LORA, targets=targets))
    layers = network.abstract_adapters()["layers"]["0"]
    assert {name for part in layers.values() for name in part} == set(targets)
    down = layers["mlp"]["down"]
    assert (down["lora_a"].shape, down["lora_b"].shape) == ((2, 48, 3), (2, 3, 32))
    axes = network.adapter_axes()["layers"]["0"]["mlp"]["down"]
    assert axes == {"lora_a": ("layers", "mlp", "rank"), "lora_b": ("layers", "rank", "embed")}
    assert tiny.NETWORK.abstract_adapters() == {}


def test_trees_are_taken_apart_and_put_together():
    whole = lora.combine_params(tiny.params(), adapters())
    assert lora.has_adapters(whole) and not lora.has_adapters(tiny.params())
    assert jax.tree.structure(lora.adapter_params(whole)) == jax.tree.structure(adapters())
    assert lora.combine_params({}, whole) == whole


@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
def test_peft_folders_round_trip(family, tmp_path):
    """The same logits as with the adapters that it made, and the same tensors and settings."""
    tensors, config = hf_checkpoints.adapters(family)
    theirs = hf_checkpoints.expected(family)
    hf_checkpoints.make(tmp_path / "base", family)
    targets = tuple(name.removesuffix("_proj") for name in config["target_modules"])
    settings = LoraConfig(rank=config["r"], alpha=float(config["lora_alpha"]), targets=targets)
    network = Network(checkpoint.read_architecture(tmp_path / "base"), lora=settings)
    layers = collections.defaultdict(dict)
    for name in sorted(tensors):  # layer after layer
        _, block, projection, factor = re.fullmatch(PEFT_NAME, name).groups()
        path = (
            "layers",
            "0",
            {"self_attn": "attention"}.get(block, block),
            projection,
            factor.lower(),
        )
        layers[path][name] = tensors[name].T
    learned = traverse_util.unflatten_dict(
        {path: np.stack(list(found.values())) for path, found in layers.items()}
    )
    base = checkpoint.load(tmp_path / "base", network)
    row = theirs["tokens"][-1:, : theirs["lengths"][-1]]
    ours, wanted = (
        logits(network, lora.combine_params(base, learned), row)[0],
        theirs["adapted_logits"],
    )
    assert np.abs(wanted - theirs["logits"][-len(wanted) :]).max() > 0.1
    np.testing.assert_allclose(ours, wanted, atol=3e-5 * np.abs(wanted).max())
    peft_adapter.save(tmp_path / "adapters", network, learned)
    split = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), learned)
    again = peft_adapter.load(tmp_path / "adapters", network, split)
    jax.tree.map(np.testing.assert_array_equal, again, learned)
    written = safetensors.numpy.load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor)
    document = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert sorted(document.pop("target_modules")) == sorted(config.pop("target_modules"))
    assert document.items() <= config.items()


@pytest.mark.parity
@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
def test_peft_loads_what_is_written(family, torch, tmp_path):
    import peft

    hf_checkpoints.make(tmp_path / "base", family)
    targets = ("q", "v", "o", "gate", "down")
    network = Network(
        checkpoint.read_architecture(tmp_path / "base"),
        lora=dataclasses.replace(LORA, targets=targets),
    )
    base, learned = checkpoint.load(tmp_path / "base", network), adapters(network)
    peft_adapter.save(tmp_path / "adapters", network, learned, str(tmp_path / "base"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapters").eval()
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()
        with model.disable_adapter():
            without = model(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()
    ours = logits(network, lora.combine_params(base, learned))
    assert np.abs(theirs - without).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=3e-5 * np.abs(theirs).max())


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointFormatError, match="not written by an earlier export"):
        peft_adapter.save(tmp_path, NETWORK, adapters())
    peft_adapter.save(tmp_path / "out", NETWORK, adapters())
    peft_adapter.save(tmp_path / "out", NETWORK, adapters(size=0.1))  # an earlier export is


def test_adapters_of_another_kind_are_refused(tmp_path):
    peft_adapter.save(tmp_path, NETWORK, adapters())
    peft_adapter.check(tmp_path, NETWORK)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())

    def refused(message, lora=LORA, **changes):
        file.write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointFormatError, match=message):
            peft_adapter.check(tmp_path, dataclasses.replace(NETWORK, lora=lora))

    refused("r is 99, expected .*; set lora.rank to it", r=99)
    refused("lora_alpha is 1, expected .*; set lora.alpha", lora_alpha=1)
    refused("peft_type is 'IA3', expected 'LORA'", peft_type="IA3")
    refused("use_dora is True; only plain adapters", use_dora=True)
    refused("modules_to_save is .'lm_head'.; only plain", modules_to_save=["lm_head"])
    refused("alora_invocation_tokens is .5, 6.; only plain", alora_invocation_tokens=[5, 6])
    refused("some_new_key is 0.3; only plain adapters", some_new_key=0.3)
    refused("init_lora_weights is 'pissa'; only plain", init_lora_weights="pissa")
    neutral = {"alora_invocation_tokens": None, "use_rslora": False, "rank_pattern": {}}
    written = {"init_lora_weights": "gaussian", "megatron_core": "megatron.core", "revision": "x"}
    file.write_text(json.dumps({**config, **neutral, **written, "qalora_group_size": 16}))
    peft_adapter.check(tmp_path, NETWORK)  # what peft writes of every plain adapter
    one = dataclasses.replace(LORA, targets=LORA.targets[:1])
    refused(r"lora_A.weight is F32.*, not of this network \(.* such tensors\)", one)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused("cut short")
    path.unlink()
    refused("no such file")
    file.unlink()
    with pytest.raises(CheckpointFormatError, match=r"adapter_config.json: cannot be read"):
        peft_adapter.check(tmp_path, NETWORK)


def test_a_rank_above_every_dim(tmp_path):
    """As in peft: more than is needed, and no contradiction."""
    lora = dataclasses.replace(LORA, rank=2 * NETWORK.shape.vocab_size)
    network = dataclasses.replace(NETWORK, lora=lora)
    learned = network.init_adapters(jax.random.key(0))
    peft_adapter.save(tmp_path, network, learned)
    split = jax.tree.map(lambda a: a.sharding, learned)
    again = peft_adapter.load(tmp_path, network, split)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(learned), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_adapters_of_experts_are_not_written(tmp_path):
    shape = dataclasses.replace(
        tiny.SHAPE,
        family="qwen3_moe",
        layers=(LayerType(experts=True),) * 2,
        experts=Experts(num=4, per_token=2, size=12),
    )
    network = Network(shape, lora=LORA)
    with pytest.raises(CheckpointFormatError, match=r"experts \(.*gate.*leave --adapters out"):
        peft_adapter.save(tmp_path / "out", network, network.init_adapters(jax.random.key(0)))
    assert not (tmp_path / "out").exists()
