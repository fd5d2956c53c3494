"""Groups of black-box agents in a checkpoint of an asynchronous run.

Ended episodes are saved whole. An agent that still runs cannot be saved, as its state is its own:
it begins anew when the run is resumed, with the random key of its episode.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.processes import messages
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.rollout.session_runner import SessionSnapshot
from jaxrl_llm.sampling.async_checkpoint import (
    PromptGroup,
    sequence_fields,
    sequence_from_fields,
)
from jaxrl_llm.types import EpisodeLog, Prompt


def to_text(number: int, group: PromptGroup, episodes: Sequence[SessionSnapshot]) -> str:
    """Group `number` as JSON: the sequences and logs of ended episodes, the keys of all.

    Raises:
      TypeError: If its prompt holds a value that `processes.messages` cannot encode.
    """
    message = {
        "number": number,
        "oldest": group.oldest_version,
        "prompt": vars(group.prompt),
        "episodes": [
            {
                "key": np.asarray(episode.key).tolist(),
                "log": None if episode.log is None else vars(episode.log),
                "sequences": [
                    {**sequence_fields(sequence), "prompt": sequence.prompt}
                    for sequence in episode.sequences
                ],
            }
            for episode in episodes
        ],
    }
    return messages.to_json_text(message)


def from_text(
    text: str, samples: Sequence[SamplingParams]
) -> tuple[int, PromptGroup, list[SessionSnapshot]]:
    """The arguments of `to_text`; `samples` are the sampling parameters of each episode."""
    message = messages.from_json_text(text)
    number, prompt = message["number"], Prompt.from_fields(message["prompt"])
    episodes = []
    for i, (saved, params) in enumerate(zip(message["episodes"], samples, strict=True)):
        sequences = [
            sequence_from_fields(each, number * len(samples) + i, tuple(each["prompt"]), params)
            for each in saved["sequences"]
        ]
        key = np.array(saved["key"], np.uint32)
        episodes.append(SessionSnapshot(key, sequences, log_from_fields(saved["log"])))
    num_left = sum(episode.log is None for episode in episodes)
    return number, PromptGroup(prompt, message["oldest"], num_left), episodes


def log_from_fields(fields: Mapping | None) -> EpisodeLog | None:
    """The log of an episode from JSON, where counters have become mappings."""
    if fields is None:
        return None
    counters = {name: collections.Counter(fields[name]) for name in ("calls", "errors")}
    names = {field.name for field in dataclasses.fields(EpisodeLog)}
    return EpisodeLog(**{name: fields[name] for name in names & {*fields}} | counters)
