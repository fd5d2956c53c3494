"""Small random checkpoints of each family, as transformers writes them, and what it computes.

All of it is kept in `goldens/FAMILY.safetensors`, made by `goldens/make_transformers.py`.
"""

import functools
import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util

from jaxrl_llm.models.hf.tensor_names import tensor_names

GOLDENS = pathlib.Path(__file__).parent / "goldens"
FAMILIES = ("llama", "qwen2", "qwen3")
OF_ONE_HEAD = {"lm_head.weight": "lm", "score.weight": "scalar"}


@functools.cache
def kept(family):
    """Returns all arrays of a family by name, and its documents."""
    with safetensors.safe_open(GOLDENS / f"{family}.safetensors", "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        documents = {name: json.loads(text) for name, text in file.metadata().items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays, documents


def expected(family, prefix="rows"):
    """Returns the arrays `PREFIX.NAME` of a family by NAME."""
    arrays, _ = kept(family)
    start = prefix + "."
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}


def adapters(family):
    """Returns what `peft` writes of a family's adapters: tensors by name, and its config."""
    arrays, documents = kept(family)
    return {k: v for k, v in arrays.items() if k.startswith("base_model.")}, documents["adapters"]


def make(folder, family, head="lm", dtype="float32", max_shard_bytes=0):
    """Writes a family's checkpoint: in files of so many bytes at most, or in a single one."""
    arrays, documents = kept(family)
    number_type = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    tensors = {
        name: np.ascontiguousarray(array.astype(number_type))
        for name, array in arrays.items()
        if name.startswith("model.") or OF_ONE_HEAD.get(name) == head
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = {**documents[head], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if not max_shard_bytes:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    shards, room = [], 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors.numpy.save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_config(folder, **changes):
    """Changes keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_norms(network, before, after):
    """Returns the L2 norm of each tensor's change by its name in the folder."""
    old, new = (
        {path: np.asarray(leaf, np.float64) for path, leaf in traverse_util.flatten_dict(t).items()}
        for t in (before, after)
    )
    found = {}
    for name in tensor_names(network.shape, network.head):
        change = new[name.path] - old[name.path]
        for file, each in zip(
            name.file_names, change if name.is_stacked else [change], strict=True
        ):
            found[file] = np.linalg.norm(each)
    return found
