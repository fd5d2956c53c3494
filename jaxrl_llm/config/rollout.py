"""How responses are sampled, and settings of the engine that change only its speed."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import Group, Range, Tokens
from jaxrl_llm.errors import Problem

# The lowest temperature above 0 (greedy). Float32 logits have an error of about 2e-6. At a lower
# temperature this error would decide which token is sampled.
MIN_TEMPERATURE = 1e-4
Temperature = Annotated[float, Range(f"0 or [{MIN_TEMPERATURE}, 1000]", "0: greedy")]
Token = Annotated[int, Range("[0, 2147483647]")]  # and in the vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Group):
    """Speculative decoding: draft tokens from the sequence itself, checked in one pass.

    It is faster if responses repeat their prompts or themselves and few slots decode. The samples
    do not change.
    """

    draft_tokens: Annotated[int, Range("[0, 16]", "0: off")] = 0  # draft tokens per decode step
    # Maximum length of the suffix that is searched in the sequence.
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
    stop_tokens: tuple[Token, ...] = ()  # besides the tokenizer's end of sequence
    stop_strings: tuple[str, ...] = ()  # a response ends with the token that completes one
    # Sequences decoded at the same time; 0: chosen from the workload and the memory.
    num_slots: Annotated[int, Range("[0, 65536]", "0: chosen")] = 0
    # Decode steps between two checks by the host.
    chunk_steps: Annotated[int, Range("[1, 128]")] = 16
    dtype: Literal["compute", "float32", "bfloat16"] = "compute"
    speculation: SpeculationConfig = NO_SPECULATION

    def rules(self) -> Iterator[Problem]:
        for name in ("stop_tokens", "stop_strings"):
            if (count := len(getattr(self, name))) > 8:
                yield name, f"at most 8, got {count}"
        if "" in self.stop_strings:
            yield "stop_strings", "one is empty and would end every response; leave it out"


def chosen_slots(
    num_sequences: int,
    platform: str,
    num_devices: int,
    free_bytes: float,
    needed_bytes: Callable[[int], float],
) -> int:
    """Returns how many sequences are decoded at the same time if the config does not say.

    The sequences of a step, at most 64 on a CPU and 256 elsewhere (more do not decode faster). The
    number is halved until they need a quarter of the memory that is free on a device when the
    engine is made. The devices of a CPU count as 4 GiB together.
    """
    if platform == "cpu":
        free_bytes = (4 << 30) / num_devices
    slots = min(num_sequences, 64 if platform == "cpu" else 256)
    while slots > 1 and needed_bytes(slots) > 0.25 * free_bytes:
        slots = -(-slots // 2)
    return slots
