"""Compiled programs of an engine: static and donated arguments, and shardings."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.kv_cache_sizing import cache_pages, page_tokens
from jaxrl_llm.models import lora
from jaxrl_llm.models.recurrent import checks as recurrent_checks
from jaxrl_llm.models.recurrent import sequence_memory
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.packing.packed_batch import bucket
from jaxrl_llm.rollout.engine import (
    decode_attention,
    decode_steps,
    device_programs,
    host_inputs,
    kv_cache,
    layer_states,
    masked_decoding,
    prefill,
)
from jaxrl_llm.rollout.engine.page_allocator import CacheLayout
from jaxrl_llm.rollout.engine.sample import Sample
from jaxrl_llm.sharding import mesh as mesh_lib

logger = logging.getLogger(__name__)

MOVES = 4  # samples moved by one call
_WINDOW_CACHE_NOTE = (
    "prefix caching is off: layers keep no more of a sequence than their attention windows, and"
    " those at the end of a prefix are not kept; rollout.window_cache='sequence' keeps all tokens"
)
_WINDOW_STEP = 64  # finer windows would save less time than their compilation costs


class EnginePrograms:
    """The jitted functions of an engine, called under the mesh; built as `Engine` is."""

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
        keeps_routes: bool,
        cache_tokens: int,
        prefix_caching: bool = False,
        window_cache: bool = False,
    ):
        self.mesh, self.num_slots, self.max_tokens = mesh, num_slots, max_tokens
        self.num_adapters = network.num_adapters
        # waits for programs compiled in the background
        self.wait_compiled: Callable[[], None] = lambda: None
        self.num_routes = network.num_routes if keeps_routes else 0
        has_state = sequence_memory.has_state(network.shape)
        device = mesh.devices.flat[0]
        page = page_tokens(device.platform)
        self.rings: tuple[int, ...] = ()
        if window_cache:
            self.rings = sequence_memory.layer_rings(network.shape, page, max_tokens)
        # Whether a sequence can go on from the pages of its tokens alone.
        self.pages_resume = not (has_state or self.rings)
        if prefix_caching and not self.pages_resume:
            note = recurrent_checks.PREFIX_CACHING_NOTE if has_state else _WINDOW_CACHE_NOTE
            logger.warning("%s", note)
        self.prefix_caching = prefix_caching and self.pages_resume and not self.num_routes
        self.extend_shapes = host_inputs.chunked_prefill_shapes(num_slots, self.prefix_caching)
        self._replicated = mesh_lib.replicated(mesh)
        with_rules = mesh_lib.axis_rules(mesh_lib.ROLLOUT_ACTIVATIONS[layout])
        # Two programs: one for refills, one for the first fill.
        self.insert_sizes = (min(num_slots, max(8, num_slots // 8)), num_slots)
        reader = decode_attention.cache_reader_for(network, device)
        # Cache windows that are copied out of the pages: for decode chunks, and for `extend`.
        self.windows = cache_windows(max_tokens) if reader == "gather" else (max_tokens,)
        self.read_windows = (max_tokens,) if reader == "own" else cache_windows(max_tokens)
        self.cache_sharding = split = with_rules(kv_cache.cache_sharding)(
            network.shape, num_slots, mesh
        )
        shards = kv_cache.num_shards(mesh, split.slot_axes)
        sizes = cache_pages(cache_tokens, device.platform, max_tokens, num_slots, shards)
        self.pages = CacheLayout(*sizes, max_tokens, num_slots, shards)
        self.history_tokens = max_tokens if speculation.draft_tokens else 0

        @with_rules
        def empty():
            return device_programs.empty_state(
                network,
                num_slots,
                *sizes,
                self.history_tokens,
                transposed_values=reader not in ("gather", "own"),
                rings=self.rings,
            )

        def sharding(a):
            dims = split.array_spec if a.ndim == 4 else PartitionSpec(split.slot_axes)
            return NamedSharding(mesh, dims)

        # Fixed output shardings: the compiler could otherwise shard the new state differently from
        # the old one, and the next call would compile again.
        with jax.set_mesh(mesh):
            self.state_shardings = dataclasses.replace(
                jax.tree.map(sharding, jax.eval_shape(empty)),
                layer_states=with_rules(layer_states.state_shardings)(
                    network.shape, num_slots, mesh
                ),
            )
            self.empty = jax.jit(empty, out_shardings=self.state_shardings)
            self.abstract_state = jax.eval_shape(self.empty)
        prefill_program = _network_partial(
            prefill.prefill, network, piece_tokens=prefill.PREFILL_CHUNK_TOKENS
        )
        self.prefill = jax.jit(with_rules(prefill_program), static_argnames="num_prompt_top")
        jit_with_outputs = functools.partial(
            jax.jit, out_shardings=(self.state_shardings, self._replicated)
        )
        switches = ("filtered", "num_top", "num_support")
        insert = _named_partial(device_programs.insert, split=split)
        self.insert = jit_with_outputs(
            with_rules(insert), static_argnames=switches, donate_argnums=0
        )
        extend = _network_partial(
            device_programs.extend, network, split=split, reader=reader, keeps_routes=keeps_routes
        )
        self.extend = jax.jit(
            with_rules(extend),
            out_shardings=(self.state_shardings, self._replicated, self._replicated),
            static_argnames=("window", *switches),
            donate_argnums=1,
        )
        decode = _network_partial(
            decode_steps.generate,
            network,
            split=split,
            num_steps=chunk_steps,
            draft_tokens=speculation.draft_tokens,
            ngram_tokens=speculation.ngram_tokens,
            reader=reader,
            keeps_routes=keeps_routes,
        )
        statics = ("num_slots", "window", *switches)
        self.generate = jit_with_outputs(
            with_rules(decode), static_argnames=statics, donate_argnums=1
        )
        self._jit_masked_decoding(
            network, split, with_rules, reader=reader, steps=chunk_steps, keeps_routes=keeps_routes
        )
        in_place = functools.partial(jax.jit, donate_argnums=0, out_shardings=self.state_shardings)
        self.release = in_place(device_programs.release)
        self.move = in_place(device_programs.move)
        # Slots split over devices cannot be compacted: all of them decode, always.
        self.slot_counts = (num_slots,) if split.slot_axes else slot_counts(num_slots)

    def _jit_masked_decoding(
        self,
        network: Network,
        split: kv_cache.CacheSharding,
        with_rules: Callable[[Any], Any],
        *,
        reader: decode_attention.CacheReader,
        steps: int,
        keeps_routes: bool,
    ) -> None:
        """The programs of `masked_decoding`; the slots and the buffer keep their shardings."""
        live = self.state_shardings.small
        entries = NamedSharding(self.mesh, split.array_spec)
        positions = NamedSharding(self.mesh, PartitionSpec(split.slot_axes))
        layers = len(self.state_shardings.cache.keys), len(self.state_shardings.cache.values)
        keys, values = ((entries,) * count for count in layers)
        states = self.state_shardings.layer_states
        recent: Any = kv_cache.WriteBuffer(keys, values, positions, states)  # type: ignore[arg-type]
        logits = with_rules(mesh_lib.activation_sharding)(
            (self.num_slots, network.shape.vocab_size), ("batch", "vocab"), self.mesh
        )
        begin = _named_partial(
            masked_decoding.begin, network, split=split, num_steps=steps, reader=reader
        )
        self.begin_masked = jax.jit(
            with_rules(begin),
            out_shardings=(None, live, recent),
            static_argnames=("num_slots", "window"),
        )
        forward = _network_partial(
            masked_decoding.forward,
            network,
            split=split,
            reader=reader,
            keeps_routes=keeps_routes,
        )
        self.forward_masked = jax.jit(
            with_rules(forward),
            out_shardings=(recent, logits, positions),
            static_argnames=("window",),
            donate_argnums=4,  # the buffer
        )
        self.sample_masked = jax.jit(
            with_rules(masked_decoding.sample),
            out_shardings=(live, self._replicated),
            static_argnames=("filtered", "num_top", "num_support"),
        )
        end = _named_partial(masked_decoding.end, split=split)
        self.end_masked = jax.jit(
            with_rules(end), out_shardings=self.state_shardings, donate_argnums=0
        )

    def with_adapter_numbers(
        self, params: Params, samples: Iterable[tuple[int, Sample]], num_rows: int
    ) -> Params:
        """`params` with the adapters of the tokens of a call, for programs of a network.

        `samples` are pairs of row and sample; the other rows have none.
        """
        if not self.num_adapters:
            return params
        numbers = np.zeros((num_rows, 1), np.int32)
        for row, sample in samples:
            numbers[row] = sample.adapter_number
        return lora.with_adapter_index(params, numbers)

    def with_prompt_adapters(
        self, params: Params, prompts: prefill.Prompts, numbers: Sequence[int] = ()
    ) -> Params:
        """`params` for a prefill; `numbers` are the adapters of its first prompts."""
        if not self.num_adapters:
            return params
        rows, width = prompts.tokens.shape
        index = np.zeros((rows, width), np.int32)
        spans = zip(np.asarray(prompts.starts), np.asarray(prompts.lengths), numbers, strict=False)
        for start, length, number in spans:
            index.reshape(-1)[start : start + length] = number
        if width > prefill.PREFILL_CHUNK_TOKENS:  # read in pieces; a row holds one prompt
            index = index[:, :1]
        return lora.with_adapter_index(params, index)

    def prefill_prompts(
        self, params: Params, prompts: prefill.Prompts, adapters: Sequence[int], **static: Any
    ) -> prefill.Prefix:
        """Prefills prompts with the adapters of these numbers; 0: none."""
        return self.prefill(self.with_prompt_adapters(params, prompts, adapters), prompts, **static)

    def num_writes(self, prefix: prefill.Prefix, size: int) -> int:
        """Number of pages written by an insert of `size` samples: prompts once, plus their ends."""
        return prefix.tokens.shape[0] // self.pages.page_tokens + size

    def abstract(self, array: Any) -> jax.ShapeDtypeStruct:
        """Shape and replicated sharding of an array."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._replicated)


