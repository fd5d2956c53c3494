"""Saves and loads LoRA adapters in `peft` format: adapter_config.json and safetensors."""

import functools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.config.learner import PROJECTIONS
from jaxrl_llm.models import finite
from jaxrl_llm.models.hf import (
    config_reader,
    folder_writer,
    parameter_reader,
    safetensors_file,
    vision_config,
)
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.safetensors_file import StoredTensor, TensorToWrite
from jaxrl_llm.models.hf.tensor_names import TensorName, tensor_names
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.storage import model_folder
from jaxrl_llm.storage.address import HubAddress, parse_address
from jaxrl_llm.storage.model_folder import PathLike

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model.model."
# the full head of a scalar network
_SCORE_NAME = TensorName(("score",), "base_model.model.score.weight")
_FACTORS = {"lora_a": "lora_A", "lora_b": "lora_B"}
# Keys of adapter_config.json that do not affect the arithmetic of loaded adapters, or that are
# checked against the network. All others must hold a neutral value.
_IGNORED_KEYS = frozenset(
    [
        *("peft_type", "r", "lora_alpha", "task_type", "auto_mapping", "peft_version", "revision"),
        *("base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core"),
        *("qalora_group_size", "eva_config"),  # used only with use_qalora, and before training
        # The tensor names already tell which modules have adapters.
        *("target_modules", "exclude_modules"),
    ]
)
_NEUTRAL_VALUES: tuple[Any, ...] = (None, False, "none", {}, [])
# Initializations; all others change the base weights that adapters are added to.
_SUPPORTED_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


