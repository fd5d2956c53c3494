"""The tools and environments of all episodes of a wave, on all hosts.

Each host asks the processes of its own share of the episodes and exchanges the outcomes with the
others, so that all hosts apply the same outcomes in the same order.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.agents.agent_pool import AgentError, make_agent_pool
from jaxrl_llm.agents.episode import EPISODE_END, Episode, EpisodeContext, PendingCall
from jaxrl_llm.agents.template_delta import TemplateDelta
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.data.images import ImagePreprocessor
from jaxrl_llm.sharding import multihost
from jaxrl_llm.types import EpisodeLog, Prompt, PromptBatch

_TIMEOUT_S = 3600.0  # calls have their own time limits
_EXCHANGE_S = 0.05  # wait for own processes before the exchange with other hosts


class EnvManager(contextlib.AbstractContextManager["EnvManager"]):
    """Runs the tools and environments of episodes; a context manager that ends their processes."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: ImagePreprocessor | None = None,
    ):
        """Starts the processes; AgentError if a tool or an environment cannot be used.

        `image_processor` reads the images that they return; None for a text-only run.
        """
        self._config, self._tokenizer = config, tokenizer
        self._pool = make_agent_pool(config)
        try:
            self._context = EpisodeContext(
                config, tokenizer, self._pool.describe(), image_processor
            )
            self._check_tools()
        except BaseException:
            self._pool.close()
            raise
        self._episodes: list[Episode] = []
        self._own_episodes = range(0)
        self._pending_kinds: dict[int, str] = {}  # "start", "step" or "reward", by episode
        self._pending_calls: dict[int, PendingCall] = {}  # of the episodes of this host
        self._new_outcomes: list[tuple[int, dict[str, Any]]] = []  # of those, not yet exchanged

    def __exit__(self, *exception) -> None:
        self._pool.close()

    def _check_tools(self) -> None:
        schemas = self._context.tool_schemas({})
        names = [schema["function"]["name"] for schema in schemas]
        for name in {name for name in names if names.count(name) > 1}:
            raise AgentError(f"config.agent: two tools are called {name!r}; rename one of them")
        chat_template = str(self._tokenizer.chat_template or "")
        if schemas and "tools" not in chat_template:
            logging.warning(
                "config.model.chat_template: the chat template does not show tools to the model;"
                " name a Jinja file that does, such as jaxrl_llm/agents/chatml_tools.jinja"
            )
        if schemas and not self._context.call_format:
            raise AgentError(
                "config.agent.call_format: the chat template has no known tool-call format; set"
                " one, for example 'hermes'"
            )

    def template_options(self, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        """The template variables of a row: `tools` with the schemas of its tools, if it has any."""
        environment, _ = self._context.environment_and_tools(extra_info)
        if environment and environment not in self._config.environments:
            names = ", ".join((*self._config.environments, "tool_agent", "single_turn_agent"))
            raise AgentError(f"agent_name {environment!r} is not an environment; known: {names}")
        schemas = self._context.tool_schemas(extra_info)
        return {"tools": schemas} if schemas else {}

    def begin(self, prompts: PromptBatch, num_samples: int) -> PromptBatch:
        """Starts episodes, prompt-major; returns the prompts with the environments' first messages.

        AgentError if the samples of a prompt begin differently.
        """
        for number in self._own_episodes:  # left over from a wave that ended with an error
            self._pool.end(number)
        self._pending_kinds, self._pending_calls, self._new_outcomes = {}, {}, []
        self._episodes = [
            Episode(self._context, prompt, p * num_samples + i)
            for p, prompt in enumerate(prompts.prompts)
            for i in range(num_samples)
        ]
        self._own_episodes = multihost.local_rows(len(self._episodes))
        for episode in self._episodes:
            if episode.environment:
                self._start_call(episode.number, "start")
        while self._pending_kinds:
            self.collect_replies(wait=True)
        groups = [
            self._episodes[i : i + num_samples] for i in range(0, len(self._episodes), num_samples)
        ]
        opened = tuple(map(_common_prompt, groups))
        longest = max(prompts.max_prompt_tokens, *(len(prompt.tokens) for prompt in opened))
        return PromptBatch(opened, longest)

    def submit_turn(self, number: int, tokens: list[int], stopped: bool) -> bool:
        """Submits a turn of the policy; returns whether `collect_replies` will return tokens after
        it.
        """
        is_answered = self._episodes[number].record_turn(tokens, stopped)
        if is_answered:
            self._start_call(number, "step")
        else:
            self._end_episode(number)
        return is_answered

    def end(self, number: int) -> None:
        """Ends an episode whose next tokens do not fit."""
        self._episodes[number].log.errors["too_long"] += 1
        self._end_episode(number)

    def collect_replies(self, wait: bool) -> list[tuple[int, TemplateDelta]]:
        """The available (episode, tokens after its turn); waits for at least one if `wait`."""
        following_tokens: list[tuple[int, TemplateDelta]] = []
        while self._pending_kinds:
            for number, outcome in self._exchange_outcomes(wait):
                episode, kind = self._episodes[number], self._pending_kinds.pop(number)
                if kind == "start":
                    episode.apply_start(outcome)
                elif kind == "reward":
                    episode.apply_reward(outcome)
                    self._pool.end(number)
                else:
                    following = episode.observe(outcome)
                    following_tokens.append((number, following))
                    if following == EPISODE_END:
                        self._end_episode(number)
            if following_tokens or not wait or not self._pending_kinds:
                break
        return following_tokens

    def finish(self) -> list[EpisodeLog]:
        """Waits for all rewards; returns the log of each episode."""
        while self._pending_kinds:
            self.collect_replies(wait=True)
        return [episode.log for episode in self._episodes]

    def _end_episode(self, number: int) -> None:
        episode = self._episodes[number]
        if episode.environment and not episode.is_lost:
            self._start_call(number, "reward")
        elif number in self._own_episodes:
            self._pool.end(number)

    def _start_call(self, number: int, kind: str) -> None:
        self._pending_kinds[number] = kind
        if number in self._own_episodes:
            episode = self._episodes[number]
            methods = {"start": episode.ask_start, "step": episode.ask_step}
            self._pending_calls[number] = methods.get(kind, episode.ask_reward)()
            self._advance(number, None)

    def _advance(self, number: int, answer: Any) -> None:
        try:
            request = self._pending_calls[number].send(answer)
        except StopIteration as end:
            del self._pending_calls[number]
            self._new_outcomes.append((number, end.value))
        else:
            self._pool.ask(number, self._episodes[number].start_request, request)

    def _exchange_outcomes(self, wait: bool) -> list[tuple[int, dict[str, Any]]]:
        """The new outcomes of all hosts, in the order of the episodes."""
        is_multihost = jax.process_count() > 1
        collect = functools.partial(self._collect_outcomes, wait, is_multihost)
        outcomes_by_host = multihost.run_on_all_hosts(collect) if is_multihost else [collect()]
        outcomes = [
            (number, outcome)
            for host_outcomes in outcomes_by_host
            for number, outcome in host_outcomes
        ]
        return sorted(outcomes, key=lambda pair: pair[0])

    def _collect_outcomes(self, wait: bool, is_multihost: bool) -> list[tuple[int, dict[str, Any]]]:
        """The new outcomes of this host's episodes."""
        timeout_s = (_EXCHANGE_S if is_multihost else _TIMEOUT_S) if wait else 0.0
        while True:
            for number, answer in self._pool.collect(0.0 if self._new_outcomes else timeout_s):
                self._advance(number, answer)
            if self._new_outcomes or not wait or is_multihost or not self._pending_calls:
                break
        outcomes, self._new_outcomes = self._new_outcomes, []
        return outcomes


def _common_prompt(group: Sequence[Episode]) -> Prompt:
    """The common prompt of all samples of a row, without those whose environment failed.

    AgentError if they begin differently.
    """
    running = [episode for episode in group if not episode.is_lost] or group
    first = running[0]
    if any(episode.prompt.tokens != first.prompt.tokens for episode in running):
        raise AgentError(
            f"environment {first.environment!r}: its samples of row {first.prompt.index} begin"
            " differently, but they are compared with each other; let what it begins with follow"
            " from the row alone"
        )
    return first.prompt
