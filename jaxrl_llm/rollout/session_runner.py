"""Samples for the sessions of black-box agents: requests in, training sequences out.

The counterpart of `EpisodeRunner` for agents that keep the dialogue themselves. Episodes may start
at any time; running ones can be paused and resumed with other weights.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.requests import (
    Completion,
    EngineStatistics,
    Progress,
    Request,
    RequestError,
    SamplingParams,
)
from jaxrl_llm.rollout.engine_api import SamplingEngine, WeightsReceiver
from jaxrl_llm.rollout.episode_runner import EpisodeSequence
from jaxrl_llm.rollout.session_host import SessionHost, SessionRequest, SessionWave
from jaxrl_llm.rollout.session_recorder import SessionRecorder
from jaxrl_llm.types import EpisodeLog, Prompt, PromptBatch, Rollouts, Weights


@dataclasses.dataclass(eq=False)
class SessionSample:
    """One sample of a request: what is sampled so far, over all its engine requests."""

    episode: int
    request: SessionRequest
    index: int  # in the request
    key: np.ndarray
    params: SamplingParams
    continues: EpisodeSequence | None  # the sequence that the prompt continues
    # Sampled before the last pause, and by the current engine request, which lets the latter grow.
    earlier: Completion = dataclasses.field(default_factory=Completion)
    latest: Completion = dataclasses.field(default_factory=Completion)
    engine_sample: tuple[int, int] = (-1, -1)  # engine request, index in it
    num_reported: int = 0  # tokens of `latest` that were delivered

    @property
    def completion(self) -> Completion:
        """All that is sampled so far."""
        earlier, latest = self.earlier, self.latest
        support = [
            np.concatenate(part.support)[: len(part.tokens)]
            for part in (earlier, latest)
            if part.support
        ]
        return Completion(
            tokens=earlier.tokens + latest.tokens,
            log_probs=earlier.log_probs + latest.log_probs,
            versions=earlier.versions + latest.versions,
            top_log_probs=earlier.top_log_probs + latest.top_log_probs,
            support=support,
            finish_reason=latest.finish_reason,
            routes=latest.routes or earlier.routes,  # of an engine request: its prompt's too
        )

    def known_routes(self, num_tokens: int) -> np.ndarray | None:
        """Expert routes of the prompt and the tokens so far, [num_tokens, routes]; -1: unknown."""
        routes = None if self.continues is None else self.continues.routes_so_far()
        if self.earlier.routes:
            routes = np.concatenate(self.earlier.routes)[:num_tokens]
        if routes is None:
            return None
        return np.pad(routes, ((0, num_tokens - len(routes)), (0, 0)), constant_values=-1)


class SessionSnapshot(NamedTuple):
    """An episode in a checkpoint; without a log it has not ended, and begins anew."""

    key: np.ndarray  # raw random key
    sequences: list[EpisodeSequence]
    log: EpisodeLog | None


class SessionRunner:
    """Runs the sessions of a wave: while some agents think, the requests of others are sampled."""

    def __init__(
        self,
        engine: SamplingEngine,
        samples: Sequence[SamplingParams],
        wave: SessionWave,
        max_turn_tokens: int = 0,
    ):
        """
        Args:
          samples: Sampling parameters of each episode of a prompt; `max_tokens` bounds the sampled
            tokens of a session together. Parallel requests share what is left when they are sent.
          max_turn_tokens: Maximum tokens of one sample; 0: the limit of the session.
        """
        self._engine, self._samples, self._wave = engine, samples, wave
        self._max_turn_tokens = max_turn_tokens
        self._receiver = engine if isinstance(engine, WeightsReceiver) else None
        self._received: int | None = None  # version of the weights that it has
        self._recorders: dict[int, SessionRecorder] = {}  # of running episodes
        self._episode_params: dict[int, SamplingParams] = {}
        self._prompts: dict[int, Prompt] = {}  # of the rows of running episodes
        self._running: dict[tuple[int, int], SessionSample] = {}  # by engine request and index
        self._paused: list[SessionSample] = []
        self._retained: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.sequences: dict[int, list[EpisodeSequence]] = {}  # of ended episodes
        self.logs: dict[int, EpisodeLog] = {}  # of ended episodes
        self._keys: dict[int, np.ndarray] = {}  # of all episodes
        self._restored: list[tuple[int, Prompt]] = []  # to begin anew

    @property
    def is_running(self) -> bool:
        """Whether any agent has not ended."""
        return bool(self._recorders)

    def start(self, prompt: Prompt, number: int, keys: np.ndarray) -> None:
        """Starts the agents of a prompt's episodes, numbered from `number`; `keys` is [G, 2]."""
        for i, key in enumerate(keys):
            self._start_episode(prompt, number + i, key)

    def _start_episode(self, prompt: Prompt, episode: int, key: np.ndarray) -> None:
        params = self._samples[episode % len(self._samples)]
        self._keys[episode], self._prompts[episode] = key, prompt
        self._episode_params[episode] = params
        self._recorders[episode] = SessionRecorder(episode, key, params)
        self._wave.start(prompt, episode)

    def step(self, weights: Weights, *, wait: bool = True) -> list[int]:
        """Runs an engine chunk and handles the events of sessions; returns the episodes that ended.

        With `wait` it waits for an event if there is nothing to sample.
        """
        if self._running:
            if self._receiver is not None and self._received != weights.version:
                self._receiver.receive_weights(weights.params, weights.version)
                self._received = weights.version
            for progress in self._engine.step(weights.params, weights.version):
                if progress.error is not None:
                    raise progress.error
                self._handle_progress(progress)
        ended: list[int] = []
        if not self.is_running:
            return ended
        for event in self._wave.collect_events(wait and not self._running):
            if event.episode not in self._recorders:  # it has ended
                continue
            if event.request is not None:
                self._open_request(event.episode, event.request)
            elif event.cancelled is not None:
                self._abort_requests(event.episode, event.cancelled)
            elif event.log is not None:
                self._end_episode(event.episode, event.log)
                ended.append(event.episode)
        return ended

    def run(self, weights: Weights) -> Iterator[int]:
        """Runs all episodes with the same weights; yields their numbers as they end."""
        while self.is_running:
            yield from self.step(weights)

    def pause(self) -> list[int]:
        """Interrupts all sampling without losing a token, until `resume`; no episode ends by it."""
        for number in dict.fromkeys(number for number, _ in self._running):
            self._engine.abort(number)
        for sample in list(self._running.values()):
            self._deliver_unreported(sample)
            if sample.engine_sample in self._running:
                sample.earlier, sample.latest = sample.completion, Completion()
                sample.num_reported = 0
                self._paused.append(sample)
        self._running = {}
        return []

    def resume(self, *, restart: bool = False) -> None:
        """Resumes paused samples; the weights of the next step recompute their KV cache.

        Restored episodes that had not ended begin anew, with `restart` or without.
        """
        restored, self._restored = self._restored, []
        for episode, prompt in restored:
            self._start_episode(prompt, episode, self._keys[episode])
        paused, self._paused = self._paused, []
        for sample in paused:
            self._submit([sample])

    def snapshot(self, episode: int) -> SessionSnapshot:
        """An episode for a checkpoint."""
        sequences = self.sequences.get(episode, [])
        return SessionSnapshot(self._keys[episode], sequences, self.logs.get(episode))

    def restore(self, episode: int, prompt: Prompt, snapshot: SessionSnapshot) -> None:
        """Restores an episode of `snapshot`; `resume` starts it if it has not ended."""
        self._keys[episode] = snapshot.key
        if snapshot.log is None:
            self._restored.append((episode, prompt))
        else:
            self.sequences[episode], self.logs[episode] = snapshot.sequences, snapshot.log

    def take(self, episode: int) -> tuple[list[EpisodeSequence], EpisodeLog]:
        """Removes an ended episode; returns its sequences and its log."""
        del self._keys[episode]
        return self.sequences.pop(episode), self.logs.pop(episode)

    def _deliver_unreported(self, sample: SessionSample) -> None:
        """Handles tokens that the engine had sampled when it was interrupted, and not reported."""
        latest = sample.latest
        new = slice(sample.num_reported, len(latest.tokens))
        has_ended = latest.finish_reason in ("stop", "length")
        if latest.tokens[new] or has_ended:
            self._handle_progress(
                Progress(
                    *sample.engine_sample,
                    tokens=tuple(latest.tokens[new]),
                    log_probs=tuple(latest.log_probs[new]),
                    versions=tuple(latest.versions[new]),
                    top_log_probs=tuple(latest.top_log_probs[new]),
                    finish_reason=latest.finish_reason if has_ended else "",
                )
            )

    def _handle_progress(self, progress: Progress) -> None:
        sample = self._running.get((progress.request, progress.sample))
        if sample is None:
            return
        sample.num_reported += len(progress.tokens)
        if progress.finish_reason:
            del self._running[progress.request, progress.sample]
            self._recorders[sample.episode].record(
                sample.continues,
                sample.request.prompt,
                sample.completion,
                sample.engine_sample,
                sample.request.role,
            )
            self._retained[sample.episode].append(sample.engine_sample)
        number = sample.request.number
        self._wave.deliver(
            sample.episode, number, progress._replace(request=number, sample=sample.index)
        )

    def _open_request(self, episode: int, request: SessionRequest) -> None:
        recorder, limits = self._recorders[episode], self._episode_params[episode]
        keys = recorder.request_keys(request.prompt, request.num_samples, request.role)
        num_left = limits.max_tokens - recorder.num_sampled
        if num_left <= 0:
            self._wave.refuse(
                episode,
                request.number,
                "no_tokens_left",
                f"this session has sampled {recorder.num_sampled} tokens, and"
                f" rollout.max_response_tokens is {limits.max_tokens}; end it",
            )
            return
        room = self._engine.max_tokens - len(request.prompt)
        max_tokens = min(request.max_tokens, num_left, self._max_turn_tokens or num_left, room)
        params = dataclasses.replace(
            limits,
            max_tokens=max_tokens,
            stop_tokens=tuple(dict.fromkeys((*limits.stop_tokens, *request.stop_tokens))),
            stop_strings=tuple(dict.fromkeys((*limits.stop_strings, *request.stop_strings))),
            num_top_log_probs=request.num_top_log_probs,
        )
        sequence = recorder.open(request.prompt, request.role)
        samples = [
            SessionSample(episode, request, i, key, params, None if i else sequence)
            for i, key in enumerate(keys)
        ]
        try:
            self._submit(samples)
        except RequestError as error:
            recorder.release(sequence)
            self._wave.refuse(episode, request.number, "unfit", str(error))

    def _submit(self, samples: Sequence[SessionSample]) -> None:
        """Submits samples of one request with equal tokens so far as one engine request."""
        first, sequence = samples[0], samples[0].continues
        tokens = (*first.request.prompt, *first.earlier.tokens)
        num_partial = len(first.earlier.tokens)
        is_alone = len(samples) == 1
        params = dataclasses.replace(first.params, max_tokens=first.params.max_tokens - num_partial)
        grammar = first.request.grammar
        request = Request(
            tokens,
            np.stack([sample.key for sample in samples]),
            (params,) * len(samples),
            first.known_routes(len(tokens)) if self._engine.limits.num_routes else None,
            retains_pages=True,
            continues=sequence.last_turn if sequence is not None and is_alone else None,
            num_partial=num_partial,
            # reported with the first token, before which it may have been paused
            num_prompt_top=None if num_partial else first.request.num_prompt_top,
            grammar=self._wave.compile_grammar(grammar) if grammar else None,
        )
        number = self._engine.submit(request)
        completions = self._engine.completions(number)
        for index, (sample, latest) in enumerate(zip(samples, completions, strict=True)):
            sample.engine_sample, sample.latest = (number, index), latest
            self._running[number, index] = sample

    def _abort_requests(self, episode: int, number: int | None = None) -> None:
        """Drops the unfinished samples of an episode, or of one of its requests."""

        def is_dropped(sample: SessionSample) -> bool:
            return sample.episode == episode and number in (None, sample.request.number)

        dropped = [sample for sample in self._running.values() if is_dropped(sample)]
        for sample in dropped:
            del self._running[sample.engine_sample]
        still_used = {request for request, _ in self._running}
        for request in dict.fromkeys(sample.engine_sample[0] for sample in dropped):
            if request not in still_used:
                self._engine.abort(request)
        dropped += [sample for sample in self._paused if is_dropped(sample)]
        self._paused = [sample for sample in self._paused if not is_dropped(sample)]
        for sample in dropped:
            self._recorders[episode].release(sample.continues)

    def _end_episode(self, episode: int, log: EpisodeLog) -> None:
        self._abort_requests(episode)
        recorder, prompt = self._recorders.pop(episode), self._prompts.pop(episode)
        for engine_sample in self._retained.pop(episode, ()):
            self._engine.free(*engine_sample)
        roles = {sequence.role for sequence in recorder.sequences}
        log.num_branches = len(recorder.sequences) - len(roles)
        self.logs[episode] = log
        self.sequences[episode] = recorder.sequences or [recorder.empty_sequence(prompt.tokens)]
        del self._episode_params[episode]


