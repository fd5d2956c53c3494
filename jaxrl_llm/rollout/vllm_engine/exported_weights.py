"""Rollout weights in the tensors of a Hugging Face checkpoint, in memory that a worker can map."""

import dataclasses
import mmap
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jaxrl_llm.models import nnx_bridge
from jaxrl_llm.models.architecture import LayerType
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.hf.tensor_names import TensorName
from jaxrl_llm.models.layers import DEFAULT_MATMULS
from jaxrl_llm.models.transformer import Network, Params

_ALIGNMENT = 64


class ExportedWeights:
    """All tensors of a network, one after the other, at the same places for every version.

    The memory has no name in the file system: it is freed with the last process that maps it.
    """

    def __init__(self, network: Network):
        self._network = network
        self._params: Params = {}
        self._kinds = {
            index: stack.layer
            for stack in network.shape.layer_stacks.values()
            for index in stack.layer_indices
        }
        dtype = np.dtype(jax.numpy.dtype(network.compute_dtype))
        # Shapes of files follow from those of plain kernels, not from the engine's layout.
        plain = dataclasses.replace(network, matmuls=DEFAULT_MATMULS)
        self._tensors = list(checkpoint.exported_tensors(plain, self._read, dtype))
        self._offsets, self.num_bytes = [], 0
        for tensor in self._tensors:
            self._offsets.append(self.num_bytes)
            self.num_bytes += -(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._file_descriptor = os.memfd_create("jaxrl_llm_weights")
        os.ftruncate(self._file_descriptor, self.num_bytes)
        self._memory = mmap.mmap(self._file_descriptor, self.num_bytes)

    @property
    def path(self) -> str:
        """Where processes of the same user on this host find the memory."""
        return f"/proc/{os.getpid()}/fd/{self._file_descriptor}"

    @property
    def memory(self) -> memoryview:
        return memoryview(self._memory)

    def table(self) -> list[dict[str, Any]]:
        """Name, dtype, shape and offset of each tensor."""
        return [
            {
                "name": tensor.name,
                "dtype": tensor.dtype.name,
                "shape": list(tensor.shape),
                "offset": offset,
            }
            for tensor, offset in zip(self._tensors, self._offsets, strict=True)
        ]

    def write(self, params: Params) -> None:
        """Writes rollout weights; returns when `params` have been read."""
        self._params = params
        try:
            for tensor, offset in zip(self._tensors, self._offsets, strict=True):
                array = np.frombuffer(
                    self._memory, tensor.dtype, int(np.prod(tensor.shape)), offset
                )
                array.reshape(tensor.shape)[...] = tensor.contents()
        finally:
            self._params = {}

    def close(self) -> None:
        """Gives the memory up; a worker that maps it keeps its own hold."""
        os.close(self._file_descriptor)

    def _read(self, name: TensorName, layer: int, expert: int) -> np.ndarray:
        """A parameter in the layout of the file, from rollout weights."""
        tree: Any = self._params
        path = name.path
        is_stored_transposed = False
        if name.is_stacked:
            path = name.path[2:]
            tree = tree["layers"][layer]
            is_stored_transposed = _transposed(self._network, self._kinds[layer])[path]
        for key in path:
            tree = tree[key]
        array = np.asarray(tree[expert] if name.experts else tree)
        return name.transpose_stored(array.T if is_stored_transposed else array)


def _transposed(network: Network, kind: LayerType) -> Mapping[tuple[str, ...], bool]:
    """Whether the engine's network stores each parameter of a layer transposed."""

    def axes(each: Network) -> Mapping[tuple[str, ...], tuple[str, ...]]:
        _, state = nnx_bridge.graph_and_state(each, "block", kind)
        return traverse_util.flatten_dict(nnx_bridge.logical_axes(state))

    plain = axes(dataclasses.replace(network, matmuls=DEFAULT_MATMULS))
    return {path: names != plain[path] for path, names in axes(network).items()}
