"""The state of a session as one file: for states that are written after every update.

A file of adapters takes milliseconds where a sealed checkpoint (`checkpoint.saver`) takes tenths of
a second. It is written whole or not at all, by one process, and holds no checksums.
"""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_llm.checkpoint.saver import CheckpointError
from jaxrl_llm.storage import files
from jaxrl_llm.training_api.training_session import TrainingSession


def write_state(session: TrainingSession, file: str | os.PathLike[str]) -> None:
    """Writes weights and optimizer state; gradients that are not applied are not written."""
    leaves = jax.tree.leaves_with_path(jax.device_get(session.state))
    arrays = {_name(path): np.asarray(leaf) for path, leaf in leaves}
    content = safetensors.numpy.save(arrays, {"extra": json.dumps(session.extra_state())})
    files.replace_bytes(pathlib.Path(file), content)


def read_state(session: TrainingSession, file: str | os.PathLike[str]) -> None:
    """Reads a file of `write_state`, bit for bit, and drops gradients that are not applied.

    Raises:
      CheckpointError: If the file is missing, damaged, or of other shapes.
    """
    path = pathlib.Path(file)
    try:
        with safetensors.safe_open(path, "np") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            extra = json.loads(opened.metadata()["extra"])
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error

    def restored_leaf(path: Any, old: jax.Array) -> jax.Array:
        new = arrays.get(_name(path))
        if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            came = "missing" if new is None else f"{new.dtype} of shape {list(new.shape)}"
            raise CheckpointError(
                f"{file}: {_name(path)} is {came}, expected {old.dtype} of shape {list(old.shape)}"
            )
        return jax.device_put(new, old.sharding)

    session.restore(jax.tree.map_with_path(restored_leaf, session.state), extra)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