def session_rollouts(
    engine: SamplingEngine,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    samples: Sequence[SamplingParams],
    key: jax.Array,
    host: SessionHost,
    max_turn_tokens: int = 0,
) -> tuple[Rollouts, EngineStatistics]:
    """Runs `len(samples)` black-box agents for every prompt; see `episodes.rollout`.

    An episode is as many sequences as its session has branches, those with the last turn last. An
    agent that ended before its first sample has one sequence without sampled tokens.
    """
    n = len(samples)
    keys = episodes.sample_keys(key, len(prompts.prompts) * n)
    wave = host.open_wave()
    try:
        runner = SessionRunner(engine, samples, wave, max_turn_tokens)
        with engine.session():
            for p, prompt in enumerate(prompts.prompts):
                runner.start(prompt, p * n, keys[p * n : (p + 1) * n])
            collections.deque(runner.run(weights), maxlen=0)
            statistics = engine.statistics
    finally:
        wave.close()
    numbers = range(len(prompts.prompts) * n)
    sequences = [sequence for number in numbers for sequence in runner.sequences[number]]
    logs = [runner.logs[number] for number in numbers]
    rollouts = episodes.to_rollouts(
        engine, tokenizer, prompts, n, sequences, logs, engine.max_tokens
    )
    return rollouts, statistics
