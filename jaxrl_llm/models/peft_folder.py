"""Adapters as a folder of `peft`: adapter_config.json and adapter_model.safetensors."""

import functools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from flax import traverse_util

from jaxrl_llm.models import families, finite, huggingface, safetensors_file, written_folder
from jaxrl_llm.models.families import CheckpointFormatError
from jaxrl_llm.models.safetensors_file import TensorToWrite
from jaxrl_llm.models.tensor_names import TensorName, tensor_names
from jaxrl_llm.models.transformer import Network, Params

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SCORE = TensorName(("score",), "base_model.model.score.weight")  # of a scalar network, whole
_FACTORS = {"lora_a": "lora_A", "lora_b": "lora_B"}
# Keys of adapter_config.json that say nothing about the arithmetic of loaded adapters, or that are
# compared with the network. Any other must hold a value that changes nothing.
_KNOWN = frozenset(
    [
        *("peft_type", "r", "lora_alpha", "task_type", "auto_mapping", "peft_version", "revision"),
        *("base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core"),
        *("qalora_group_size", "eva_config"),  # read with use_qalora, and before training
        # Which modules have adapters, which the names of the tensors say.
        *("target_modules", "exclude_modules"),
    ]
)
_NEUTRAL: tuple[Any, ...] = (None, False, "none", {}, [])
# How adapters begin; the others change the weights that adapters are added to.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


def save(
    folder: str | pathlib.Path, network: Network, adapters: Params, base_model: str = ""
) -> None:
    """Writes the adapters of a network, as `written_folder.write`.

    `base_model` is the folder of the frozen weights that the file names; "" names none. The head of
    a scalar network is among the adapters, whole.

    Raises:
      CheckpointFormatError: If the folder holds something other than an earlier export, or experts
        have adapters, which peft keeps in another form.
    """
    folder = pathlib.Path(folder)
    written_folder.check_replaceable(folder)
    leaves = traverse_util.flatten_dict(adapters)
    score = leaves.pop(_SCORE.path, None)
    if experts := [path for path in leaves if leaves[path].ndim > 3]:
        modules = sorted({path[-2] for path in experts})
        raise CheckpointFormatError(
            f"{folder}: the adapters of experts ({', '.join(modules)}) have no form that peft"
            " loads; write merged weights instead: leave --adapters out"
        )
    names = _names(network, leaves)

    def tensors() -> Iterator[TensorToWrite]:
        if score is not None:
            read = functools.partial(written_folder.fetch, score, _SCORE, 0, score.dtype)
            yield TensorToWrite(_SCORE.name, np.dtype(score.dtype), score.shape, read)
        for layer in range(network.shape.num_layers):
            for name in (name for name in names if layer in name.numbers):
                leaf = leaves[name.path]
                shape = leaf.shape[:0:-1]
                read = functools.partial(written_folder.fetch, leaf, name, layer, leaf.dtype)
                yield TensorToWrite(name.name.format(layer), np.dtype(leaf.dtype), shape, read)

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if score is None else "SEQ_CLS",
        "modules_to_save": None if score is None else ["score"],
        "base_model_name_or_path": base_model or None,
        "r": network.lora.rank,
        "lora_alpha": network.lora.alpha,
        "target_modules": sorted({name.name.split(".")[-3] for name in names}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    written_folder.write(folder, {_WEIGHTS: list(tensors())}, {_CONFIG: config})


def _names(network: Network, paths: Iterable[tuple[str, ...]]) -> list[TensorName]:
    """Returns the adapters at some paths of the tree with their names in a file."""
    modules = {name.path[:-1]: name for name in tensor_names(network.shape)}
    names = []
    for path in paths:
        ours = modules[path[:-1]]
        module = ours.name.removesuffix(".weight").removesuffix(".bias")
        theirs = f"base_model.model.{module}.{_FACTORS[path[-1]]}.weight"
        names.append(TensorName(path, theirs, True, ours.numbers))
    return names


def check(folder: str | pathlib.Path, network: Network) -> None:
    """Raises CheckpointFormatError as `load` does, but reads no weights."""
    _checked(pathlib.Path(folder), network)


def load(folder: str | pathlib.Path, network: Network, shardings: Any) -> Params:
    """Returns the adapters in a folder, those that `save` wrote bit for bit.

    With them the head of a scalar network, if the folder has one.

    Raises:
      CheckpointFormatError: If the folder is damaged, or its adapters are not those of
        `network.lora`, or of a kind that would be computed in another way.
      NotFiniteError: If a number is NaN or infinite.
    """
    names, stored = _checked(pathlib.Path(folder), network)
    leaves, split = _leaves(network), traverse_util.flatten_dict(shardings)
    arrays = {}
    for name in names:
        tensors = [stored[file] for file in name.file_names]
        leaf = leaves[name.path]
        arrays[name.path] = huggingface.read_parameter(
            name, tensors, np.dtype(leaf.dtype), leaf.shape, split[name.path]
        )
    adapters = traverse_util.unflatten_dict(arrays)
    finite.check(adapters, str(folder), "the folder is damaged, take another copy of it")
    return adapters


def _leaves(network: Network) -> dict[tuple[str, ...], Any]:
    """Returns shapes and dtypes of all that a folder may hold, by path."""
    leaves = traverse_util.flatten_dict(network.abstract_adapters())
    if network.head == "scalar":
        leaves[_SCORE.path] = network.abstract()["score"]
    return leaves


def _checked(folder: pathlib.Path, network: Network):
    """Returns the adapters of a network, and the tensors stored in the folder."""
    config = families.read_json(folder / _CONFIG)
    wanted = {"peft_type": "LORA", "r": network.lora.rank, "lora_alpha": network.lora.alpha}
    for key, value in wanted.items():
        if config.get(key) != value:
            settings = {"r": "; set lora.rank to it", "lora_alpha": "; set lora.alpha to it"}
            what = f"{key} is {config.get(key)!r}, expected {value!r}{settings.get(key, '')}"
            raise CheckpointFormatError(f"{folder / _CONFIG}: {what}")
    has_score = network.head == "scalar" and config.get("modules_to_save") == ["score"]
    for key, value in config.items():
        if key in _KNOWN or value in _NEUTRAL or (has_score and key == "modules_to_save"):
            continue
        if key == "init_lora_weights" and value in _BEGINNINGS:
            continue
        what = f"{key} is {value!r:.100}; only plain adapters are implemented"
        remedy = "convert them with peft, or leave the key out if it changes nothing"
        raise CheckpointFormatError(f"{folder / _CONFIG}: {what}; {remedy}")
    stored = safetensors_file.read_header(folder / _WEIGHTS)[0]
    leaves = _leaves(network)
    names = _names(network, (path for path in leaves if path != _SCORE.path))
    expected = {file: leaves[name.path].shape[:0:-1] for name in names for file in name.file_names}
    if has_score:
        names.append(_SCORE)
        expected[_SCORE.name] = leaves[_SCORE.path].shape
    differing = sorted(
        name
        for name in expected.keys() | stored.keys()
        if name not in stored
        or stored[name].shape != expected.get(name)
        or not stored[name].readable
    )
    if differing:
        name = differing[0]
        there = f"{stored[name].code}{list(stored[name].shape)}" if name in stored else "missing"
        ours = f"expected {list(expected[name])}" if name in expected else "not of this network"
        raise CheckpointFormatError(
            f"{folder / _WEIGHTS}: {name} is {there}, {ours} ({len(differing)} such tensors);"
            f" target_modules is {config.get('target_modules')}, lora.targets"
            f" {list(network.lora.targets)}"
        )
    return names, stored
