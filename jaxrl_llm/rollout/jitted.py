"""The programs of an engine, jitted: static and donated arguments, shardings, and the warm-up."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.room import cache_pages
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import attending, cache, inputs, prefill, programs
from jaxrl_llm.rollout.pages import Layout
from jaxrl_llm.rollout.programs import DecodeState
from jaxrl_llm.sharding import mesh as mesh_lib

MOVES = 4  # samples moved by one call
_WINDOW_STEP = 64  # windows closer together save less time than their programs cost


class Program(NamedTuple):
    """A call that compiles a program and changes no slot, whatever is decoded there."""

    name: str
    call: Callable[[Params, DecodeState], DecodeState]


class Jitted:
    """One jitted function for each of `programs`, called under the mesh; made as an `Engine` is."""

    def __init__(
        self,
        network: Network,
        mesh: Mesh,
        num_slots: int,
        max_tokens: int,
        chunk_steps: int,
        layout: str,
        speculation: SpeculationConfig,
        keeps_routes: bool,
        cache_tokens: int = 0,
    ):
        self.mesh, self.num_slots, self.max_tokens = mesh, num_slots, max_tokens
        self.ready: Callable[[], None] = lambda: None  # waits for programs that are compiled ahead
        self.num_routes = network.num_routes if keeps_routes else 0
        self._replicated = mesh_lib.replicated(mesh)
        ruled = mesh_lib.under(mesh_lib.ROLLOUT_ACTIVATIONS[layout])
        # Two sizes, so two programs: of a refill, and of the first fill.
        self.insert_sizes = (min(num_slots, max(8, num_slots // 8)), num_slots)
        device = mesh.devices.flat[0]
        reader = attending.reader_for(network, device)
        # Of what may be copied out of the pages: by chunks of decode steps, and by `extend`.
        self.windows = windows(max_tokens) if reader == "gather" else (max_tokens,)
        self.read_windows = (max_tokens,) if reader == "own" else windows(max_tokens)
        self.split = split = ruled(cache.split_of)(network.shape, num_slots, mesh)
        shards = cache.num_shards(mesh, split.slots)
        sizes = cache_pages(cache_tokens, device.platform, max_tokens, num_slots, shards)
        self.pages = Layout(*sizes, max_tokens, num_slots, shards)
        self.history_tokens = max_tokens if speculation.draft_tokens else 0

        @ruled
        def empty():
            given = num_slots, *sizes, self.history_tokens
            return programs.empty_state(network, *given, turned=reader not in ("gather", "own"))

        def sharding(a):
            dims = split.arrays if a.ndim == 4 else PartitionSpec(split.slots)
            return NamedSharding(mesh, dims)

        # The compiler could split the state that comes out in another way than the one that goes
        # in; then the next call would compile again.
        with jax.set_mesh(mesh):
            self.state_shardings = jax.tree.map(sharding, jax.eval_shape(empty))
            self.empty = jax.jit(empty, out_shardings=self.state_shardings)
            self.abstract_state = jax.eval_shape(self.empty)
        read = _bound(prefill.prefill, network, piece_tokens=prefill.PIECE_TOKENS)
        self.prefill = jax.jit(ruled(read))
        both = functools.partial(jax.jit, out_shardings=(self.state_shardings, self._replicated))
        switches = ("filtered", "num_top")
        insert = _bound(programs.insert, split=split)
        self.insert = both(ruled(insert), static_argnames=switches, donate_argnums=0)
        extend = _bound(
            programs.extend, network, split=split, reader=reader, keeps_routes=keeps_routes
        )
        self.extend = jax.jit(
            ruled(extend),
            out_shardings=(self.state_shardings, self._replicated, self._replicated),
            static_argnames=("window", *switches),
            donate_argnums=1,
        )
        decode = _bound(
            programs.generate,
            network,
            split=split,
            num_steps=chunk_steps,
            draft_tokens=speculation.draft_tokens,
            ngram_tokens=speculation.ngram_tokens,
            reader=reader,
            keeps_routes=keeps_routes,
        )
        statics = ("num_slots", "window", *switches)
        self.generate = both(ruled(decode), static_argnames=statics, donate_argnums=1)
        in_place = functools.partial(jax.jit, donate_argnums=0, out_shardings=self.state_shardings)
        self.release = in_place(programs.release)
        self.move = in_place(programs.move)
        # Slots that are split over devices stay where they are: all of them decode, always.
        self.slot_counts = (num_slots,) if split.slots else slot_counts(num_slots)

    def num_writes(self, prefix: prefill.Prefix, size: int) -> int:
        """Returns the pages that an insert of `size` samples writes: each prompt once, and ends."""
        return prefix.tokens.shape[0] // self.pages.page_tokens + size

    def lower_prefill(
        self, params: Params, num_prompts: int, prompt_tokens: int, vector_size: int = 0
    ) -> jax.stages.Lowered:
        """Returns the widest program that reads such prompts; `params` may be abstract.

        With a `vector_size`, that of images, prompts with images.
        """
        shape = inputs.row_shapes(num_prompts, prompt_tokens, self.max_tokens)[-1]
        rows = jax.tree.map(self.abstract, inputs.empty_rows(*shape, self.num_routes, vector_size))
        return self.prefill.lower(params, rows)

    def lower_generate(self, params: Params, window: int = 0) -> jax.stages.Lowered:
        """Returns the program of a decode chunk of all slots; `window` 0 is the widest."""
        with jax.set_mesh(self.mesh):
            return self.generate.lower(
                params,
                self.abstract_state,
                self.abstract(self.pages.table([], self.num_slots)),
                self.abstract(np.int32(0)),
                num_slots=self.num_slots,
                window=window or self.max_tokens,
                filtered=False,
                num_top=0,
            )

    def abstract(self, array: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape of an array that is whole on each device."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._replicated)

    def programs(
        self,
        num_prompts: int,
        prompt_tokens: int,
        filters: Sequence[bool] = (False,),
    ) -> list[Program]:
        """Returns what to compile ahead of requests, short and few ones first.

        Nothing compiles later while up to `num_prompts` prompts of up to `prompt_tokens` are read
        together, unless a request wants the likeliest tokens. `filters` are the values of
        `SamplingParams.is_filtered`, each with its own programs.
        """
        shapes = {
            shape
            for count in range(1, num_prompts + 1)
            for shape in inputs.row_shapes(count, prompt_tokens, self.max_tokens)
        }
        found: dict[tuple[int, ...], Program] = {}  # by their order
        for filtered in filters:
            after = ", filtered" if filtered else ""
            for rows, width in shapes:
                found[filtered, self.slot_counts[0], width, 0, rows] = Program(
                    f"prefill of {rows} x {width} tokens{after}",
                    functools.partial(self._insert_nothing, rows, width, filtered),
                )
            for slots, window in itertools.product(self.slot_counts, self.windows):
                found[filtered, slots, window, 1, 0] = Program(
                    f"decoding of {slots} slots x {window} tokens{after}",
                    functools.partial(self._generate_nothing, slots, window, filtered),
                )
        moving = [Program("moving samples", self._move_nothing)] if found else []
        return moving + [found[order] for order in sorted(found)]

    def _move_nothing(self, params: Params, state: DecodeState) -> DecodeState:
        nowhere = np.full(MOVES, self.num_slots, np.int32)
        return self.release(self.move(state, nowhere, nowhere), np.zeros(self.num_slots, bool))

    def _insert_nothing(
        self, rows: int, width: int, filtered: bool, params: Params, state: DecodeState
    ) -> DecodeState:
        prefix = self.prefill(params, inputs.empty_rows(rows, width, self.num_routes))
        for size in dict.fromkeys(self.insert_sizes):
            nobody = inputs.admission([], size, self.num_slots)
            nothing = inputs.writes([], self.num_writes(prefix, size), self.pages.num_pages)
            state, _ = self.insert(state, prefix, nobody, nothing, filtered=filtered, num_top=0)
        return state

    def _generate_nothing(
        self,
        num_slots: int,
        window: int,
        filtered: bool,
        params: Params,
        state: DecodeState,
    ) -> DecodeState:
        enough_free = np.int32(0)  # slots: reached before the first step
        table = self.pages.table([], self.num_slots)
        sizes = {"num_slots": num_slots, "window": window, "filtered": filtered, "num_top": 0}
        return self.generate(params, state, table, enough_free, **sizes)[0]


def slot_counts(num_slots: int) -> tuple[int, ...]:
    """Returns how many slots a program may decode.

    >>> slot_counts(48)
    (12, 24, 48)
    """
    halves = [num_slots >> i for i in reversed(range(16)) if num_slots % (1 << i) == 0]
    return tuple(n for n in halves if n >= 8 or n == num_slots)


def _bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Returns a partial function that has a name, which compilers and the console show."""
    made: Any = functools.partial(function, *args, **kwargs)
    made.__name__ = function.__name__
    return made


def windows(max_tokens: int) -> tuple[int, ...]:
    """Returns how much of the cache a step may read: two sizes an octave, the last four octaves.

    >>> windows(1000)
    (64, 128, 192, 256, 384, 512, 768, 1000)
    """
    smallest = max(_WINDOW_STEP, bucket(max_tokens) // 16)
    octaves = [smallest << i for i in range(5)]
    between = [size * 3 // 2 for size in octaves if size >= 2 * _WINDOW_STEP]
    return (*(size for size in sorted([*octaves, *between]) if size < max_tokens), max_tokens)
