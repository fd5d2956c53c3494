"""Model folders as Hugging Face writes them: read into shards, written from shards.

Reading checks every header before it uses device memory, then reads for each shard its own part.
Writing streams one tensor at a time. Neither holds a whole model on the host.
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
from jaxrl_llm.models import (
    families,
    finite,
    quantized_file,
    safetensors_file,
    vocabulary,
    written_config,
    written_folder,
)
from jaxrl_llm.models.contradictions import is_tied, is_weight
from jaxrl_llm.models.families import CheckpointFormatError
from jaxrl_llm.models.quantized_file import Tensor
from jaxrl_llm.models.safetensors_file import TensorToWrite
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.tensor_names import TensorName, may_be_unused, tensor_names
from jaxrl_llm.models.transformer import Network, Params

Block = tuple[slice, ...]  # of one array, with start and stop
# One tensor of a layer and an expert, as a file stores it.
Contents = Callable[[TensorName, int, int], np.ndarray]

_MAX_LISTED = 8
EMPTY: Mapping[str, Any] = types.MappingProxyType({})


def read_shape(folder: str | pathlib.Path) -> Shape:
    """Returns the shape that a model folder's config.json describes; raises as `families` does."""
    config = families.read_config(folder)
    return families.shape_from_config(config, str(pathlib.Path(folder) / "config.json"))


def image_marks(folder: str | pathlib.Path, shape: Shape) -> tuple[int, ...]:
    """The tokens of a model that stand for images in its config.json, also where it reads none."""
    config = families.read_json(pathlib.Path(folder) / "config.json")
    return vocabulary.image_marks(config, shape.vocab_size)


def check_vocabulary(shape: Shape, tokenizer: Any) -> None:
    """Raises CheckpointFormatError if the tokenizer has tokens that the model has no row for."""
    remedy = "use the tokenizer that the model was trained with"
    if len(tokenizer) > shape.vocab_size:
        raise CheckpointFormatError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only"
            f" {shape.vocab_size}; {remedy}"
        )
    # A vocabulary with gaps has fewer tokens than its largest id says.
    tokens = tokenizer.get_vocab().items() if hasattr(tokenizer, "get_vocab") else ()
    token, last = max(tokens, key=lambda entry: entry[1], default=("", -1))
    if last >= shape.vocab_size:
        raise CheckpointFormatError(
            f"the tokenizer's {token!r} is token {last}, the model's vocabulary has only"
            f" {shape.vocab_size}; {remedy}"
        )


def check(folder: str | pathlib.Path, network: Network) -> None:
    """Raises CheckpointFormatError as `load` does, but reads no weights."""
    _checked(pathlib.Path(folder), network)


def load(
    folder: str | pathlib.Path,
    network: Network,
    shardings: Any = None,
    dtype: Any = None,
    part: str = "",
) -> Params:
    """Returns the parameters stored in a model folder.

    A scalar network reads any folder of its family: the head is that of a classifier with one
    label, or zero if the folder is a causal language model.

    Args:
      network: Built with `read_shape(folder)`.
      shardings: Of each parameter; None is the first local device.
      dtype: Of the parameters; None is `network.param_dtype`. Biases that select experts are
        float32: a rounded one selects others.
      part: The branch of the tree to read, such as "vision"; "": all of it.

    Raises:
      CheckpointFormatError: If anything is missing, cut short, or does not fit the network;
        checked before device memory is used.
      NotFiniteError: If a number is NaN or infinite.
    """
    names, stored, absent = _checked(pathlib.Path(folder), network)
    leaves = traverse_util.flatten_dict(network.abstract())
    if shardings is None:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        split = dict.fromkeys(leaves, one)
    else:
        split = traverse_util.flatten_dict(shardings)
    dtype = np.dtype(jnp.dtype(dtype or network.param_dtype))
    arrays = {}
    wanted = [name for name in names if not part or name.path[0] == part]
    for name in console.each(f"loading {folder}", wanted):
        shape, sharding = leaves[name.path].shape, split[name.path]
        if name.name in absent:
            read = functools.partial(_zeros, dtype=dtype)
            arrays[name.path] = _assemble(shape, sharding, read)
        else:
            tensors = [stored[file] for file in name.file_names]
            kind = np.dtype(np.float32) if name.wide else dtype
            arrays[name.path] = read_parameter(name, tensors, kind, shape, sharding)
    params = traverse_util.unflatten_dict(arrays)
    stored_name = functools.partial(_not_finite, names, stored)
    finite.check(params, str(folder), "the folder is damaged, take another copy of it", stored_name)
    return params


def _not_finite(names: Sequence[TensorName], stored: Mapping[str, Tensor], path: str) -> str:
    """The first tensor in a file, of those of one parameter, that is not finite."""
    for name in names:
        if ".".join(name.path) != path:
            continue
        for file_name in name.file_names:
            tensor = stored.get(file_name)
            whole = tuple(slice(0, size) for size in tensor.shape) if tensor else ()
            if tensor and not np.isfinite(np.asarray(tensor.view()[whole], np.float32)).all():
                return f"{file_name} in {tensor.file.name}"
    return ""


