"""Folders with weights of 4 and 8 bits: the numbers they stand for, read whole and in parts."""

import dataclasses
import json

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.architecture import Experts, LatentAttentionSizes, LayerType
from jaxrl_llm.models.hf import checkpoint, quantized_tensors, safetensors_file
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding.mesh import TRAIN, shardings
from jaxrl_llm.storage import model_folder

GPT_OSS = dataclasses.replace(
    tiny.SHAPE,
    family="gpt_oss",
    hidden_size=64,
    layers=(LayerType(window=8, experts=True), LayerType(experts=True)),
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    norm_eps=1e-5,
    tie_embeddings=False,
    mlp_size=32,
    experts=Experts(num=4, per_token=2, size=32, bias=True, act="clamped"),
)
DEEPSEEK = dataclasses.replace(
    tiny.SHAPE,
    family="deepseek_v3",
    hidden_size=48,
    qkv_bias=False,
    num_kv_heads=4,
    head_size=12,
    rope_size=4,
    rope_interleaved=True,
    tie_embeddings=False,
    latent=LatentAttentionSizes(kv_rank=16, plain_size=8, value_size=6, q_rank=20),
    layers=(LayerType(), LayerType(experts=True)),
    experts=Experts(
        num=4, per_token=2, size=24, shared_size=24, scores="sigmoid", selection_bias=True,
        groups=2, top_groups=1, scale=2.5,
    ),
)  # fmt: skip


def written(shape, folder):
    """Returns a network, its folder's tensors by name, and its config."""
    network = Network(shape)
    checkpoint.save(folder, network, tiny.params(network))
    config = json.loads((folder / "config.json").read_text())
    return network, load_file(folder / "model.safetensors"), config


def rewrite(folder, tensors, config, quantization):
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps({**config, "quantization_config": quantization})
    (folder / "config.json").write_text(text)


def four_bits(array):
    """Returns blocks and scales of [E, in, out], and the numbers they stand for."""
    random = np.random.default_rng(0)
    experts, inputs, outputs = array.shape
    codes = random.integers(0, 16, (experts, outputs, inputs // 32, 32)).astype(np.uint8)
    scales = random.integers(118, 124, codes.shape[:3]).astype(np.uint8)
    pairs = codes.reshape(*codes.shape[:3], 16, 2)
    blocks = (pairs[..., 0] | (pairs[..., 1] << 4)).astype(np.uint8)
    # The library's own numbers of 4 bits, not our table.
    numbers = codes.view(jnp.float4_e2m1fn.dtype).astype(np.float32)
    wide = numbers * (2.0 ** (scales.astype(np.float32) - 127))[..., None]
    whole = wide.reshape(experts, outputs, inputs).swapaxes(1, 2)
    return blocks, scales, np.ascontiguousarray(whole)


def four_bit_folder(folder):
    network, tensors, config = written(GPT_OSS, folder)
    wide = dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, wide[name] = four_bits(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    assert len(tensors) == len(wide) + 4
    quantization = {"quant_method": "mxfp4"}
    rewrite(folder, tensors, config, quantization)
    return network, wide, config, tensors, quantization


def eight_bit_folder(folder):
    random = np.random.default_rng(0)
    network, tensors, config = written(DEEPSEEK, folder)
    wide = dict(tensors)
    for name in [n for n in tensors if "_proj" in n]:
        array = tensors[name]
        tensors[name] = numbers = (array * 100).astype(jnp.float8_e4m3fn.dtype)
        rows, columns = (-(-n // 16) for n in array.shape)
        scales = (random.random((rows, columns), np.float32) + 0.5) / 100
        tensors[f"{name}_scale_inv"] = scales
        spread = np.repeat(np.repeat(scales, 16, 0), 16, 1)[: array.shape[0], : array.shape[1]]
        wide[name] = numbers.astype(np.float32) * spread
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    rewrite(folder, tensors, config, quantization)
    return network, wide, config, tensors, quantization


@pytest.mark.parametrize("make", [four_bit_folder, eight_bit_folder])
def test_a_folder_is_read_as_the_numbers_it_stands_for(make, tmp_path):
    network, wide, config, *_ = make(tmp_path)
    found = checkpoint.load(tmp_path, network)
    mesh = tiny.make_mesh(fsdp=2, tensor=2, expert=2)
    split = shardings(
        network.abstract_params(), network.logical_axes(), mesh, TRAIN, network.sharding_units
    )
    in_parts = checkpoint.load(tmp_path, network, split)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(wide, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config))
    wanted = checkpoint.load(plain, network)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    jax.tree.map(np.testing.assert_array_equal, in_parts, wanted)
    # The same from a bucket, by ranges.
    files = fsspec.filesystem("memory")
    files.put(f"{tmp_path}/", f"/quantized/{make.__name__}/", recursive=True)
    from_bucket = checkpoint.load(f"memory://quantized/{make.__name__}", network, split)
    jax.tree.map(np.testing.assert_array_equal, from_bucket, wanted)
    files.rm(f"/quantized/{make.__name__}", recursive=True)
    model_folder.forget_folders()
    # Written again, it is a folder of wide numbers.
    again = tmp_path / "again"
    checkpoint.save(again, network, found)
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    back = load_file(again / "model.safetensors")
    for name, array in wide.items():
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize("make", [four_bit_folder, eight_bit_folder])
def test_numbers_without_fitting_scales_are_refused(make, tmp_path):
    network, _, config, tensors, quantization = make(tmp_path)
    name = next(n for n in tensors if n.endswith(("_scales", "_scale_inv")))
    for broken in (tensors[name][:-1], tensors[name].astype(np.float16)):
        rewrite(tmp_path, {**tensors, name: np.ascontiguousarray(broken)}, config, quantization)
        with pytest.raises(CheckpointFormatError, match=r"scales of model\.layers.*expected"):
            checkpoint.check(tmp_path, network)
    rewrite(tmp_path, {k: v for k, v in tensors.items() if k != name}, config, quantization)
    with pytest.raises(CheckpointFormatError, match=r"missing, expected|stored as F8_E4M3"):
        checkpoint.check(tmp_path, network)


@pytest.mark.parity
def test_four_bits_are_what_transformers_reads(tmp_path):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    four_bit_folder(tmp_path)
    stored = safetensors_file.open_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = quantized_tensors.dequantized_tensors(config, stored, "here")
    count = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, quantized_tensors.Mxfp4Tensor):
            parts = (torch.from_numpy(np.array(p.view())) for p in (tensor.stored, tensor.scales))
            theirs = convert_moe_packed_tensors(*parts, dtype=torch.float32)
            everything = tuple(slice(0, n) for n in tensor.shape)
            np.testing.assert_array_equal(tensor[everything], theirs.numpy(), err_msg=name)
            count += 1
    assert count == 4
