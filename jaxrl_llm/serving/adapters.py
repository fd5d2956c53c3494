"""LoRA adapters by name over one base model, loaded and unloaded while the server runs.

The factors of all adapters lie side by side in one pair of arrays per projection (see
`layers.Linear`), so that the samples of one batch may use any of them. Places are fixed when the
server starts: their number, their rank, and the projections that have them.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.config.learner import PROJECTIONS
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import lora, nnx_bridge
from jaxrl_llm.models.hf import peft_adapter
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout.engine.requests import AdapterSlot
from jaxrl_llm.rollout.engine_api import EngineArgs
from jaxrl_llm.sharding import mesh as mesh_lib

DEFAULT_RANK = 16  # of the places of a server that starts without adapters


class AdapterError(UserError):
    """An adapter cannot be loaded."""


class AdapterNotFoundError(AdapterError):
    """No adapter has this name."""


class NoPlaceError(AdapterError):
    """All places for adapters are used."""


@dataclasses.dataclass(eq=False)
class Adapter:
    """A loaded adapter."""

    name: str
    address: str
    slot: AdapterSlot
    num_requests: int = 0  # running or waiting
    is_unloaded: bool = False  # its place is free once no request uses it


class AdapterPool:
    """The adapters of a server; any thread may call it.

    A request holds a `lease` on its adapter: the place of an adapter that was unloaded is not used
    again before the last of its requests has ended.
    """

    def __init__(
        self,
        base_name: str,
        policy: Network,
        args: EngineArgs,
        sources: Mapping[str, str],
        num_places: int = 0,
        rank: int = 0,
    ):
        """Reads the headers of all adapters, but no weights.

        Args:
          base_name: Name of the model, which no adapter may have.
          policy: The model without its vision encoder, as in training.
          args: Of the engine without adapters.
          sources: Folders, or other addresses, of the first adapters by name.
          num_places: Adapters at once; 0: as many as `sources`. With more, every projection has
            places, so that others can be loaded later.
          rank: The highest of any adapter; 0: that of `sources`, or `DEFAULT_RANK`.

        Raises:
          UserError: If there is no place for an adapter, or it does not fit the model.
        """
        self._base_name, self._policy, self._args = base_name, policy, args
        self.num_places = num_places or len(sources)
        if self.num_places < len(sources):
            raise AdapterError(
                f"{len(sources)} adapters for {num_places} places; raise --max_adapters"
            )
        self._check_model()
        configs = {name: self._read_config(name, address) for name, address in sources.items()}
        self.rank = rank or max([config.rank for config in configs.values()] or [DEFAULT_RANK])
        targets = tuple(
            name
            for name in PROJECTIONS
            if self.num_places > len(sources)
            or any(name in config.targets for config in configs.values())
        )
        places = LoraConfig(rank=self.rank, alpha=self.rank, targets=targets)
        self.network = dataclasses.replace(
            args.network, lora=places, num_adapters=self.num_places, param_dtype="float32"
        )
        for name, config in configs.items():
            self._check_fits(name, config)
        self._first = {name: (address, configs[name]) for name, address in sources.items()}
        self._lock = threading.Lock()  # of names and places
        self._changes = threading.Lock()  # of the parameters: one change at a time
        self._adapters: dict[str, Adapter] = {}
        self._free = list(range(1, self.num_places + 1))
        self._num_loaded = 0
        self._base: Params = {}
        self._factors: list[Params] = []  # by layer
        self._update: Callable[[Params], None] = lambda params: None
        self._load_by_name: Callable[[str], None] = lambda name: None

    def _check_model(self) -> None:
        """Refuses models with projections that cannot have several adapters."""
        shape = self._policy.shape
        if shape.latent:
            raise AdapterError(
                "adapters by name: not for latent attention (MLA), whose kv_b is not applied to"
                " tokens; merge the adapter with `export`, and serve the merged model"
            )

    @property
    def adapters(self) -> list[Adapter]:
        """The loaded adapters that requests may name, oldest first."""
        with self._lock:
            return list(self._adapters.values())

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[AdapterSlot]:
        """The place of an adapter, which stays its own while the context lasts.

        Raises:
          AdapterNotFoundError: If no adapter has this name.
        """
        with self._lock:
            if name not in self._adapters:
                raise AdapterNotFoundError(f"adapter {name[:100]!r} is not loaded")
            adapter = self._adapters[name]
            adapter.num_requests += 1
        try:
            yield adapter.slot
        finally:
            with self._lock:
                adapter.num_requests -= 1
                self._free_place(adapter)

    def set_base(self, base: Params) -> Params:
        """Takes weights of the base model; returns them with all adapters, for the engine.

        The first call loads the adapters of `sources`.
        """
        with self._changes:
            self._base = base
            if not self._factors:
                self._factors = self._empty_factors()
                num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._factors))
                logging.info(
                    "%d places for adapters of rank %d: %.1f MB over all devices",
                    self.num_places,
                    self.rank,
                    num_bytes / 1e6,
                )
                for name, (address, config) in self._first.items():
                    self._load(name, address, config)
            return self._params()

    def connect(self, update: Callable[[Params], None]) -> None:
        """Names the function that gives the engine parameters with a new adapter."""
        self._update = update

    def connect_source(self, load_by_name: Callable[[str], None]) -> None:
        """Names a function that loads an adapter which a request names, if it knows the name."""
        self._load_by_name = load_by_name

    def load_if_known(self, name: str) -> None:
        """Loads an adapter of the connected source, if it is not loaded. May take long.

        Raises:
          UserError: If it is known and cannot be loaded.
        """
        with self._lock:
            is_loaded = name in self._adapters
        if not is_loaded:
            self._load_by_name(name)

    def load(self, name: str, address: str) -> Adapter:
        """Loads an adapter; the engine has it from its next step on.

        Raises:
          UserError: If the name is taken, no place is free, or the adapter does not fit.
        """
        with self._changes:
            config = self._read_config(name, address)
            self._check_fits(name, config)
            self._load(name, address, config)
            self._update(self._params())
            with self._lock:
                return self._adapters[name]

    def unload(self, name: str) -> None:
        """Refuses new requests for an adapter; those that run are finished with it.

        Raises:
          AdapterNotFoundError: If no adapter has this name.
        """
        with self._lock:
            if name not in self._adapters:
                raise AdapterNotFoundError(f"adapter {name[:100]!r} is not loaded")
            adapter = self._adapters.pop(name)
            adapter.is_unloaded = True
            self._free_place(adapter)

    def _free_place(self, adapter: Adapter) -> None:
        if adapter.is_unloaded and not adapter.num_requests:
            self._free.append(adapter.slot.number)

    def _read_config(self, name: str, address: str) -> LoraConfig:
        if name == self._base_name:
            raise AdapterError(f"adapter {name!r}: the model itself has this name; choose another")
        return peft_adapter.read_lora_config(address, self._policy)

    def _check_fits(self, name: str, config: LoraConfig) -> None:
        if config.rank > self.rank:
            raise AdapterError(
                f"adapter {name!r} has rank {config.rank}, the places of this server have"
                f" {self.rank}; start it with --max_adapter_rank={config.rank}"
            )
        if missing := [t for t in config.targets if t not in self.network.lora.targets]:
            raise AdapterError(
                f"adapter {name!r} changes {', '.join(missing)}; this server has places for"
                f" {', '.join(self.network.lora.targets)}; start it with this adapter"
            )

    def _load(self, name: str, address: str, config: LoraConfig) -> None:
        """Writes an adapter to a free place of the factors."""
        with self._lock:
            if name in self._adapters:
                raise AdapterError(f"adapter {name!r} is loaded already; unload it first")
            if not self._free:
                raise NoPlaceError(
                    f"{self.num_places} of {self.num_places} places are used; unload an adapter,"
                    " or wait until the requests of one that was unloaded have ended"
                )
            number = self._free.pop(0)
        try:
            start = np.int32((number - 1) * self.rank)
            new = self._read_factors(address, config)
            self._factors = self._write_place(self._factors, new, start)
        except BaseException:
            with self._lock:
                self._free.append(number)
            raise
        with self._lock:
            self._num_loaded += 1
            slot = AdapterSlot(number, self._num_loaded)
            self._adapters[name] = Adapter(name, address, slot)

    def _read_factors(self, address: str, config: LoraConfig) -> list[Params]:
        """The factors of an adapter by layer, of the full rank, multiplied by its scale.

        Projections of a layer that it does not change have zeros.
        """
        network = dataclasses.replace(self._policy, lora=config)
        replicated = mesh_lib.replicated(self._args.mesh)
        shardings = jax.tree.map(lambda _: replicated, network.abstract_adapters())
        stacked = peft_adapter.load(address, network, shardings)["layers"]
        by_layer: list[Params] = [{} for _ in range(network.shape.num_layers)]
        for name, stack in network.shape.layer_stacks.items():
            for path, leaf in flatten_dict(stacked.get(name, {})).items():
                for position, layer in enumerate(stack.layer_indices):
                    by_layer[layer][path] = np.asarray(leaf[position])
        return [
            jax.tree_util.tree_map_with_path(
                lambda path, leaf, layer=layer: self._padded_factor(
                    path, leaf, layer, config.scale
                ),
                old,
            )
            for old, layer in zip(self._factors, by_layer, strict=True)
        ]

    def _padded_factor(
        self, path: Any, place: jax.Array, layer: Mapping[Any, Any], scale: float
    ) -> Any:
        """A factor of an adapter with zeros up to the rank of a place."""
        keys = tuple(key.key for key in path)
        is_a = keys[-1] == lora.FACTORS[0]
        shape = (place.shape[0], self.rank) if is_a else (self.rank, place.shape[1])
        padded = np.zeros(shape, np.float32)
        if (factor := layer.get(keys)) is not None:
            scaled = factor if is_a else factor * np.float32(scale)
            padded[: factor.shape[0], : factor.shape[1]] = scaled
        return padded

    def _empty_factors(self) -> list[Params]:
        """Factors of zeros for every place, by layer, sharded as the kernels are."""
        network, mesh, layout = self.network, self._args.mesh, self._args.layout
        rules, computing = mesh_lib.ROLLOUT_WEIGHTS[layout], mesh_lib.COMPUTE_AXES[layout]
        layers = []
        for kind in network.shape.layer_types:
            state = nnx_bridge.graph_and_state(network, "adapted", kind)[1]
            shapes = lora.adapter_params(nnx.to_pure_dict(state))
            axes = lora.adapter_params(nnx_bridge.logical_axes(state))
            shardings = mesh_lib.shardings(
                shapes, axes, mesh, rules, network.sharding_units, computing
            )
            zeros = functools.partial(
                jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32), shapes
            )
            layers.append(jax.jit(zeros, out_shardings=shardings)())
        return layers

    @functools.cached_property
    def _write_place(self) -> Callable[[list[Params], list[Params], np.int32], list[Params]]:
        """A program: factors with those of one place, from a column of A and row of B on.

        Compiled once for all adapters. The engine may still use the old factors, so they are not
        donated.
        """

        def write(path, place, factor, start):
            is_a = path[-1].key == lora.FACTORS[0]
            return jax.lax.dynamic_update_slice(place, factor, (0, start) if is_a else (start, 0))

        def write_all(old, new, start):
            return jax.tree_util.tree_map_with_path(
                lambda path, place, factor: write(path, place, factor, start), old, new
            )

        shardings = jax.tree.map(lambda a: a.sharding, self._factors)
        return jax.jit(write_all, out_shardings=shardings)

    def _params(self) -> Params:
        layers = zip(self._base["layers"], self._factors, strict=True)
        return {**self._base, "layers": tuple(lora.combine_params(*layer) for layer in layers)}