def _checked(folder: pathlib.Path, network: Network):
    """Returns the tensors of a network, those stored in the folder, and which may be absent."""
    config = families.read_config(folder)
    _check_shape(folder, config, network)
    source = str(folder / "config.json")
    stored = quantized_file.dequantized(config, safetensors_file.open_folder(folder), str(folder))
    leaves = traverse_util.flatten_dict(network.abstract())
    names = tensor_names(network.shape, network.head)
    _, head = families.architecture(config, source)
    absent = {"score.weight"} if head == "lm" and "score.weight" not in stored else set()
    _check_tensors(folder, network, leaves, [n for n in names if n.name not in absent], stored)
    return names, stored, absent


def _check_shape(folder: pathlib.Path, config: Mapping[str, Any], network: Network) -> None:
    path = folder / "config.json"
    found = families.shape_from_config(config, str(path))
    indifferent = {"max_positions"} | ({"tie_embeddings"} if network.head == "scalar" else set())
    if network.shape.vision is None:
        indifferent.add("vision")  # reads no images
    theirs, ours = dataclasses.asdict(found), dataclasses.asdict(network.shape)
    differing = [
        f"{field} is {theirs[field]} there and {ours[field]} in the network"
        for field in theirs
        if field not in indifferent and theirs[field] != ours[field]
    ]
    if differing:
        raise CheckpointFormatError(
            f"{path}: {'; '.join(differing)}; build the network with read_shape(folder)"
        )


def _check_tensors(folder, network, leaves, names: list[TensorName], stored) -> None:
    """Raises with every tensor that is missing or does not fit; warns of those without use."""
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
                    f"{file_name} in {tensor.file.name} is stored as {tensor.code}; only"
                    " F32, BF16, F16 and F64 are read"
                )
    unused = sorted(
        name
        for name in stored.keys() - used
        if not may_be_unused(name, network.shape, network.head)
    )
    # A model of another config would compute with them.
    problems += [_not_in_network(name, network.shape) for name in filter(is_weight, unused)]
    if problems:
        raise CheckpointFormatError(f"{folder}: {_listed(problems)}")
    _check_tied(folder, network, stored)
    if unused:
        warnings.warn(
            f"{folder}: not used by this {network.head} network: {_listed(unused)}", stacklevel=3
        )


def _not_in_network(name: str, shape: Shape) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= shape.num_layers:
        rule = f"num_hidden_layers is {shape.num_layers} in config.json"
    else:
        rule = f"a {shape.family} network of this config.json has no such tensor"
    return f"{name} is stored, but {rule}; correct it, or remove the tensor"


def _check_tied(folder: pathlib.Path, network: Network, stored: Mapping[str, Tensor]) -> None:
    """Raises CheckpointFormatError if a tied network's file has another output projection."""
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if not network.shape.tie_embeddings or network.head != "lm" or not head or not embedding:
        return
    if not head.readable or not is_tied(embedding, head):
        raise CheckpointFormatError(
            f"{folder}: tie_word_embeddings is true (or absent) in config.json, but lm_head.weight"
            " in the file is not model.embed_tokens.weight; set tie_word_embeddings to false, or"
            " remove lm_head.weight"
        )


def _listed(items: Sequence[str]) -> str:
    more = f"; and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return "; ".join(items[:_MAX_LISTED]) + more


def _zeros(block: Block, dtype: np.dtype) -> np.ndarray:
    return np.zeros([part.stop - part.start for part in block], dtype)


