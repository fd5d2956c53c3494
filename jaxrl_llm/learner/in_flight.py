"""Prompts that began and no step has learned from, and how a checkpoint holds them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.models.transformer import ROUTE_DTYPE
from jaxrl_llm.processes import messages
from jaxrl_llm.rollout import play
from jaxrl_llm.rollout.requests import SamplingParams
from jaxrl_llm.types import Prompt

_COLUMNS = {"tokens": np.int32, "chosen": np.bool_, "log_probs": np.float32, "versions": np.int32}


@dataclasses.dataclass
class Group:
    """A prompt and its samples, from their beginning until a step takes them."""

    prompt: Prompt
    oldest: int  # version of the weights when it began
    left: int  # samples that have not ended
    text: str = ""  # as it is saved, when all have ended


def as_text(number: int, group: Group, sequences: Sequence[tuple[play.Sequence, bool]]) -> str:
    """Returns group `number` as JSON: its samples as far as they came, and whether each ended.

    Raises:
      TypeError: If its prompt holds what no message between processes can.
    """

    def of(sequence: play.Sequence, has_ended: bool) -> dict:
        routes = sequence.routes
        return {
            **{k: np.array(getattr(sequence, k), v).tobytes() for k, v in _COLUMNS.items()},
            "key": np.asarray(sequence.key).tolist(),
            "stopped": sequence.stopped,
            "ended": has_ended,
            "num_routes": 0 if routes is None else routes.shape[1],
            "routes": b"" if routes is None else routes.astype(ROUTE_DTYPE).tobytes(),
        }

    message = {
        "number": number,
        "oldest": group.oldest,
        "prompt": vars(group.prompt),
        "sequences": [of(*each) for each in sequences],
    }
    return messages.as_text(message)


def from_text(
    text: str, samples: Sequence[SamplingParams]
) -> tuple[int, Group, list[tuple[play.Sequence, bool]]]:
    """Returns what `as_text` was given; `samples` is how each sample of a prompt is drawn."""
    message = messages.from_text(text)
    number, prompt = message["number"], Prompt.of(message["prompt"])
    sequences = []
    for i, (saved, params) in enumerate(zip(message["sequences"], samples, strict=True)):
        columns = {k: np.frombuffer(saved[k], dtype).tolist() for k, dtype in _COLUMNS.items()}
        routes = None
        if saved["num_routes"]:
            routes = np.frombuffer(saved["routes"], ROUTE_DTYPE).reshape(-1, saved["num_routes"])
        sequence = play.Sequence(
            episode=number * len(samples) + i,
            prompt=prompt.tokens,
            params=params,
            key=np.array(saved["key"], np.uint32),
            stopped=saved["stopped"],
            routes=routes,
            **columns,
        )
        sequences.append((sequence, saved["ended"]))
    left = sum(not has_ended for _, has_ended in sequences)
    return number, Group(prompt, message["oldest"], left), sequences
