"""Black-box agents of all episodes, on all hosts: their processes, and their sessions.

Each host runs the agents of its own share of the episodes and serves their sessions. What happens
in them is exchanged between hosts, so that all engines get the same requests in the same order.
"""

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from jaxrl_llm.agents.agent_pool import AgentError, make_agent_pool
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.processes.worker_pool import Answer
from jaxrl_llm.rollout.engine.grammars import Grammar
from jaxrl_llm.rollout.engine.requests import Progress
from jaxrl_llm.rollout.session_host import (
    Refusal,
    SessionEvent,
    SessionHost,
    SessionRequest,
    SessionWave,
)
from jaxrl_llm.sampling import session_checkpoint
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.sessions.session import Session
from jaxrl_llm.serving.sessions.session_server import SessionServer
from jaxrl_llm.sharding import multihost
from jaxrl_llm.types import EpisodeLog, Prompt

HARNESS = "harness"  # `EpisodeLog.environment` of an episode whose harness gave the reward
# Kinds of errors in `EpisodeLog.errors`.
ERROR_KINDS = (
    *("harness_exception", "harness_timeout", "harness_ended"),  # the harness failed
    *("too_many_requests", "no_tokens_left", "cancelled", "refused"),  # of its requests
)
_EXCHANGE_S = 0.05  # wait for own events before the exchange with other hosts
_POLL_S = 0.003  # between two looks at the processes while nothing is sampled
_MAX_WARNINGS = 8  # of a wave


