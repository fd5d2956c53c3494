"""The programs of an engine, jitted: which arguments are static, donated, and how all is split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import cache, prefill, prefixes, programs
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS
from jaxrl_llm.sharding import mesh as mesh_lib

_WINDOW_STEP = 64  # windows closer together save less time than their programs cost


class Compiled:
    """One jitted function for each of `programs`; call them under `jax.set_mesh(mesh)`."""

    def __init__(
        self,
        network: Network,
        mesh: Mesh,
        *,
        num_slots: int,
        max_tokens: int,
        chunk_steps: int,
        layout: str,
        speculation: SpeculationConfig,
    ):
        """See `engine.Engine`."""
        self._mesh = mesh
        self._max_tokens = max_tokens
        replicated = mesh_lib.replicated(mesh)
        ruled = functools.partial(mesh_lib.under, mesh_lib.ROLLOUT_ACTIVATIONS[layout])
        self.windows = windows(max_tokens)
        # On a CPU reading part of an array copies it: blocks end where windows do.
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        blocks = np.diff(self.windows, prepend=0).tolist() if on_cpu else [max_tokens]

        @ruled
        def empty():
            return programs.empty_state(
                network,
                num_slots,
                blocks,
                NUM_STOP_TOKENS,
                network.compute_dtype,
                keeps_history=speculation.draft_tokens > 0,
            )

        with jax.set_mesh(mesh):
            self._state_shapes = jax.eval_shape(empty)
        # Left to the compiler, the state could come back split in another way than it went in,
        # and the next call would compile again.
        sharding = ruled(lambda a: mesh_lib.sharding_of(a.shape, _cache_axes(a.ndim), mesh))
        self.state_shardings = jax.tree.map(sharding, self._state_shapes)
        self.empty = jax.jit(empty, out_shardings=self.state_shardings)
        read = functools.partial(prefill.prefill, network, piece_tokens=prefill.PIECE_TOKENS)
        self.prefill = jax.jit(ruled(read))
        self.insert = jax.jit(
            ruled(programs.insert),
            static_argnames=("filtered", "num_top"),
            donate_argnums=0,
            out_shardings=(self.state_shardings, replicated),
        )
        decode = functools.partial(
            programs.generate,
            network,
            num_steps=chunk_steps,
            draft_tokens=speculation.draft_tokens,
            ngram_tokens=speculation.ngram_tokens,
            gather=on_cpu,
        )
        self.generate = jax.jit(
            ruled(decode),
            static_argnames=("num_slots", "window", "filtered", "num_top"),
            donate_argnums=1,
            out_shardings=(self.state_shardings, replicated),
        )
        in_place = functools.partial(jax.jit, donate_argnums=0, out_shardings=self.state_shardings)
        self.release = in_place(programs.release)
        self.move = in_place(programs.move)
        # Slots that are split over devices stay where they are: all of them decode, always.
        split = self.state_shardings.tokens.spec[0] is not None
        self.slot_counts = sizes(num_slots, 8) if not split else (num_slots,)

    def count(self) -> int:
        """Returns how many programs were compiled so far."""
        jitted: tuple[Any, ...] = (
            self.empty,
            self.prefill,
            self.insert,
            self.generate,
            self.release,
            self.move,
        )
        return sum(function._cache_size() for function in jitted)

    def abstract_state(self) -> programs.DecodeState:
        """Returns shapes and shardings of the decode state."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            self._state_shapes,
            self.state_shardings,
        )

    def lower_prefill(
        self, params: Params, num_prompts: int, prompt_tokens: int
    ) -> jax.stages.Lowered:
        """Returns the widest program that reads so many prompts of up to so many tokens.

        Args:
          params: Shapes and shardings of rollout parameters.
        """
        prompts = prefixes.widest(num_prompts, prompt_tokens, self._max_tokens)
        abstract = jax.tree.map(lambda a: self._abstract(a.shape, a.dtype), prompts)
        return self.prefill.lower(params, abstract)

    def lower_generate(self, params: Params, window: int = 0) -> jax.stages.Lowered:
        """Returns the program of a decode chunk of all slots.

        Args:
          params: Shapes and shardings of rollout parameters.
          window: One of `windows`; 0 is the widest.
        """
        with jax.set_mesh(self._mesh):
            return self.generate.lower(
                params,
                self.abstract_state(),
                self._abstract((), jnp.int32),
                num_slots=self._state_shapes.tokens.shape[0],
                window=window or self._max_tokens,
                filtered=False,
                num_top=0,
            )

    def _abstract(self, shape: tuple[int, ...], dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.replicated(self._mesh))


def sizes(largest: int, smallest: int) -> tuple[int, ...]:
    """Returns `largest` and its halves down to `smallest`, in rising order.

    >>> sizes(24, 5)
    (6, 12, 24)
    """
    found = [largest]
    while found[-1] % 2 == 0 and found[-1] // 2 >= smallest:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


def windows(max_tokens: int) -> tuple[int, ...]:
    """Returns how much of the cache a step may read: two sizes an octave, the last four octaves.

    >>> windows(1000)
    (64, 128, 192, 256, 384, 512, 768, 1000)
    """
    smallest = max(_WINDOW_STEP, bucket(max_tokens) // 16)
    octaves = [smallest << i for i in range(5)]
    between = [size * 3 // 2 for size in octaves if size >= 2 * _WINDOW_STEP]
    return (*(size for size in sorted([*octaves, *between]) if size < max_tokens), max_tokens)


def _cache_axes(ndim: int) -> tuple[str | None, ...]:
    """Returns the dim names of a cache (4 dims) or of any other part of the decode state."""
    return cache.AXES if ndim == 4 else ("batch", *[None] * (ndim - 1))
