"""The programs of an engine, compiled without weights and without a cache, in threads if wanted.

What is compiled here is what later calls of the same jitted functions use.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import inputs
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.jitted import MOVES, Jitted

Compile = Callable[[], None]

_MOST_AHEAD = 8  # programs, and where turns follow, which need nearly all of them:
_MOST_OF_TURNS = 32


def ahead(
    engine: Engine, params: Params, filters: Sequence[bool], continues: bool = False
) -> dict[str, Compile]:
    """Returns by name what compiles the programs of a run.

    Those that decode are among them if they are few: most runs need only some of many.

    Args:
      params: Of the rollout; their shapes, dtypes and shardings suffice.
      filters: The values of `SamplingParams.is_filtered`, each with its own programs.
      continues: Also programs that read what follows a sample.
    """
    found = reading(engine.jitted, params, engine.prompt_shapes, filters)
    more = decoding(engine.jitted, params, filters, continues)
    return found | (more if len(more) <= (_MOST_OF_TURNS if continues else _MOST_AHEAD) else {})


def reading(
    jitted: Jitted, params: Params, shapes: Sequence[inputs.Shape], filters: Sequence[bool]
) -> dict[str, Compile]:
    """Returns by name what compiles the programs that read prompts and put samples into slots."""

    def make(rows: int, width: int) -> None:
        with jax.set_mesh(jitted.mesh):
            given = inputs.empty_rows(rows, width, jitted.num_routes)
            program = jitted.prefill.lower(params, given)
            compiled = program.compile()
            prefix: Any = jax.tree.map(
                lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
                program.out_info,
                compiled.output_shardings,
            )
            for size, filtered in itertools.product(dict.fromkeys(jitted.insert_sizes), filters):
                nobody = inputs.admission([], size, jitted.num_slots)
                count = jitted.num_writes(prefix, size)
                nothing = inputs.writes([], count, jitted.pages.num_pages)
                state = jitted.abstract_state
                of = state, prefix, nobody, nothing
                jitted.insert.lower(*of, filtered=filtered, num_top=0).compile()

    return {
        f"prefill of {rows} x {width} tokens": functools.partial(make, rows, width)
        for rows, width in shapes
    }


def decoding(
    jitted: Jitted, params: Params, filters: Sequence[bool], continues: bool
) -> dict[str, Compile]:
    """Returns by name what compiles the programs that decode, and move samples to other slots.

    `continues`: also those that read what follows a sample.
    """
    state, num_slots = jitted.abstract_state, jitted.num_slots
    found: dict[str, Callable[[], jax.stages.Lowered]] = {}
    for filtered in filters:
        after = ", filtered" if filtered else ""
        switches = {"filtered": filtered, "num_top": 0}
        for slots, window in itertools.product(jitted.slot_counts, jitted.windows):
            sizes = {"num_slots": slots, "window": window, **switches}
            table = jitted.pages.table([], num_slots)
            found[f"decoding of {slots} slots x {window} tokens{after}"] = functools.partial(
                jitted.generate.lower, params, state, table, np.int32(0), **sizes
            )
        kinds = inputs.continuation_sizes(num_slots) if continues else []
        for (rows, width), window in itertools.product(kinds, jitted.read_windows):
            table = jitted.pages.table([], rows)
            nothing = inputs.continuation(
                [], [], rows, width, table, history_tokens=jitted.history_tokens
            )
            nobody = inputs.admission([], rows, num_slots)
            name = f"reading {width} tokens after {window} in {rows} slots{after}"
            found[name] = functools.partial(
                jitted.extend.lower, params, state, nothing, nobody, window=window, **switches
            )
    nowhere = np.full(MOVES, num_slots, np.int32)
    found["moving samples"] = functools.partial(jitted.move.lower, state, nowhere, nowhere)
    stale = np.zeros(num_slots, bool)
    found["freeing slots"] = functools.partial(jitted.release.lower, state, stale)

    def make(lower: Callable[[], jax.stages.Lowered]) -> None:
        with jax.set_mesh(jitted.mesh):
            lower().compile()

    return {name: functools.partial(make, lower) for name, lower in found.items()}
