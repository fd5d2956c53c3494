"""Loads and saves Hugging Face model folders, straight into and from sharded arrays.

Reading checks every header before it uses device memory, then reads each shard separately. Writing
streams one tensor at a time. Neither holds a whole model on the host.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxrl_llm import console
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import finite
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf import (
    config_reader,
    config_writer,
    folder_writer,
    parameter_reader,
    quantized_tensors,
    safetensors_file,
    stacked_experts,
    unknown_family,
    vision_config,
    vocabulary,
)
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.contradictions import is_tied, is_weight
from jaxrl_llm.models.hf.families import FAMILIES
from jaxrl_llm.models.hf.quantized_tensors import CheckpointTensor
from jaxrl_llm.models.hf.safetensors_file import TensorToWrite
from jaxrl_llm.models.hf.tensor_names import TensorName, is_ignorable, tensor_names
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.storage import model_folder
from jaxrl_llm.storage.model_folder import PathLike

# (name, layer, expert) -> the tensor in the layout of the file.
TensorReader = Callable[[TensorName, int, int], np.ndarray]
# (path in the parameter tree, a parameter) -> the arrays to keep of it, by path.
StoreArray = Callable[[tuple[str, ...], jax.Array], Mapping[tuple[str, ...], jax.Array]]

_MAX_LISTED = 8
EMPTY_CONFIG: Mapping[str, Any] = types.MappingProxyType({})


def store_plain(path: tuple[str, ...], array: jax.Array) -> dict[tuple[str, ...], jax.Array]:
    """Keeps a parameter as it was read."""
    return {path: array}


def read_architecture(folder: PathLike) -> Architecture:
    """Reads the `Architecture` of a folder's config.json; raises CheckpointFormatError."""
    config = config_reader.read_config(folder)
    path = model_folder.local_folder(folder) / "config.json"
    if config_reader.family_name(config) not in FAMILIES:
        problem = unknown_family.problem(config, _stored_shapes(folder, config))
        raise CheckpointFormatError(f"{path}: {problem}")
    return config_reader.architecture_from_config(config, str(path))


def _stored_shapes(folder: PathLike, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a folder; empty if it has no readable weights."""
    try:
        files = safetensors_file.open_folder(folder)
        stored = quantized_tensors.dequantized_tensors(config, files, str(folder))
    except UserError:
        return {}
    return {name: tensor.shape for name, tensor in stored.items()}


def multimodal_token_ids(folder: PathLike, shape: Architecture) -> tuple[int, ...]:
    """The image, video and audio token ids in config.json, also of a model used for text only."""
    config = config_reader.read_json(model_folder.local_folder(folder) / "config.json")
    return vocabulary.multimodal_token_ids(config, shape.vocab_size)


def check_vocabulary(shape: Architecture, tokenizer: Any) -> None:
    """Raises CheckpointFormatError if the tokenizer has ids beyond the model's vocabulary."""
    remedy = "use the tokenizer that the model was trained with"
    if len(tokenizer) > shape.vocab_size:
        raise CheckpointFormatError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only"
            f" {shape.vocab_size}; {remedy}"
        )
    # A vocabulary with gaps has fewer tokens than its largest id suggests.
    tokens = tokenizer.get_vocab().items() if hasattr(tokenizer, "get_vocab") else ()
    token, last = max(tokens, key=lambda entry: entry[1], default=("", -1))
    if last >= shape.vocab_size:
        raise CheckpointFormatError(
            f"the tokenizer's {token!r} is token {last}, the model's vocabulary has only"
            f" {shape.vocab_size}; {remedy}"
        )


def check(folder: PathLike, network: Network) -> None:
    """Raises CheckpointFormatError where `load` would, without reading weights."""
    _check_folder(folder, network)


