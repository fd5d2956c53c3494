"""Writes model folders atomically, one tensor at a time."""

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.models.hf import safetensors_file
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.safetensors_file import TensorToWrite
from jaxrl_llm.models.hf.tensor_names import TensorName

# All files from which transformers loads a tokenizer.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
)
_METADATA = {"format": "pt", "writer": "jaxrl_llm"}


def check_replaceable(folder: pathlib.Path) -> None:
    """Raises CheckpointFormatError if the folder holds something other than an earlier export."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    for path in sorted(folder.glob("*model*.safetensors")):
        try:
            if safetensors_file.read_header(path)[1] == _METADATA:
                return
        except CheckpointFormatError:
            continue
    raise CheckpointFormatError(
        f"{folder}: exists and was not written by an earlier export; choose another folder or"
        " remove it first"
    )


def write_model_folder(
    folder: pathlib.Path,
    files: dict[str, list[TensorToWrite]],
    documents: Mapping[str, Mapping[str, Any]],
    tokenizer: Any = None,
) -> None:
    """Writes a model folder atomically; replaces an earlier export, see `check_replaceable`.

    `files` holds the tensors of each safetensors file, `documents` the contents of each JSON file.
    On several hosts every process must call this; process 0 writes.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    if jax.process_index() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _write_weights(partial, files)
            for name, contents in documents.items():
                _write_json(partial / name, contents)
            if tokenizer is not None:
                _write_tokenizer(partial, tokenizer)
            _replace_folder(folder, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    else:
        for tensors in files.values():
            for tensor in tensors:
                tensor.contents()  # a collective: gathering needs every process
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"export to {folder}")


@functools.partial(jax.jit, static_argnames=("transposed", "dtype"))
def _stored_layout(leaf, index, *, transposed: bool, dtype: str):
    tensor = leaf[index]
    return (tensor.T if transposed else tensor).astype(dtype)


def gather_tensor(
    leaf: jax.Array, name: TensorName, layer: int, dtype: np.dtype, expert: int = 0
) -> np.ndarray:
    """A parameter of one layer and expert on the host, in the layout of the file.

    A collective: every process must call it.
    """
    index: tuple[int, ...] = (name.layers.index(layer),) if name.is_stacked else ()
    index += (expert,) if name.experts else ()
    tensor = _stored_layout(leaf, index, transposed=name.transposed, dtype=dtype.name)
    if tensor.is_fully_addressable:
        return np.asarray(tensor)
    return multihost_utils.process_allgather(tensor, tiled=True)


def _write_weights(folder: pathlib.Path, files: dict[str, list[TensorToWrite]]) -> None:
    """Writes the safetensors files, and an index if there are several."""
    for name, tensors in files.items():
        safetensors_file.write_file(folder / name, tensors, _METADATA)
    if len(files) > 1:
        total_bytes = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
        weight_map = {t.name: name for name, tensors in files.items() for t in tensors}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / safetensors_file.INDEX_FILE, index)


def _write_tokenizer(folder: pathlib.Path, tokenizer: Any) -> None:
    """Writes a tokenizer: copies of its source files if it is unchanged, else `save_pretrained`.

    Copies because `save_pretrained` does not always reproduce the files that were loaded.
    """
    source = pathlib.Path(getattr(tokenizer, "source_folder", "") or ".")
    # 0: not loaded from a folder. Another number: tokens were added since.
    if getattr(tokenizer, "num_source_tokens", 0) != len(tokenizer) or not source.is_dir():
        tokenizer.save_pretrained(str(folder))
        return
    for name in _TOKENIZER_FILES:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    _write_chat_template(folder, tokenizer.chat_template)


def _write_chat_template(folder: pathlib.Path, template: Any) -> None:
    """Replaces a different chat template in the folder by `template` (model.chat_template)."""
    template_path, config_path = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    stored_template = (
        template_path.read_text("utf-8") if template_path.is_file() else config.get("chat_template")
    )
    if (
        not isinstance(template, str)
        or stored_template == template
        or not isinstance(stored_template, str | None)
    ):
        return
    template_path.write_text(template, encoding="utf-8")
    if config.pop("chat_template", None) is not None:
        config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _write_json(path: pathlib.Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")


def _replace_folder(folder: pathlib.Path, partial: pathlib.Path) -> None:
    """Moves `partial` to `folder`, keeping files that no export writes."""
    if not folder.exists():
        os.rename(partial, folder)
        return
    earlier = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(earlier, ignore_errors=True)
    os.rename(folder, earlier)
    os.rename(partial, folder)
    for path in earlier.iterdir():
        is_weights = "model" in path.name and ".safetensors" in path.name
        if not is_weights and not (folder / path.name).exists():
            os.rename(path, folder / path.name)
    shutil.rmtree(earlier)