class HarnessManager(SessionHost, contextlib.AbstractContextManager["HarnessManager"]):
    """Runs the harness of a run; a context manager that ends its processes and its server."""

    def __init__(
        self, config: AgentConfig, served: ServedModel, judged_sources: Collection[str] = ()
    ):
        """Starts server and processes; AgentError if the harness cannot be used.

        Args:
          served: The policy. Its tokenizer is copied: other threads use it.
          judged_sources: Data sources of rows with reward functions or models; "*": all.
        """
        self._judged_sources = judged_sources
        tokenizer = copy.deepcopy(served.tokenizer)
        if backend := getattr(tokenizer, "backend_tokenizer", None):
            # Set once: changing it between two calls would block another thread's decoding.
            backend.no_truncation()
            backend.no_padding()
        self._served = dataclasses.replace(served, tokenizer=tokenizer)
        self._config = config
        with contextlib.ExitStack() as stack:
            self._pool = make_agent_pool(config)
            stack.callback(self._pool.close)
            self._server = stack.enter_context(
                SessionServer(
                    self._served, config.max_requests, config.harness_timeout_s, config.roles
                )
            )
            self._stack = stack.pop_all()
        self._num_sessions = 0
        self._waves: dict[int, HarnessWave] = {}  # by session of the pool

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def compile_grammar(self, text: str) -> Grammar:
        """The compiled grammar of a request; its server has compiled it, and kept it."""
        return self._served.grammars.compile_text(text)

    def template_options(self, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        """The template variables of a row: none, the harness has its own tools."""
        return {}

    def open_wave(self) -> "HarnessWave":
        """Begins a set of sessions."""
        self._server.forget_sessions()
        return HarnessWave(self)

    # For waves, in the main thread.

    def start_agent(self, wave: "HarnessWave", prompt: Prompt, episode: int) -> "_Agent":
        """Opens the session of an episode and starts the harness on it."""
        self._num_sessions += 1
        number = self._num_sessions
        session, base_url = self._server.open_session(episode, wave.push)
        self._waves[number] = wave
        start = {"do": "start", "environment": "", "names": (), "kwargs": {}, "row": {}}
        row = harness_row(prompt)
        request = {"do": "solve", "row": row, "base_url": base_url}
        self._pool.ask(number, {**start, "seed": prompt.index}, request)
        return _Agent(number, episode, prompt, session, base_url)

    def end_agent(self, agent: "_Agent") -> None:
        """Ends an agent and its session."""
        self._server.close_session(agent.base_url)
        if self._waves.pop(agent.number, None):
            self._pool.end(agent.number)

    def poll(self) -> None:
        """Passes the answers of agents that have ended to their waves."""
        if not self._waves:
            return
        for number, answer in self._pool.collect(0.0):
            if wave := self._waves.get(number):
                wave.finish_agent(number, answer)

    def episode_log(self, agent: "_Agent", answer: Answer) -> EpisodeLog:
        """The log of an agent that has ended with this answer.

        AgentError if it gave no reward, and no reward function applies to its row.
        """
        session, problem = agent.session, answer.get("problem", "")
        reward = self._config.failure_reward if problem else answer["reward"]
        if reward is None and not {"*", agent.prompt.data_source} & {*self._judged_sources}:
            raise AgentError(
                f"config.agent.harness: {self._config.harness!r} returned no reward for row"
                f" {agent.prompt.index} ({agent.prompt.data_source!r}), and no reward function"
                " applies to it; return a number, or add one to config.rewards.functions"
            )
        log = EpisodeLog(
            messages=list(session.dialogue()),
            environment="" if reward is None else HARNESS,
            num_turns=session.num_replies,
            reward=0.0 if isinstance(reward, Mapping) else float(reward or 0.0),
            role_rewards=self._role_rewards(reward),
            errors=session.errors,
            seconds=float(answer.get("seconds", 0.0)),
            num_rewritten=session.num_rewritten,
            num_unmatched=session.num_unmatched,
            num_requests=session.num_requests,
        )
        log.errors.update({f"harness_{problem}": 1} if problem else {})
        return log

    def _role_rewards(self, reward: float | Mapping[str, float] | None) -> list[float]:
        """The reward of each role, the same for all if the harness gave one number; [] without."""
        if isinstance(reward, Mapping):
            return [float(reward[role]) for role in self._config.roles]
        return [float(reward or 0.0)] * len(self._config.roles)


@dataclasses.dataclass(frozen=True)
class _Agent:
    """A running harness."""

    number: int  # session of the pool
    episode: int
    prompt: Prompt
    session: Session
    base_url: str


class HarnessWave(SessionWave):
    """The agents of one engine loop."""

    def __init__(self, manager: HarnessManager):
        self._manager = manager
        self._agents: dict[int, _Agent] = {}  # of this host, by episode
        self._episodes: dict[int, int] = {}  # by session of the pool
        self._running: set[int] = set()  # episodes of all hosts
        self._inbox: list[SessionEvent] = []
        self._has_events = threading.Condition()
        self._num_warnings = 0

    def start(self, prompt: Prompt, episode: int) -> None:
        self._running.add(episode)
        if episode % jax.process_count() == jax.process_index():
            agent = self._manager.start_agent(self, prompt, episode)
            self._agents[episode], self._episodes[agent.number] = agent, episode

    def collect_events(self, wait: bool) -> Sequence[SessionEvent]:
        if jax.process_count() == 1:
            events = self._own_events(float("inf") if wait else 0.0)
        else:
            collect = functools.partial(self._own_fields, _EXCHANGE_S if wait else 0.0)
            gathered = multihost.run_on_all_hosts(collect)
            events = [_event_from_fields(fields) for host in gathered for fields in host]
        self._running -= {event.episode for event in events if event.log is not None}
        return sorted(events, key=lambda event: event.episode)

    def deliver(self, episode: int, number: int, progress: Progress) -> None:
        if agent := self._agents.get(episode):
            agent.session.deliver(number, progress)

    def refuse(self, episode: int, number: int, reason: Refusal, message: str) -> None:
        if agent := self._agents.get(episode):
            kind = "refused" if reason == "unfit" else reason
            agent.session.refuse(number, kind, "unfit", message)

    def compile_grammar(self, text: str) -> Grammar:
        return self._manager.compile_grammar(text)

    def close(self) -> None:
        for agent in self._agents.values():
            self._manager.end_agent(agent)
        self._agents, self._episodes, self._running = {}, {}, set()

    def push(self, event: SessionEvent) -> None:
        """Adds an event; called by any thread."""
        with self._has_events:
            self._inbox.append(event)
            self._has_events.notify()

    def finish_agent(self, number: int, answer: Answer) -> None:
        """Ends the session of an agent whose process has answered."""
        agent = self._agents.pop(self._episodes.pop(number))
        if problem := answer.get("problem"):
            self._warn(agent, f"{problem}: {answer.get('text', '')}")
        self._manager.end_agent(agent)
        log = self._manager.episode_log(agent, answer)
        self.push(SessionEvent(agent.episode, log=log))

    def _warn(self, agent: _Agent, text: str) -> None:
        self._num_warnings += 1
        if self._num_warnings <= _MAX_WARNINGS:
            more = "; no more warnings in this step" if self._num_warnings == _MAX_WARNINGS else ""
            logging.warning("the harness failed on row %d: %s%s", agent.prompt.index, text, more)

    def _own_events(self, timeout_s: float) -> list[SessionEvent]:
        """The new events of this host's sessions; waits for one while agents run."""
        waited_s = 0.0
        while True:
            self._manager.poll()
            with self._has_events:
                if not self._inbox and self._agents and waited_s < timeout_s:
                    self._has_events.wait(_POLL_S)
                    waited_s += _POLL_S
                    continue
                events, self._inbox = self._inbox, []
                return events

    def _own_fields(self, timeout_s: float) -> list[dict[str, Any]]:
        return [_event_fields(event) for event in self._own_events(timeout_s)]


def harness_row(prompt: Prompt) -> dict[str, Any]:
    """The row of a harness: the columns of `extra_info`, and those of the dataset."""
    return {
        **prompt.extra_info,
        "prompt": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
    }


def _event_fields(event: SessionEvent) -> dict[str, Any]:
    """An event as JSON."""
    fields: dict[str, Any] = {"episode": event.episode, "cancelled": event.cancelled}
    fields["request"] = event.request and dataclasses.asdict(event.request)
    return {**fields, "log": event.log and vars(event.log)}


def _event_from_fields(fields: Mapping[str, Any]) -> SessionEvent:
    request, log = fields["request"], fields["log"]
    log = session_checkpoint.log_from_fields(log)
    request = request and SessionRequest.from_fields(request)
    return SessionEvent(fields["episode"], request, fields["cancelled"], log)