def load(
    folder: PathLike,
    network: Network,
    shardings: Any = None,
    dtype: Any = None,
    subtree: str = "",
    store: StoreArray = store_plain,
) -> Params:
    """The parameters stored in a model folder, by any address (`storage/model_folder.py`).

    If several processes hold parts of it, each downloads only the bytes of its own part.

    A scalar network reads any folder of its family: its head comes from a classifier with one
    label, or is zero if the folder holds a causal language model.

    Args:
      network: Built with `read_architecture(folder)`.
      shardings: One per parameter; None places all on the first local device.
      dtype: Of the parameters; None is `network.param_dtype`. Expert selection biases stay
        float32: rounding them would select other experts.
      subtree: The branch of the parameter tree to read, such as "vision"; "" reads all.
      store: What a parameter becomes as soon as it is read, such as its quantized arrays.

    Raises:
      CheckpointFormatError: If anything is missing, cut short, or does not fit the network;
        checked before device memory is used.
      NotFiniteError: If a number is NaN or infinite.
    """
    names, stored, absent = _check_folder(folder, network)
    leaves = traverse_util.flatten_dict(network.abstract_params())
    if shardings is None:
        default_sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings_by_path = dict.fromkeys(leaves, default_sharding)
    else:
        shardings_by_path = traverse_util.flatten_dict(shardings)
    dtype = np.dtype(jnp.dtype(dtype or network.param_dtype))
    arrays: dict[tuple[str, ...], jax.Array] = {}
    selected = [name for name in names if not subtree or name.path[0] == subtree]
    for name in console.track(f"loading {model_folder.location_name(folder)}", selected):
        shape, sharding = leaves[name.path].shape, shardings_by_path[name.path]
        if name.name in absent:
            read_block = functools.partial(_zeros, dtype=dtype)
            array = parameter_reader.assemble(shape, sharding, read_block)
        else:
            tensors = [stored[file] for file in name.file_names]
            param_dtype = np.dtype(np.float32) if name.keep_float32 else dtype
            array = parameter_reader.read_parameter(name, tensors, param_dtype, shape, sharding)
        arrays |= store(name.path, array)
    params = traverse_util.unflatten_dict(arrays)
    stored_name = functools.partial(_nonfinite_tensor_name, names, stored)
    finite.check(params, str(folder), "the folder is damaged, take another copy of it", stored_name)
    return params


def _nonfinite_tensor_name(
    names: Sequence[TensorName], stored: Mapping[str, CheckpointTensor], path: str
) -> str:
    """The first file tensor of a parameter that holds a NaN or infinity."""
    for name in names:
        if ".".join(name.path) != path:
            continue
        for file_name in name.file_names:
            tensor = stored.get(file_name)
            full_block = tuple(slice(0, size) for size in tensor.shape) if tensor else ()
            if tensor and not np.isfinite(np.asarray(tensor.view()[full_block], np.float32)).all():
                return f"{file_name} in {tensor.file.name}"
    return ""


def _check_folder(folder: PathLike, network: Network):
    """Checks a folder; the network's tensor names, the stored tensors, and the absent ones."""
    network = network.unquantized
    config = config_reader.read_config(folder)
    source = str(model_folder.local_folder(folder) / "config.json")
    _check_shape(source, config, network)
    files = safetensors_file.open_folder(folder, by_ranges=jax.process_count() > 1)
    stored = quantized_tensors.dequantized_tensors(
        config, stacked_experts.expert_tensors(files, network.shape), str(folder)
    )
    leaves = traverse_util.flatten_dict(network.abstract_params())
    names = tensor_names(network.shape, network.head)
    _, head = config_reader.family_and_head(config, source)
    absent = {"score.weight"} if head == "lm" and "score.weight" not in stored else set()
    _check_tensors(folder, network, leaves, [n for n in names if n.name not in absent], stored)
    return names, stored, absent


def _check_shape(path: str, config: Mapping[str, Any], network: Network) -> None:
    folder_shape = config_reader.architecture_from_config(config, path)
    ignored_fields = {"max_positions"} | ({"tie_embeddings"} if network.head == "scalar" else set())
    if network.shape.vision is None:
        ignored_fields.add("vision")  # reads no images
    folder_fields, network_fields = (
        dataclasses.asdict(folder_shape),
        dataclasses.asdict(network.shape.as_published),
    )
    differing = [
        f"{field} is {folder_fields[field]} there and {network_fields[field]} in the network"
        for field in folder_fields
        if field not in ignored_fields and folder_fields[field] != network_fields[field]
    ]
    if differing:
        raise CheckpointFormatError(
            f"{path}: {'; '.join(differing)}; build the network with read_shape(folder)"
        )


