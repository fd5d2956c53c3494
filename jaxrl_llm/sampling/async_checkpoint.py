"""Groups in flight of an asynchronous run, and their form in a checkpoint."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.models.transformer import ROUTE_DTYPE
from jaxrl_llm.processes import messages
from jaxrl_llm.rollout import episode_runner
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.types import Prompt

# Key in a checkpoint -> field of a sequence, dtype.
_COLUMNS = {
    "tokens": ("tokens", np.int32),
    "chosen": ("sampled", np.bool_),
    "log_probs": ("log_probs", np.float32),
    "versions": ("versions", np.int32),
}


@dataclasses.dataclass
class PromptGroup:
    """A prompt and its samples, from their start until a step trains on them."""

    prompt: Prompt
    oldest_version: int  # weight version when it was started
    num_unfinished: int  # samples still being decoded
    checkpoint_text: str = ""  # cached checkpoint text, once all have ended


def to_text(
    number: int,
    group: PromptGroup,
    sequences: Sequence[tuple[episode_runner.EpisodeSequence, bool]],
) -> str:
    """Group `number` as JSON: its samples so far, and whether each has ended.

    Raises:
      TypeError: If its prompt holds a value that `processes.messages` cannot encode.
    """

    message = {
        "number": number,
        "oldest": group.oldest_version,
        "prompt": vars(group.prompt),
        "sequences": [
            {**sequence_fields(sequence), "ended": has_ended} for sequence, has_ended in sequences
        ],
    }
    return messages.to_json_text(message)


def from_text(
    text: str, samples: Sequence[SamplingParams]
) -> tuple[int, PromptGroup, list[tuple[episode_runner.EpisodeSequence, bool]]]:
    """The arguments of `to_text`; `samples` are the sampling parameters of each sample."""
    message = messages.from_json_text(text)
    number, prompt = message["number"], Prompt.from_fields(message["prompt"])
    sequences = []
    for i, (saved, params) in enumerate(zip(message["sequences"], samples, strict=True)):
        episode = number * len(samples) + i
        sequence = sequence_from_fields(saved, episode, prompt.tokens, params)
        sequences.append((sequence, saved["ended"]))
    num_left = sum(not has_ended for _, has_ended in sequences)
    return number, PromptGroup(prompt, message["oldest"], num_left), sequences


def sequence_fields(sequence: episode_runner.EpisodeSequence) -> dict[str, Any]:
    """A sequence as values of a message, without prompt, sampling parameters and images."""
    routes, support = sequence.routes, sequence.support
    return {
        **{
            key: np.array(getattr(sequence, field), dtype).tobytes()
            for key, (field, dtype) in _COLUMNS.items()
        },
        "key": np.asarray(sequence.key).tolist(),
        "stopped": sequence.stopped,
        "role": sequence.role,
        "num_routes": 0 if routes is None else routes.shape[1],
        "routes": b"" if routes is None else routes.astype(ROUTE_DTYPE).tobytes(),
        "max_support": 0 if support is None else support.shape[1],
        "support": b"" if support is None else support.astype(np.int32).tobytes(),
    }


def sequence_from_fields(
    saved: Mapping[str, Any], episode: int, prompt: tuple[int, ...], params: SamplingParams
) -> episode_runner.EpisodeSequence:
    """The sequence that `sequence_fields` saved."""
    columns = {
        field: np.frombuffer(saved[key], dtype).tolist() for key, (field, dtype) in _COLUMNS.items()
    }
    routes = None
    if saved["num_routes"]:
        routes = np.frombuffer(saved["routes"], ROUTE_DTYPE).reshape(-1, saved["num_routes"])
    support = None
    if size := saved.get("max_support", 0):  # checkpoints of earlier versions have none
        support = np.frombuffer(saved["support"], np.int32).reshape(-1, size)
    return episode_runner.EpisodeSequence(
        episode=episode,
        prompt=prompt,
        params=params,
        key=np.array(saved["key"], np.uint32),
        stopped=saved["stopped"],
        role=saved.get("role", 0),  # checkpoints of earlier versions have none
        routes=routes,
        support=support,
        **columns,
    )