def slot_counts(num_slots: int) -> tuple[int, ...]:
    """Numbers of slots for which decode programs exist.

    >>> slot_counts(48)
    (12, 24, 48)
    """
    halves = [num_slots >> i for i in reversed(range(16)) if num_slots % (1 << i) == 0]
    return tuple(n for n in halves if n >= 8 or n == num_slots)


def _named_partial(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """A partial function with a name, which compilers and the console show."""
    partial: Any = functools.partial(function, *args, **kwargs)
    partial.__name__ = function.__name__
    return partial


def _network_partial(
    function: Callable[..., Any], network: Network, **kwargs: Any
) -> Callable[..., Any]:
    """A program of a network, whose first argument is `EnginePrograms.with_adapter_numbers`."""
    partial = _named_partial(function, network, **kwargs)
    if not network.num_adapters:
        return partial

    def program(params, *args, **static):
        return partial(lora.assign_adapters(params), *args, **static)

    program.__name__ = function.__name__
    return program


def cache_windows(max_tokens: int) -> tuple[int, ...]:
    """Cache windows that a decode step may read: two sizes an octave, over four octaves.

    >>> cache_windows(1000)
    (64, 128, 192, 256, 384, 512, 768, 1000)
    """
    smallest = max(_WINDOW_STEP, bucket(max_tokens) // 16)
    octaves = [smallest << i for i in range(5)]
    between = [size * 3 // 2 for size in octaves if size >= 2 * _WINDOW_STEP]
    return (*(size for size in sorted([*octaves, *between]) if size < max_tokens), max_tokens)