def _check_tensors(folder, network, leaves, names: list[TensorName], stored) -> None:
    """Raises with all missing or mismatched tensors; warns of unused ones."""
    problems, used = [], set()
    for name in names:
        expected = name.stored_shape(leaves[name.path].shape)
        for file_name in name.file_names:
            used.add(file_name)
            tensor = stored.get(file_name)
            if tensor is None:
                problems.append(f"{file_name} is missing, expected {list(expected)}")
            elif tensor.shape != expected:
                hint = "; a scalar head has one label" if file_name == "score.weight" else ""
                problems.append(
                    f"{file_name} in {tensor.file.name} is {list(tensor.shape)},"
                    f" expected {list(expected)}{hint}"
                )
            elif not tensor.readable:
                problems.append(
                    f"{file_name} in {tensor.file.name} is stored as {tensor.dtype_code}; only"
                    " F32, BF16, F16 and F64 are read"
                )
    unused = sorted(
        name for name in stored.keys() - used if not is_ignorable(name, network.shape, network.head)
    )
    # Weights that a model with another config would use: the config is likely wrong.
    problems += [_unknown_tensor_problem(name, network.shape) for name in filter(is_weight, unused)]
    if problems:
        raise CheckpointFormatError(f"{folder}: {_shortened_list(problems)}")
    _check_tied(folder, network, stored)
    if predictors := [name for name in stored if name.startswith("mtp.")]:
        warnings.warn(
            f"{folder}: {len(predictors)} tensors of multi-token prediction ({predictors[0]}, ...)"
            " are not read; an export of this model has none",
            stacklevel=3,
        )
    if unused:
        warnings.warn(
            f"{folder}: not used by this {network.head} network: {_shortened_list(unused)}",
            stacklevel=3,
        )


def _unknown_tensor_problem(name: str, shape: Architecture) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= shape.num_layers:
        rule = f"num_hidden_layers is {shape.num_layers} in config.json"
    else:
        rule = f"a {shape.family} network of this config.json has no such tensor"
    return f"{name} is stored, but {rule}; correct it, or remove the tensor"


def _check_tied(folder: PathLike, network: Network, stored: Mapping[str, CheckpointTensor]) -> None:
    """Raises CheckpointFormatError if a tied model stores an output projection of its own."""
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if not network.shape.tie_embeddings or network.head != "lm" or not head or not embedding:
        return
    if not head.readable or not is_tied(embedding, head):
        raise CheckpointFormatError(
            f"{folder}: tie_word_embeddings is true (or absent) in config.json, but lm_head.weight"
            " in the file is not model.embed_tokens.weight; set tie_word_embeddings to false, or"
            " remove lm_head.weight"
        )


def _shortened_list(items: Sequence[str]) -> str:
    more = f"; and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return "; ".join(items[:_MAX_LISTED]) + more


def _zeros(block: parameter_reader.Block, dtype: np.dtype) -> np.ndarray:
    return np.zeros([part.stop - part.start for part in block], dtype)


def gathering_reader(params: Params, dtype: np.dtype) -> TensorReader:
    """A function that gathers one tensor of sharded parameters on the host.

    Every process must call it for the same tensors in the same order.
    """
    leaves = traverse_util.flatten_dict(params)

    def read(name: TensorName, layer: int, expert: int) -> np.ndarray:
        stored_dtype = np.dtype(np.float32) if name.keep_float32 else dtype
        return folder_writer.gather_tensor(leaves[name.path], name, layer, stored_dtype, expert)

    return read


def save(
    folder: str | pathlib.Path,
    network: Network,
    params: Params,
    tokenizer: Any = None,
    source_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    dtype: Any = None,
    eos_token_ids: Sequence[int] = (),
    generation_config: Mapping[str, Any] = EMPTY_CONFIG,
) -> None:
    """Writes a folder that transformers loads: weights, configs and tokenizer files.

    The folder appears whole or not at all. An earlier export is replaced; its other files are
    kept. A scalar head becomes a sequence classifier with one label. On several hosts every
    process must call this; process 0 writes.

    Args:
      source_config, max_shard_bytes, eos_token_ids, generation_config: See `write`.
      dtype: Of the stored tensors; None is the dtype of the parameters.

    Raises:
      CheckpointFormatError: If the folder holds something else, or the tokenizer has more
        tokens than the model.
    """
    dtype = np.dtype(jnp.dtype(dtype or params["embed"].dtype))
    contents = gathering_reader(params, dtype)
    save_streamed(
        folder,
        network,
        contents,
        dtype,
        tokenizer,
        source_config=source_config,
        max_shard_bytes=max_shard_bytes,
        eos_token_ids=eos_token_ids,
        generation_config=generation_config,
    )


