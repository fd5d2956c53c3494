"""The programs of an engine, each with a call that does no work.

One list serves three users: a server calls the programs between requests, a run compiles them in
threads without weights or a cache, and a memory plan lowers the largest ones. Later calls of the
same jitted functions use what was compiled here.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import host_inputs
from jaxrl_llm.rollout.engine.compiled_programs import MOVES, EnginePrograms
from jaxrl_llm.rollout.engine.device_programs import DecodeState

CompileTask = Callable[[], None]

# Most runs need only some of many decode programs; multi-turn runs need nearly all of them.
_MAX_DECODE_PROGRAMS, _MAX_MULTI_TURN_PROGRAMS = 7, 31


class IdleCalls(NamedTuple):
    """Calls of jitted functions that change no slot; their results begin with the state.

    `execute(function, *args, **static)` calls, compiles or lowers; see `call` and `_compile`.
    """

    jitted: EnginePrograms
    execute: Callable[..., Any]
    num_support: int = 0  # `SamplingParams.support_tokens` of the run

    @property
    def _outputs(self) -> dict[str, int]:
        return {"num_top": 0, "num_support": self.num_support}

    def prefill(self, params: Params, rows: int, width: int, vector_size: int = 0) -> Any:
        """Prefills rows without prompts, with image inputs if `vector_size` > 0."""
        batch = host_inputs.empty_prompt_rows(rows, width, self.jitted.num_routes, vector_size)
        params = self.jitted.with_prompt_adapters(params, batch)
        return self.execute(self.jitted.prefill, params, batch)

    def prefill_and_insert(
        self, params: Params, state: DecodeState, *, rows: int, width: int, filters: Sequence[bool]
    ) -> Any:
        """Prefills, then inserts no sample of the result, in all sizes of an insert."""
        jitted, prefix = self.jitted, self.prefill(params, rows, width)
        for size, filtered in itertools.product(dict.fromkeys(jitted.insert_sizes), filters):
            samples = host_inputs.insert_args([], size, jitted.num_slots)
            num_writes = jitted.num_writes(prefix, size)
            inputs = samples, host_inputs.page_writes([], num_writes, jitted.pages.num_pages)
            state, _ = self.execute(
                jitted.insert, state, prefix, *inputs, filtered=filtered, **self._outputs
            )
        return state, prefix

    def generate(self, params: Params, state: DecodeState, **sizes: Any) -> Any:
        """Decodes no step: enough slots, 0, are free before the first."""
        table = self.jitted.pages.table([], self.jitted.num_slots)
        num_slots = sizes["num_slots"]
        return self.execute(
            self.jitted.generate,
            self.jitted.with_adapter_numbers(params, (), num_slots),
            state,
            table,
            np.int32(0),
            None,  # no adjustments of logits
            **self._outputs,
            **sizes,
        )

    def extend(
        self, params: Params, state: DecodeState, *, rows: int, width: int, **sizes: Any
    ) -> Any:
        """Chunked prefill without tokens."""
        jitted, history_tokens = self.jitted, self.jitted.history_tokens
        table, samples = (
            jitted.pages.table([], rows),
            host_inputs.insert_args([], rows, jitted.num_slots),
        )
        tokens = host_inputs.chunked_prefill_inputs(
            [], [], rows, width, table, history_tokens=history_tokens
        )
        params = jitted.with_adapter_numbers(params, (), rows)
        return self.execute(jitted.extend, params, state, tokens, samples, **self._outputs, **sizes)

    def move_and_release(self, params: Params, state: DecodeState) -> Any:
        """Moves no sample and frees no slot."""
        del params
        nowhere = np.full(MOVES, self.jitted.num_slots, np.int32)
        state = self.execute(self.jitted.move, state, nowhere, nowhere)
        return (self.execute(self.jitted.release, state, np.zeros(self.jitted.num_slots, bool)),)


class Program(NamedTuple):
    """An idle call of certain shapes."""

    name: str
    idle_call: Callable[[IdleCalls, Params, DecodeState], Any]
    order: tuple[int, ...] = ()  # the smallest first


def _prefill_programs(
    jitted: EnginePrograms, shapes: Iterable[host_inputs.RowShape], filters: Sequence[bool]
) -> list[Program]:
    return [
        Program(
            f"prefill of {rows} x {width} tokens{_suffix(all(filters))}",
            functools.partial(
                IdleCalls.prefill_and_insert, rows=rows, width=width, filters=filters
            ),
            (jitted.slot_counts[0], width, 0, rows),
        )
        for rows, width in shapes
    ]


def _decode_programs(jitted: EnginePrograms, filters: Sequence[bool]) -> list[Program]:
    return [
        Program(
            f"decoding of {slots} slots x {window} tokens{_suffix(filtered)}",
            functools.partial(
                IdleCalls.generate, num_slots=slots, window=window, filtered=filtered
            ),
            (slots, window, 1, 0),
        )
        for filtered in filters
        for slots, window in itertools.product(jitted.slot_counts, jitted.windows)
    ]


def _chunked_prefill_programs(jitted: EnginePrograms, filters: Sequence[bool]) -> list[Program]:
    shapes = jitted.extend_shapes
    return [
        Program(
            f"reading {width} tokens after {window} in {rows} slots{_suffix(filtered)}",
            functools.partial(
                IdleCalls.extend, rows=rows, width=width, window=window, filtered=filtered
            ),
            (jitted.slot_counts[0], window, 2, rows * width),
        )
        for filtered in filters
        for (rows, width), window in itertools.product(shapes, jitted.read_windows)
    ]


_MOVE_PROGRAM = Program("moving samples", IdleCalls.move_and_release)


def _suffix(filtered: bool) -> str:
    return ", filtered" if filtered else ""


def warmup_programs(
    jitted: EnginePrograms,
    num_prompts: int,
    prompt_tokens: int,
    filters: Sequence[bool] = (False,),
    continues: bool = False,
) -> list[Program]:
    """Warm-up programs of a server, the smallest first.

    Afterwards nothing compiles while up to `num_prompts` prompts of up to `prompt_tokens` are
    prefilled together, unless a request asks for top log-probs. `filters` are the values of
    `SamplingParams.is_filtered`, each with its own programs; `continues` adds those that read
    tokens after cached ones.
    """
    shapes = {
        shape
        for count in range(1, num_prompts + 1)
        for shape in host_inputs.all_prefill_shapes(count, prompt_tokens, jitted.max_tokens)
    }
    programs = [_MOVE_PROGRAM] if filters else []
    for each in ((filtered,) for filtered in filters):
        by_filter = _prefill_programs(jitted, shapes, each) + _decode_programs(jitted, each)
        if continues:
            by_filter += _chunked_prefill_programs(jitted, each)
        programs += sorted(by_filter, key=lambda program: program.order)
    return programs


def call(function: Any, *args: Any, **static: Any) -> Any:
    """Calls a jitted function."""
    return function(*args, **static)


def _compile(function: Any, *args: Any, **static: Any) -> Any:
    """Compiles a jitted function for these arguments; returns its outputs as shapes."""
    lowered = function.lower(*args, **static)
    compiled = lowered.compile()
    return jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        lowered.out_info,
        compiled.output_shardings,
    )


def compile_tasks(
    jitted: EnginePrograms,
    prompt_shapes: Sequence[host_inputs.RowShape],
    params: Params,
    filters: Sequence[bool],
    multi_turn: bool = False,
    support_tokens: int = 0,
) -> dict[str, CompileTask]:
    """Compile functions of a run's programs, by name; independent, so that threads can run them.

    Includes decoding only if there are few such programs.

    Args:
      params: Rollout parameters; shapes, dtypes and shardings suffice.
      filters: The values of `SamplingParams.is_filtered`, each with its own programs.
      multi_turn: Also the programs for chunked prefill, for multi-turn runs.
      support_tokens: `SamplingParams.support_tokens` of the run.
    """
    programs, max_programs = _decode_programs(jitted, filters), _MAX_DECODE_PROGRAMS
    if multi_turn:
        programs += _chunked_prefill_programs(jitted, filters)
        max_programs = _MAX_MULTI_TURN_PROGRAMS
    programs = [*programs, _MOVE_PROGRAM] if len(programs) <= max_programs else []

    def compile_program(program: Program) -> None:
        with jax.set_mesh(jitted.mesh):
            calls = IdleCalls(jitted, _compile, support_tokens)
            program.idle_call(calls, params, jitted.abstract_state)

    return {
        program.name: functools.partial(compile_program, program)
        for program in _prefill_programs(jitted, prompt_shapes, filters) + programs
    }


def lower_prefill(
    jitted: EnginePrograms,
    params: Params,
    num_prompts: int,
    prompt_tokens: int,
    vector_size: int = 0,
) -> jax.stages.Lowered:
    """Lowers the largest prefill program for such prompts; `params` may be abstract.

    With `vector_size`, the size of image embeddings, prompts have images.
    """
    shape = host_inputs.all_prefill_shapes(num_prompts, prompt_tokens, jitted.max_tokens)[-1]
    return IdleCalls(jitted, _lowering(jitted)).prefill(params, *shape, vector_size)


def lower_generate(jitted: EnginePrograms, params: Params, window: int = 0) -> jax.stages.Lowered:
    """Lowers the decode chunk of all slots; `window` 0 is the widest."""
    return IdleCalls(jitted, _lowering(jitted)).generate(
        params,
        jitted.abstract_state,
        num_slots=jitted.num_slots,
        window=window or jitted.max_tokens,
        filtered=False,
    )


def _lowering(jitted: EnginePrograms) -> Callable[..., jax.stages.Lowered]:
    """Lowers for devices that may be absent: arrays of the host become replicated shapes."""

    def abstract(array: Any) -> Any:
        is_host = isinstance(array, np.ndarray | np.number)
        return jitted.abstract(array) if is_host else array

    def lower(function: Any, *args: Any, **static: Any) -> jax.stages.Lowered:
        with jax.set_mesh(jitted.mesh):
            return function.lower(*jax.tree.map(abstract, args), **static)

    return lower