def read_parameter(
    name: TensorName,
    tensors: Sequence[Tensor],
    dtype: np.dtype,
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """Returns one parameter; `tensors` are its layers, or a single one."""
    return _assemble(shape, sharding, functools.partial(_read_block, name, tensors, dtype))


def _read_block(
    name: TensorName, tensors: Sequence[Tensor], dtype: np.dtype, block: Block
) -> np.ndarray:
    """Returns one block of a parameter; it reads layers, and experts, in turn."""
    leading, part = block[: name.num_leading], block[name.num_leading :]
    out = np.empty([p.stop - p.start for p in block], dtype)
    for slot in np.ndindex(out.shape[: name.num_leading]):
        number = 0
        for i, span, size in zip(slot, leading, (1, name.experts), strict=False):
            number = number * size + span.start + i
        tensor = tensors[number]
        found = tensor.view()[name.stored_block(part, tensor.shape)]
        out[slot] = found.T if name.transposed else found
    return out


def _assemble(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Block], np.ndarray]
) -> jax.Array:
    """Returns a sharded array; each block is read once for all devices that hold it."""
    holders = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # it is addressable
        spans = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        holders[spans].append(device)
    arrays: list[jax.Array] = []
    for spans, devices in holders.items():
        block = read(tuple(slice(*span) for span in spans))
        copies = [
            jax.device_put(
                block, jax.sharding.SingleDeviceSharding(d, memory_kind=sharding.memory_kind)
            )
            for d in devices
        ]
        arrays += jax.block_until_ready(copies)  # else all blocks would wait on the host at once
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def save(
    folder: str | pathlib.Path,
    network: Network,
    params: Params,
    tokenizer: Any = None,
    source_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    dtype: Any = None,
    eos_token_ids: Sequence[int] = (),
    generation_config: Mapping[str, Any] = EMPTY,
) -> None:
    """Writes a folder that transformers loads: weights, configs and tokenizer files.

    The folder appears whole or not at all. An earlier export is replaced; other files in it are
    kept. A scalar head becomes a sequence classifier with one label. On several hosts every
    process must call this; the first one writes.

    Args:
      source_config, max_shard_bytes, eos_token_ids, generation_config: As `write` takes them.
      dtype: Of the stored tensors; None is the dtype of the parameters.

    Raises:
      CheckpointFormatError: If the folder holds something else, or the tokenizer has more
        tokens than the model.
    """
    leaves = traverse_util.flatten_dict(params)
    dtype = np.dtype(jnp.dtype(dtype or params["embed"].dtype))

    def contents(name: TensorName, layer: int, expert: int) -> np.ndarray:
        kind = np.dtype(np.float32) if name.wide else dtype
        return written_folder.fetch(leaves[name.path], name, layer, kind, expert)

    write(
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


def write(
    folder: str | pathlib.Path,
    network: Network,
    contents: Contents,
    dtype: np.dtype,
    tokenizer: Any = None,
    source_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    eos_token_ids: Sequence[int] = (),
    generation_config: Mapping[str, Any] = EMPTY,
) -> None:
    """Writes a folder as `save` does, of tensors that are computed when they are written.

    Args:
      source_config: config.json the model came from, whose other keys are kept.
      max_shard_bytes: Larger weights are split into several files.
      eos_token_ids: Tokens that end a response; () takes `source_config`'s, else the tokenizer's.
      generation_config: generation_config.json the model came from; kept, with these end tokens.
    """
    folder = pathlib.Path(folder)
    written_folder.check_replaceable(folder)
    if tokenizer is not None:
        check_vocabulary(network.shape, tokenizer)
    config = written_config.to_hf_config(network.shape, network.head, dtype.name, source_config)
    _set_token_ids(config, tokenizer, eos_token_ids)
    files = _split(list(_tensors_to_write(network, contents, dtype)), max_shard_bytes)

    documents = {"config.json": config}
    if network.head == "lm":
        ids = {k: v for k, v in config.items() if k.endswith("_token_id") and v is not None}
        kept = {key: value for key, value in generation_config.items() if value is not None}
        documents["generation_config.json"] = {
            **ids,
            **kept,
            **_end_tokens(kept.get("eos_token_id"), ids.get("eos_token_id")),
        }
    written_folder.write(folder, files, documents, tokenizer)


def _end_tokens(stored: Any, ours: Any) -> dict[str, Any]:
    """The end tokens of a generation_config.json; as its source has them if they are the same."""
    before, after = (
        set(ids if isinstance(ids, list) else [ids] if ids is not None else [])
        for ids in (stored, ours)
    )
    return {"eos_token_id": stored if before >= after and before else ours} if after else {}


def _set_token_ids(config: dict[str, Any], tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key) is None:
            # Written even when unknown: readers would fill in a default of their own.
            config[key] = getattr(tokenizer, key, None)
    if eos_token_ids:
        several = len(eos_token_ids) > 1
        config["eos_token_id"] = list(eos_token_ids) if several else eos_token_ids[0]


def _tensors_to_write(network: Network, contents: Contents, dtype) -> Iterator[TensorToWrite]:
    """Yields every tensor, those of a layer together, so that a file holds whole layers."""
    leaves = traverse_util.flatten_dict(network.abstract())
    found: dict[tuple[str, tuple[int, ...]], list[TensorName]] = collections.defaultdict(list)
    for name in tensor_names(network.shape, network.head):
        found[name.name, name.numbers].append(name)

    def entry(parts: list[TensorName], layer: int, expert: int) -> TensorToWrite:
        name = parts[0]

        def read() -> np.ndarray:
            pieces = [contents(part, layer, expert) for part in parts]
            return name.joined(pieces) if len(parts) > 1 else pieces[0]

        shape = name.stored_shape(leaves[name.path].shape)
        kind = np.dtype(np.float32) if name.wide else dtype
        return TensorToWrite(name.name.format(layer, expert), kind, shape, read)

    yield from (entry(parts, 0, 0) for parts in found.values() if not parts[0].stacked)
    for layer in range(max(max(parts[0].numbers, default=-1) for parts in found.values()) + 1):
        for parts in found.values():
            if layer in parts[0].numbers:
                yield from (entry(parts, layer, e) for e in range(parts[0].experts or 1))


def _split(tensors: list[TensorToWrite], max_bytes: int) -> dict[str, list[TensorToWrite]]:
    """Returns the tensors of each file, in order, no file larger than it must be."""
    groups: list[list[TensorToWrite]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if groups[-1] and tensor.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    if len(groups) == 1:
        return {safetensors_file.SINGLE: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }
