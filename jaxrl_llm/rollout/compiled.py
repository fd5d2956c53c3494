"""The programs of an engine, jitted: which arguments are static, donated, and how all is split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import prefixes, programs
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS
from jaxrl_llm.sharding import mesh as mesh_lib


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
    ):
        """See `engine.Engine`."""
        self._mesh = mesh
        self._max_tokens = max_tokens
        replicated = mesh_lib.replicated(mesh)
        ruled = functools.partial(mesh_lib.under, mesh_lib.ROLLOUT_ACTIVATIONS[layout])

        @ruled
        def empty():
            return programs.empty_state(
                network, num_slots, max_tokens, NUM_STOP_TOKENS, network.compute_dtype
            )

        with jax.set_mesh(mesh):
            self._state_shapes = jax.eval_shape(empty)
        # Left to the compiler, the state could come back split in another way than it went in,
        # and the next call would compile again.
        sharding = ruled(lambda a: mesh_lib.sharding_of(a.shape, _cache_axes(a.ndim), mesh))
        self.state_shardings = jax.tree.map(sharding, self._state_shapes)
        self.empty = jax.jit(empty, out_shardings=self.state_shardings)
        self.prefill = jax.jit(ruled(functools.partial(programs.prefill, network)))
        self.insert = jax.jit(
            ruled(programs.insert),
            static_argnames=("filtered", "num_top"),
            donate_argnums=0,
            out_shardings=(self.state_shardings, replicated),
        )
        self.generate = jax.jit(
            ruled(functools.partial(programs.generate, network, num_steps=chunk_steps)),
            static_argnames=("window", "filtered", "num_top"),
            donate_argnums=1,
            out_shardings=(self.state_shardings, replicated),
        )
        self.release = jax.jit(
            programs.release, donate_argnums=0, out_shardings=self.state_shardings
        )

    def count(self) -> int:
        """Returns how many programs were compiled so far."""
        jitted: tuple[Any, ...] = (
            self.empty,
            self.prefill,
            self.insert,
            self.generate,
            self.release,
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
        rows, width = prefixes.widest(num_prompts, prompt_tokens, self._max_tokens)
        tokens = self._abstract((rows, width), jnp.int32)
        return self.prefill.lower(params, tokens, self._abstract((rows,), jnp.int32))

    def lower_generate(self, params: Params) -> jax.stages.Lowered:
        """Returns the program of a decode chunk with the widest window."""
        return self.generate.lower(
            params,
            self.abstract_state(),
            self._abstract((), jnp.int32),
            window=self._max_tokens,
            filtered=False,
            num_top=0,
        )

    def _abstract(self, shape: tuple[int, ...], dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.replicated(self._mesh))


def _cache_axes(ndim: int) -> tuple[str | None, ...]:
    """Returns the dim names of a cache (4 dims) or of any other part of the decode state."""
    return ("batch", "kv_heads", None, None) if ndim == 4 else ("batch", *[None] * (ndim - 1))
