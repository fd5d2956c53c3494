"""Ahead-of-time compilation of an engine's programs, without weights or a cache.

The compiled programs are those that later calls of the same jitted functions use. The functions
returned here are independent, so that they can run in threads.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import host_inputs
from jaxrl_llm.rollout.engine.compiled_programs import MOVES, EnginePrograms

CompileTask = Callable[[], None]

_MAX_DECODE_PROGRAMS = 8
_MAX_MULTI_TURN_PROGRAMS = 32  # multi-turn runs need nearly all of them


def compile_tasks(
    jitted: EnginePrograms,
    prompt_shapes: Sequence[host_inputs.RowShape],
    params: Params,
    filters: Sequence[bool],
    multi_turn: bool = False,
) -> dict[str, CompileTask]:
    """Compile functions of a run's programs, by name.

    Includes decoding only if there are few such programs: most runs need only some of many.

    Args:
      params: Rollout parameters; shapes, dtypes and shardings suffice.
      filters: The values of `SamplingParams.is_filtered`, each with its own programs.
      multi_turn: Also the programs for chunked prefill, for multi-turn runs.
    """
    tasks = prefill_compile_tasks(jitted, params, prompt_shapes, filters)
    decode_tasks = decode_compile_tasks(jitted, params, filters, multi_turn)
    return tasks | (
        decode_tasks
        if len(decode_tasks) <= (_MAX_MULTI_TURN_PROGRAMS if multi_turn else _MAX_DECODE_PROGRAMS)
        else {}
    )


def prefill_compile_tasks(
    jitted: EnginePrograms,
    params: Params,
    shapes: Sequence[host_inputs.RowShape],
    filters: Sequence[bool],
) -> dict[str, CompileTask]:
    """Compile functions of prefill and the inserts after it, by name."""

    def compile_shape(rows: int, width: int) -> None:
        with jax.set_mesh(jitted.mesh):
            empty_batch = host_inputs.empty_prompt_rows(rows, width, jitted.num_routes)
            program = jitted.prefill.lower(params, empty_batch)
            compiled = program.compile()
            prefix: Any = jax.tree.map(
                lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
                program.out_info,
                compiled.output_shardings,
            )
            for size, filtered in itertools.product(dict.fromkeys(jitted.insert_sizes), filters):
                no_samples = host_inputs.insert_args([], size, jitted.num_slots)
                count = jitted.num_writes(prefix, size)
                no_writes = host_inputs.page_writes([], count, jitted.pages.num_pages)
                state = jitted.abstract_state
                jitted.insert.lower(
                    state, prefix, no_samples, no_writes, filtered=filtered, num_top=0
                ).compile()

    return {
        f"prefill of {rows} x {width} tokens": functools.partial(compile_shape, rows, width)
        for rows, width in shapes
    }


def decode_compile_tasks(
    jitted: EnginePrograms, params: Params, filters: Sequence[bool], continues: bool
) -> dict[str, CompileTask]:
    """Compile functions of decoding and of moving samples between slots, by name.

    `multi_turn`: also those of chunked prefill.
    """
    state, num_slots = jitted.abstract_state, jitted.num_slots
    lowerings: dict[str, Callable[[], jax.stages.Lowered]] = {}
    for filtered in filters:
        suffix = ", filtered" if filtered else ""
        switches = {"filtered": filtered, "num_top": 0}
        for slots, window in itertools.product(jitted.slot_counts, jitted.windows):
            sizes = {"num_slots": slots, "window": window, **switches}
            table = jitted.pages.table([], num_slots)
            lowerings[f"decoding of {slots} slots x {window} tokens{suffix}"] = functools.partial(
                jitted.generate.lower, params, state, table, np.int32(0), **sizes
            )
        continuation_shapes = host_inputs.chunked_prefill_shapes(num_slots) if continues else []
        for (rows, width), window in itertools.product(continuation_shapes, jitted.read_windows):
            table = jitted.pages.table([], rows)
            no_tokens = host_inputs.chunked_prefill_inputs(
                [], [], rows, width, table, history_tokens=jitted.history_tokens
            )
            no_samples = host_inputs.insert_args([], rows, num_slots)
            name = f"reading {width} tokens after {window} in {rows} slots{suffix}"
            lowerings[name] = functools.partial(
                jitted.extend.lower, params, state, no_tokens, no_samples, window=window, **switches
            )
    no_slots = np.full(MOVES, num_slots, np.int32)
    lowerings["moving samples"] = functools.partial(jitted.move.lower, state, no_slots, no_slots)
    no_stale_slots = np.zeros(num_slots, bool)
    lowerings["freeing slots"] = functools.partial(jitted.release.lower, state, no_stale_slots)

    def compile_program(lower: Callable[[], jax.stages.Lowered]) -> None:
        with jax.set_mesh(jitted.mesh):
            lower().compile()

    return {name: functools.partial(compile_program, lower) for name, lower in lowerings.items()}
