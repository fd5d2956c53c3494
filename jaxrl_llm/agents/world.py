"""What answers the policy: the tools and environments of all episodes of a wave.

Every host takes in the same outcomes in the same order. Each asks the processes of its own part of
the episodes, and hears from the others what theirs said.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.agents.additions import Addition
from jaxrl_llm.agents.episode import NOTHING, Episode, Rules, Talk
from jaxrl_llm.agents.on_ray import pool_of
from jaxrl_llm.agents.pool import AgentError
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.data.pictures import Pictures
from jaxrl_llm.sharding import hosts
from jaxrl_llm.types import EpisodeLog, Prompt, PromptBatch

_PATIENCE_S = 3600.0  # calls have their own limits
_TOGETHER_S = 0.05  # that a host waits for its own processes before it hears of the others'


class World(contextlib.AbstractContextManager["World"]):
    """The other side of episodes; a context manager that ends its processes."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: PreTrainedTokenizerBase,
        pictures: Pictures | None = None,
    ):
        """Starts the processes; AgentError if a tool or an environment cannot be used.

        `pictures` reads the images that they give, if the run can.
        """
        self._config, self._tokenizer = config, tokenizer
        self._pool = pool_of(config)
        try:
            self._rules = Rules(config, tokenizer, self._pool.describe(), pictures)
            self._check()
        except BaseException:
            self._pool.__exit__()
            raise
        self._episodes: list[Episode] = []
        self._own = range(0)
        self._pending: dict[int, str] = {}  # what an episode waits for: opened, answered, rewarded
        self._talks: dict[int, Talk] = {}  # of own episodes
        self._outcomes: list[tuple[int, dict[str, Any]]] = []  # of own talks, not yet shared

    def __exit__(self, *exception) -> None:
        self._pool.__exit__()

    def _check(self) -> None:
        described = self._rules.schemas({})
        names = [schema["function"]["name"] for schema in described]
        for name in {name for name in names if names.count(name) > 1}:
            raise AgentError(f"config.agent: two tools are called {name!r}; rename one of them")
        template = str(self._tokenizer.chat_template or "")
        if described and "tools" not in template:
            logging.warning(
                "config.model.chat_template: the chat template does not show tools to the model;"
                " name a Jinja file that does, such as jaxrl_llm/agents/chatml_tools.jinja"
            )
        if described and not self._rules.call_format:
            raise AgentError(
                "config.agent.call_format: the chat template does not tell how calls are written;"
                " set it to a format, for example 'hermes'"
            )

    def options(self, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the chat template shows of a row's tools: `tools`, if it has any."""
        environment, _ = self._rules.tools_of(extra_info)
        if environment and environment not in self._config.environments:
            known = ", ".join((*self._config.environments, "tool_agent", "single_turn_agent"))
            raise AgentError(f"agent_name {environment!r} is no environment; known: {known}")
        schemas = self._rules.schemas(extra_info)
        return {"tools": schemas} if schemas else {}

    def begin(self, prompts: PromptBatch, num_samples: int) -> PromptBatch:
        """Begins episodes, prompt-major; returns the prompts with what environments begin with.

        AgentError if the samples of a prompt begin differently.
        """
        n = num_samples
        for number in self._own:  # of a wave that an error ended
            self._pool.end(number)
        self._pending, self._talks, self._outcomes = {}, {}, []
        self._episodes = [
            Episode(self._rules, prompt, p * n + i)
            for p, prompt in enumerate(prompts.prompts)
            for i in range(n)
        ]
        self._own = hosts.own_part(len(self._episodes))
        for episode in self._episodes:
            if episode.environment:
                self._talk(episode.number, "opened")
        while self._pending:
            self.answers(wait=True)
        groups = [self._episodes[i : i + n] for i in range(0, len(self._episodes), n)]
        opened = tuple(map(_common_prompt, groups))
        longest = max(prompts.longest, *(len(prompt.tokens) for prompt in opened))
        return PromptBatch(opened, longest)

    def take(self, number: int, tokens: list[int], stopped: bool) -> bool:
        """Takes in a turn of the policy; returns whether `answers` will tell what follows."""
        is_answered = self._episodes[number].take(tokens, stopped)
        if is_answered:
            self._talk(number, "answered")
        else:
            self._end(number)
        return is_answered

    def end(self, number: int) -> None:
        """Ends an episode that cannot go on: what follows does not fit."""
        self._episodes[number].log.errors["too_long"] += 1
        self._end(number)

    def answers(self, wait: bool) -> list[tuple[int, Addition]]:
        """Returns (episode, what follows its turn) as far as known; waits for one if asked to."""
        found: list[tuple[int, Addition]] = []
        while self._pending:
            for number, outcome in self._shared(wait):
                episode, kind = self._episodes[number], self._pending.pop(number)
                if kind == "opened":
                    episode.open(outcome)
                elif kind == "rewarded":
                    episode.finish(outcome)
                    self._pool.end(number)
                else:
                    following = episode.hear(outcome)
                    found.append((number, following))
                    if following == NOTHING:
                        self._end(number)
            if found or not wait or not self._pending:
                break
        return found

    def finish(self) -> list[EpisodeLog]:
        """Returns the log of each episode, when all are worth something."""
        while self._pending:
            self.answers(wait=True)
        return [episode.log for episode in self._episodes]

    def _end(self, number: int) -> None:
        episode = self._episodes[number]
        if episode.environment and not episode.is_lost:
            self._talk(number, "rewarded")
        elif number in self._own:
            self._pool.end(number)

    def _talk(self, number: int, kind: str) -> None:
        self._pending[number] = kind
        if number in self._own:
            episode = self._episodes[number]
            talks = {"opened": episode.opened, "answered": episode.answered}
            self._talks[number] = talks.get(kind, episode.rewarded)()
            self._go_on(number, None)

    def _go_on(self, number: int, answer: Any) -> None:
        try:
            request = self._talks[number].send(answer)
        except StopIteration as end:
            del self._talks[number]
            self._outcomes.append((number, end.value))
        else:
            self._pool.ask(number, self._episodes[number].beginning, request)

    def _shared(self, wait: bool) -> list[tuple[int, dict[str, Any]]]:
        """Returns the outcomes that are new on any host, in the order of the episodes."""
        several = jax.process_count() > 1
        new = functools.partial(self._new, wait, several)
        everyone = hosts.together(new) if several else [new()]
        found = [(number, outcome) for one in everyone for number, outcome in one]
        return sorted(found, key=lambda pair: pair[0])

    def _new(self, wait: bool, several: bool) -> list[tuple[int, dict[str, Any]]]:
        """Returns the outcomes of own episodes since the last call."""
        patience = (_TOGETHER_S if several else _PATIENCE_S) if wait else 0.0
        while True:
            for number, answer in self._pool.collect(0.0 if self._outcomes else patience):
                self._go_on(number, answer)
            if self._outcomes or not wait or several or not self._talks:
                break
        own, self._outcomes = self._outcomes, []
        return own


def _common_prompt(group: Sequence[Episode]) -> Prompt:
    """Returns the prompt of all samples of a row; where an environment failed, that of the others.

    AgentError if they begin differently.
    """
    alive = [episode for episode in group if not episode.is_lost] or group
    first = alive[0]
    if any(episode.prompt.tokens != first.prompt.tokens for episode in alive):
        raise AgentError(
            f"environment {first.environment!r}: its samples of row {first.prompt.index} begin"
            " differently, but they are compared with each other; let what it begins with follow"
            " from the row alone"
        )
    return first.prompt
