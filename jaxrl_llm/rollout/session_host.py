"""The interface between the engine loop and black-box agents, which ask for samples themselves.

An agent runs in a process of its own and sends requests to a session of the HTTP server of the run.
The loop never waits for an agent while others can be sampled: it collects events and delivers
tokens.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.rollout.engine.grammars import Grammar
from jaxrl_llm.rollout.engine.requests import Progress
from jaxrl_llm.types import EpisodeLog, Prompt

# Why a request of a session is refused: the prompt or a setting does not fit the engine, or the
# session has used up its tokens.
Refusal = Literal["unfit", "no_tokens_left"]


@dataclasses.dataclass(frozen=True)
class SessionRequest:
    """A request of an agent: a prompt and its samples. Temperature and filters are the run's."""

    number: int  # in its session, from 0
    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_top_log_probs: int = 0
    num_prompt_top: int | None = None  # as of an engine request
    grammar: str = ""  # that constrains the samples, in llguidance's JSON; "": none
    role: int = 0  # who asks, an index of `agent.roles`

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "SessionRequest":
        """A request from JSON, where tuples have become lists."""
        tuples = {name: tuple(fields[name]) for name in ("prompt", "stop_tokens", "stop_strings")}
        return cls(**{**fields, **tuples})


@dataclasses.dataclass(frozen=True)
class SessionEvent:
    """Something that happened in a session: exactly one of the other fields is set."""

    episode: int
    request: SessionRequest | None = None  # to be sampled
    cancelled: int | None = None  # number of a request whose client has gone
    log: EpisodeLog | None = None  # the agent has ended


class SessionWave(abc.ABC):
    """The sessions of one engine loop. In a run of several processes all get the same events."""

    @abc.abstractmethod
    def start(self, prompt: Prompt, episode: int) -> None:
        """Starts the agent of an episode; its number is unique in this wave."""

    @abc.abstractmethod
    def collect_events(self, wait: bool) -> Sequence[SessionEvent]:
        """The events since the last call, those of a session in order; `wait` blocks for one."""

    @abc.abstractmethod
    def deliver(self, episode: int, number: int, progress: Progress) -> None:
        """Passes tokens of a request on to its client; `progress.sample` counts in the request."""

    @abc.abstractmethod
    def refuse(self, episode: int, number: int, reason: Refusal, message: str) -> None:
        """Answers a request with an error."""

    @abc.abstractmethod
    def compile_grammar(self, text: str) -> Grammar:
        """The compiled grammar of a request."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all agents of the wave that still run."""


class SessionHost(abc.ABC):
    """Runs black-box agents and serves their requests."""

    @abc.abstractmethod
    def open_wave(self) -> SessionWave:
        """Begins a set of sessions with an engine loop of its own."""
