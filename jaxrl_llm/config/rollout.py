"""How responses are sampled, and how the engine works where that changes speed alone."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import Group, Range, Text, Tokens
from jaxrl_llm.errors import Problem

# Of the temperatures above 0 (greedy). Float32 logits are right to about 2e-6: divided by less
# than this, that error alone would decide what is drawn and what training learns of it.
MIN_TEMPERATURE = 1e-4
Temperature = Annotated[float, Range(f"0 or [{MIN_TEMPERATURE}, 1000]", "0: greedy")]
StopString = Annotated[str, Text()]
Token = Annotated[int, Range("[0, 2147483647]")]  # and in the vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Group):
    """Tokens guessed from the sequence itself, and checked by one pass over all of them.

    It pays where responses repeat their prompts or themselves and few slots decode; the samples
    are the same.
    """

    draft_tokens: Annotated[int, Range("[0, 16]", "0: off")] = 0  # guesses in a decode step
    # Longest ending of a sequence that is looked for in it.
    ngram_tokens: Annotated[int, Range("[1, 16]")] = 3


NO_SPECULATION = SpeculationConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(Group):
    """How responses are sampled."""

    max_response_tokens: Tokens = 256
    temperature: Temperature = 1.0
    top_k: Annotated[int, Range("[0, 2147483647]", "0: off")] = 0
    top_p: Annotated[float, Range("(0, 1]")] = 1.0
    min_p: Annotated[float, Range("[0, 1)")] = 0.0
    stop_tokens: tuple[Token, ...] = ()  # beside the tokenizer's end of sequence
    stop_strings: tuple[StopString, ...] = ()  # a response ends with the token that completes one
    # At one time; chosen from the work and the memory.
    num_slots: Annotated[int, Range("[0, 65536]", "0: chosen")] = 0
    # Decode steps between two looks of the host.
    chunk_steps: Annotated[int, Range("[1, 128]")] = 16
    dtype: Literal["compute", "float32", "bfloat16"] = "compute"
    speculation: SpeculationConfig = NO_SPECULATION

    def rules(self) -> Iterator[Problem]:
        if len(self.stop_tokens) > 8:
            yield "stop_tokens", f"at most 8, got {len(self.stop_tokens)}"
        if len(self.stop_strings) > 8:
            yield "stop_strings", f"at most 8, got {len(self.stop_strings)}"
        if "" in self.stop_strings:
            yield "stop_strings", "one is empty and would end every response; leave it out"


def chosen_slots(
    num_sequences: int,
    platform: str,
    num_devices: int,
    free_bytes: float,
    needed_bytes: Callable[[int], float],
) -> int:
    """Returns how many sequences are decoded at one time where the config does not say.

    As many as a step has, up to 64 on a CPU and 256 elsewhere (more do not decode faster), halved
    until what they need on a device is a quarter of the memory that is free there when the engine
    is made. The devices of a CPU count as 4 GiB together.
    """
    if platform == "cpu":
        free_bytes = (4 << 30) / num_devices
    slots = min(num_sequences, 64 if platform == "cpu" else 256)
    while slots > 1 and needed_bytes(slots) > 0.25 * free_bytes:
        slots = -(-slots // 2)
    return slots