def save_streamed(
    folder: str | pathlib.Path,
    network: Network,
    read_tensor: TensorReader,
    dtype: np.dtype,
    tokenizer: Any = None,
    source_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    eos_token_ids: Sequence[int] = (),
    generation_config: Mapping[str, Any] = EMPTY_CONFIG,
) -> None:
    """Writes a folder as `save` does, from tensors that `read_tensor` computes one at a time.

    Args:
      source_config: config.json of the source model, whose other keys are kept.
      max_shard_bytes: Larger models are split into several files.
      eos_token_ids: Tokens that end a response; () takes `source_config`'s, else the tokenizer's.
      generation_config: generation_config.json of the source model; kept, with these end tokens.
    """
    folder = pathlib.Path(folder)
    folder_writer.check_replaceable(folder)
    if tokenizer is not None:
        check_vocabulary(network.shape, tokenizer)
    config = config_writer.to_hf_config(network.shape, network.head, dtype.name, source_config)
    _set_token_ids(config, tokenizer, eos_token_ids)
    files = _split_into_files(list(exported_tensors(network, read_tensor, dtype)), max_shard_bytes)

    documents = {"config.json": vision_config.nested_config(config)}
    if network.head == "lm":
        ids = {k: v for k, v in config.items() if k.endswith("_token_id") and v is not None}
        source_settings = {
            key: value for key, value in generation_config.items() if value is not None
        }
        documents["generation_config.json"] = {
            **ids,
            **source_settings,
            **_merged_eos_token_ids(source_settings.get("eos_token_id"), ids.get("eos_token_id")),
        }
    folder_writer.write_model_folder(folder, files, documents, tokenizer)


def _merged_eos_token_ids(stored: Any, from_config: Any) -> dict[str, Any]:
    """End tokens of a generation_config.json: the stored ones if they include the config's."""
    stored_ids, config_ids = (
        set(ids if isinstance(ids, list) else [ids] if ids is not None else [])
        for ids in (stored, from_config)
    )
    return (
        {"eos_token_id": stored if stored_ids >= config_ids and stored_ids else from_config}
        if config_ids
        else {}
    )


def _set_token_ids(config: dict[str, Any], tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key) is None:
            # Written even when unknown: readers would fill in a default of their own.
            config[key] = getattr(tokenizer, key, None)
    if eos_token_ids:
        is_list = len(eos_token_ids) > 1
        config["eos_token_id"] = list(eos_token_ids) if is_list else eos_token_ids[0]


def exported_tensors(network: Network, contents: TensorReader, dtype) -> Iterator[TensorToWrite]:
    """Yields all tensors of an export grouped by layer, so that a file holds whole layers."""
    leaves = traverse_util.flatten_dict(network.abstract_params())
    family = vision_config.readable_alone(network.shape).family
    fused_groups: dict[tuple[str, tuple[int, ...]], list[TensorName]] = collections.defaultdict(
        list
    )
    for name in tensor_names(network.shape, network.head):
        fused_groups[name.name, name.layers].append(name)

    def entry(parts: list[TensorName], layer: int, expert: int) -> TensorToWrite:
        name = parts[0]

        def read() -> np.ndarray:
            pieces = [contents(part, layer, expert) for part in parts]
            return name.fused_tensor(pieces) if len(parts) > 1 else pieces[0]

        shape = name.stored_shape(leaves[name.path].shape)
        stored_dtype = np.dtype(np.float32) if name.keep_float32 else dtype
        file_name = name.name.format(layer, expert)
        file_name = vision_config.file_tensor_name(family, file_name)
        tensor = TensorToWrite(file_name, stored_dtype, shape, read)
        return stacked_experts.written_experts(tensor, network.shape)

    yield from (entry(parts, 0, 0) for parts in fused_groups.values() if not parts[0].is_stacked)
    for layer in range(
        max(max(parts[0].layers, default=-1) for parts in fused_groups.values()) + 1
    ):
        for parts in fused_groups.values():
            if layer in parts[0].layers:
                yield from (entry(parts, layer, e) for e in range(parts[0].experts or 1))


def _split_into_files(
    tensors: list[TensorToWrite], max_bytes: int
) -> dict[str, list[TensorToWrite]]:
    """Splits tensors, in order, into files of at most `max_bytes` (one larger tensor: alone)."""
    groups: list[list[TensorToWrite]] = [[]]
    bytes_left = max_bytes
    for tensor in tensors:
        if groups[-1] and tensor.num_bytes > bytes_left:
            groups.append([])
            bytes_left = max_bytes
        groups[-1].append(tensor)
        bytes_left -= tensor.num_bytes
    if len(groups) == 1:
        return {safetensors_file.SINGLE_FILE: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }
