"""The programs that requests will need, to be compiled before they come."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import admission, prefixes
from jaxrl_llm.rollout.compiled import Compiled
from jaxrl_llm.rollout.prefill import Prompts
from jaxrl_llm.rollout.programs import DecodeState

MOVES = 4  # samples moved by one call


@dataclasses.dataclass(frozen=True)
class Program:
    """A call that compiles, and changes nothing in any slot, whatever is decoded there."""

    name: str
    call: Callable[[Params, DecodeState], DecodeState]


def programs(
    compiled: Compiled,
    *,
    max_tokens: int,
    num_slots: int,
    insert_sizes: Sequence[int],
    num_prompts: int,
    prompt_tokens: int,
    filters: Sequence[bool],
) -> list[Program]:
    """Returns what requests without likeliest tokens need, what short and few ones need first.

    Args:
      compiled: Of an engine, with its `max_tokens`, `num_slots` and sizes of an insert.
      num_prompts: Most prompts that are read together.
      prompt_tokens: Of the longest prompt.
      filters: Whether samples are drawn with top_k, top_p or min_p; each case has programs of its
        own, and without any case there is nothing to compile.
    """
    batches = {
        prompts.tokens.shape: prompts
        for count in range(1, num_prompts + 1)
        for prompts in prefixes.batches(count, prompt_tokens, max_tokens)
    }
    found: list[tuple[Any, Program]] = []
    if filters:
        found.append(((), Program("moving samples", _move(compiled, num_slots))))
    for filtered in filters:
        switches = {"filtered": filtered, "num_top": 0}
        after = ", filtered" if filtered else ""
        for (rows, width), prompts in batches.items():
            name = f"prefill of {rows} x {width} tokens{after}"
            call = _prefill(compiled, prompts, insert_sizes, num_slots, switches)
            found.append(((filtered, compiled.slot_counts[0], width, 0, rows), Program(name, call)))
        for slots in compiled.slot_counts:
            for window in compiled.windows:
                name = f"decoding of {slots} slots x {window} tokens{after}"
                call = _generate(compiled, slots, window, switches)
                found.append(((filtered, slots, window, 1, 0), Program(name, call)))
    return [program for _, program in sorted(found, key=lambda entry: entry[0])]


def _move(compiled: Compiled, num_slots: int):
    nowhere = np.full(MOVES, num_slots, np.int32)

    def call(params: Params, state: DecodeState) -> DecodeState:
        return compiled.release(compiled.move(state, nowhere, nowhere), np.zeros(num_slots, bool))

    return call


def _prefill(compiled: Compiled, prompts: Prompts, sizes: Sequence[int], num_slots: int, switches):
    def call(params: Params, state: DecodeState) -> DecodeState:
        prefix = compiled.prefill(params, prompts)
        for size in dict.fromkeys(sizes):
            nobody = admission.lay_out([], [], [], size, num_slots)
            state, _ = compiled.insert(state, prefix, nobody, **switches)
        return state

    return call


def _generate(compiled: Compiled, slots: int, window: int, switches):
    def call(params: Params, state: DecodeState) -> DecodeState:
        free_target = np.int32(0)  # reached before the first step
        state, _ = compiled.generate(
            params, state, free_target, num_slots=slots, window=window, **switches
        )
        return state

    return call