def save(
    folder: str | pathlib.Path, network: Network, adapters: Params, base_model: str = ""
) -> None:
    """Writes the adapters of a network with `folder_writer.write_model_folder`.

    `base_model` is the address of the frozen weights to name in the file, a repository of the hub
    with its commit; "" names none. The head of a scalar network is saved in full.

    Raises:
      CheckpointFormatError: If the folder holds something other than an earlier export, or experts
        have adapters, which peft stores in another format.
    """
    folder = pathlib.Path(folder)
    folder_writer.check_replaceable(folder)
    leaves = traverse_util.flatten_dict(adapters)
    score = leaves.pop(_SCORE_NAME.path, None)
    if expert_paths := [path for path in leaves if leaves[path].ndim > 3]:
        modules = sorted({path[-2] for path in expert_paths})
        raise CheckpointFormatError(
            f"{folder}: the adapters of experts ({', '.join(modules)}) have no form that peft"
            " loads; write merged weights instead: leave --adapters out"
        )
    names = _adapter_names(network, leaves)

    def tensors() -> Iterator[TensorToWrite]:
        if score is not None:
            read = functools.partial(
                folder_writer.gather_tensor, score, _SCORE_NAME, 0, score.dtype
            )
            yield TensorToWrite(_SCORE_NAME.name, np.dtype(score.dtype), score.shape, read)
        for layer in range(network.shape.num_layers):
            for name in (name for name in names if layer in name.layers):
                leaf = leaves[name.path]
                shape = leaf.shape[:0:-1]
                read = functools.partial(folder_writer.gather_tensor, leaf, name, layer, leaf.dtype)
                file_name = name.name.format(layer).removeprefix(_BASE)
                file_name = _BASE + vision_config.file_tensor_name(network.shape.family, file_name)
                yield TensorToWrite(file_name, np.dtype(leaf.dtype), shape, read)

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if score is None else "SEQ_CLS",
        "modules_to_save": None if score is None else ["score"],
        **_base_model_settings(base_model),
        "r": network.lora.rank,
        "lora_alpha": network.lora.alpha,
        "target_modules": sorted({name.name.split(".")[-3] for name in names}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder_writer.write_model_folder(
        folder, {_WEIGHTS_FILE: list(tensors())}, {_CONFIG_FILE: config}
    )


def _base_model_settings(base_model: str) -> dict[str, str | None]:
    """The entries that tell peft where the frozen weights are."""
    if not base_model:
        return {"base_model_name_or_path": None}
    address = parse_address(base_model, "model")
    if not isinstance(address, HubAddress) or address.path:
        return {"base_model_name_or_path": base_model}
    commit = {"revision": address.commit} if address.commit else {}
    return {"base_model_name_or_path": address.repo, **commit}


def _adapter_names(network: Network, paths: Iterable[tuple[str, ...]]) -> list[TensorName]:
    """The adapters at some paths of the parameter tree with their names in a file.

    Raises CheckpointFormatError if several projections with adapters share one tensor.
    """
    modules = {name.path[:-1]: name for name in tensor_names(network.shape)}
    paths, names = list(paths), []
    if fused := {path[-2]: modules[path[:-1]] for path in paths if modules[path[:-1]].parts > 1}:
        tensors = sorted({name.name.split(".")[-2] for name in fused.values()})
        raise CheckpointFormatError(
            f"adapters of {', '.join(sorted(fused))}: {network.shape.family} files have"
            f" {' and '.join(tensors)} in their place, and peft one adapter for each of these;"
            " write merged weights instead (leave --adapters out), or train adapters of other"
            " projections (lora.targets)"
        )
    for path in paths:
        base_name = modules[path[:-1]]
        module = base_name.name.removesuffix(".weight").removesuffix(".bias")
        file_name = f"{_BASE}{module}.{_FACTORS[path[-1]]}.weight"
        names.append(TensorName(path, file_name, True, base_name.layers))
    return names


def read_lora_config(folder: PathLike, network: Network) -> LoraConfig:
    """The rank, alpha and targets of the adapters in a folder, as `load` expects them.

    Raises:
      CheckpointFormatError: If there are none of this network.
    """
    config, stored = _read_header(folder)
    file = f"{folder}/{_CONFIG_FILE}"
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (isinstance(rank, int) and rank > 0):
        raise CheckpointFormatError(f"{file}: r is {rank!r:.100}, not a positive integer")
    if not (isinstance(alpha, int | float) and alpha > 0):
        raise CheckpointFormatError(f"{file}: lora_alpha is {alpha!r:.100}, not a positive number")
    kernels = [name for name in tensor_names(network.shape) if name.path[-1] == "kernel"]
    names = _adapter_names(network, ((*name.path[:-1], "lora_a") for name in kernels))
    targets = {n.path[-2] for n in names if not stored.keys().isdisjoint(n.file_names)}
    if not targets:
        raise CheckpointFormatError(
            f"{folder}/{_WEIGHTS_FILE}: no adapter of this model's projections"
            f" ({', '.join(PROJECTIONS)}); is it of another model?"
        )
    in_order = tuple(name for name in PROJECTIONS if name in targets)
    return LoraConfig(rank=rank, alpha=float(alpha), targets=in_order)


def check(folder: PathLike, network: Network) -> None:
    """Raises CheckpointFormatError where `load` would, without reading weights."""
    _check_folder(folder, network)


def load(folder: PathLike, network: Network, shardings: Any) -> Params:
    """The adapters in a folder, bit for bit as `save` wrote them.

    Includes the head of a scalar network if the folder has one.

    Raises:
      CheckpointFormatError: If the folder is damaged, or its adapters do not match `network.lora`
        or are of a variant with other arithmetic.
      NotFiniteError: If a number is NaN or infinite.
    """
    names, stored = _check_folder(folder, network)
    leaves, shardings_by_path = _abstract_leaves(network), traverse_util.flatten_dict(shardings)
    arrays = {}
    for name in names:
        tensors = [stored[file] for file in name.file_names]
        leaf = leaves[name.path]
        arrays[name.path] = parameter_reader.read_parameter(
            name, tensors, np.dtype(leaf.dtype), leaf.shape, shardings_by_path[name.path]
        )
    adapters = traverse_util.unflatten_dict(arrays)
    finite.check(adapters, str(folder), "the folder is damaged, take another copy of it")
    return adapters


def _abstract_leaves(network: Network) -> dict[tuple[str, ...], Any]:
    """Shapes and dtypes of all parameters that a folder may hold, by path."""
    leaves = traverse_util.flatten_dict(network.abstract_adapters())
    if network.head == "scalar":
        leaves[_SCORE_NAME.path] = network.abstract_params()["score"]
    return leaves


def _read_header(address: PathLike) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The settings of the adapters in a folder, and their stored tensors by name."""
    folder = model_folder.local_folder(address)
    config = config_reader.read_json(folder / _CONFIG_FILE)
    if _WEIGHTS_FILE not in model_folder.file_names(address):
        hint = model_folder.offline_hint(address)
        raise CheckpointFormatError(f"{folder / _WEIGHTS_FILE}: no such file{hint}")
    by_ranges = jax.process_count() > 1
    files = model_folder.weight_files(address, [_WEIGHTS_FILE], by_ranges)
    stored = safetensors_file.read_header(files[_WEIGHTS_FILE])[0]
    # Of models with images peft has adapters of the text model alone, or of the text model in them.
    stored = {name.replace(".language_model.", ".", 1): stored[name] for name in stored}
    return config, stored


def _check_folder(address: PathLike, network: Network):
    """Checks a folder; the names of its adapters and the stored tensors."""
    folder = model_folder.local_folder(address)
    config, stored = _read_header(address)
    expected_settings = {
        "peft_type": "LORA",
        "r": network.lora.rank,
        "lora_alpha": network.lora.alpha,
    }
    for key, value in expected_settings.items():
        if config.get(key) != value:
            remedies = {"r": "; set lora.rank to it", "lora_alpha": "; set lora.alpha to it"}
            problem = f"{key} is {config.get(key)!r}, expected {value!r}{remedies.get(key, '')}"
            raise CheckpointFormatError(f"{folder / _CONFIG_FILE}: {problem}")
    has_score = network.head == "scalar" and config.get("modules_to_save") == ["score"]
    for key, value in config.items():
        if (
            key in _IGNORED_KEYS
            or value in _NEUTRAL_VALUES
            or (has_score and key == "modules_to_save")
        ):
            continue
        if key == "init_lora_weights" and value in _SUPPORTED_INITS:
            continue
        problem = f"{key} is {value!r:.100}; only plain adapters are implemented"
        remedy = "convert them with peft, or leave the key out if it changes nothing"
        raise CheckpointFormatError(f"{folder / _CONFIG_FILE}: {problem}; {remedy}")
    leaves = _abstract_leaves(network)
    names = _adapter_names(network, (path for path in leaves if path != _SCORE_NAME.path))
    expected = {file: leaves[name.path].shape[:0:-1] for name in names for file in name.file_names}
    if has_score:
        names.append(_SCORE_NAME)
        expected[_SCORE_NAME.name] = leaves[_SCORE_NAME.path].shape
    differing = sorted(
        name
        for name in expected.keys() | stored.keys()
        if name not in stored
        or stored[name].shape != expected.get(name)
        or not stored[name].readable
    )
    if differing:
        name = differing[0]
        actual = (
            f"{stored[name].dtype_code}{list(stored[name].shape)}" if name in stored else "missing"
        )
        expectation = (
            f"expected {list(expected[name])}" if name in expected else "not of this network"
        )
        raise CheckpointFormatError(
            f"{folder / _WEIGHTS_FILE}: {name} is {actual}, {expectation} ({len(differing)} such"
            f" tensors); target_modules is {config.get('target_modules')}, lora.targets"
            f" {list(network.lora.targets)}"
        )
    return names, stored
