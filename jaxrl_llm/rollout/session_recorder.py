"""Joins the requests of a session into training sequences, by their token ids alone.

A session holds what one run of a black-box agent asks of the policy. A request whose prompt begins
with all tokens of a sequence continues it: the tokens in between were appended by the agent. Any
other request (a retry, an edited history, a sub-agent, a second call at the same time) begins a
branch, a sequence of its own. So each sampled token is in the response mask of exactly one
sequence, however often it occurs in later prompts.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.rollout.engine.requests import Completion, SamplingParams
from jaxrl_llm.rollout.episode_runner import EpisodeSequence


class SessionRecorder:
    """The sequences of one session, in the order of their last sampled turns.

    >>> recorder = SessionRecorder(0, np.zeros(2, np.uint32), SamplingParams(8))
    >>> turn = lambda *tokens: Completion(list(tokens), [0.0] * len(tokens), [0] * len(tokens))
    >>> recorder.record(recorder.open((1, 2)), (1, 2), turn(3))
    >>> recorder.record(recorder.open((1, 2, 3, 4)), (1, 2, 3, 4), turn(5))
    >>> recorder.record(recorder.open((1, 2)), (1, 2), turn(6))  # a retry
    >>> [(s.prompt, s.tokens, s.sampled) for s in recorder.sequences]
    [((1, 2), [3, 4, 5], [True, False, True]), ((1, 2), [6], [True])]
    """

    def __init__(self, episode: int, key: np.ndarray, params: SamplingParams):
        """`key` is the raw random key [2] of the episode, `params` those of its sample."""
        self._episode, self._key, self._params = episode, key, params
        self.sequences: list[EpisodeSequence] = []
        self._busy: list[EpisodeSequence] = []  # a request continues them
        self._num_equal_prompts: Counter[tuple[int, tuple[int, ...]]] = Counter()

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of all sequences."""
        return sum(sum(sequence.sampled) for sequence in self.sequences)

    def empty_sequence(self, prompt: tuple[int, ...], role: int = 0) -> EpisodeSequence:
        """A sequence without sampled tokens, for a session without any."""
        return EpisodeSequence(self._episode, prompt, self._params, self._key, role=role)

    def request_keys(self, prompt: tuple[int, ...], count: int, role: int = 0) -> np.ndarray:
        """Raw random keys [count, 2] for the samples of the session's next request.

        They follow from the episode's key, the role, the prompt and how often the session has sent
        this prompt before, not from the time or the order of requests: a repeated run of a
        deterministic agent draws the same samples, and a retry draws others.
        """
        occurrence = self._num_equal_prompts[role, prompt]
        self._num_equal_prompts[role, prompt] += 1
        return session_keys(self._key, prompt, occurrence, count, role)

    def open(self, prompt: tuple[int, ...], role: int = 0) -> EpisodeSequence | None:
        """Reserves the longest sequence that a prompt continues; None: it begins a branch.

        A sequence is of one role: no other role continues it.
        `record` or `release` ends the reservation.
        """
        candidates = [
            sequence
            for sequence in self.sequences
            if sequence.role == role
            and not any(sequence is busy for busy in self._busy)
            and _continues(prompt, sequence)
        ]
        if not candidates:
            return None
        sequence = max(candidates, key=lambda each: len(each.prompt) + len(each.tokens))
        self._busy.append(sequence)
        return sequence

    def release(self, sequence: EpisodeSequence | None) -> None:
        """Ends the reservation for a request of which nothing is recorded."""
        self._busy = [busy for busy in self._busy if busy is not sequence]

    def record(
        self,
        sequence: EpisodeSequence | None,
        prompt: tuple[int, ...],
        completion: Completion,
        last_turn: tuple[int, int] = (0, 0),
        role: int = 0,
    ) -> None:
        """Appends a sampled turn to the sequence that `open` reserved, or begins a branch.

        Args:
          last_turn: Request number of the engine and index of the sample in it.
        """
        if sequence is None:
            sequence = self.empty_sequence(prompt, role)
        else:
            self.release(sequence)
            sequence.append_reply(prompt[len(sequence.prompt) + len(sequence.tokens) :])
        sequence.append_turn(completion)
        sequence.last_turn = last_turn
        others = [other for other in self.sequences if other is not sequence]
        self.sequences = [*others, sequence]


def session_keys(
    episode_key: np.ndarray, prompt: Sequence[int], occurrence: int, count: int, role: int = 0
) -> np.ndarray:
    """Raw random keys [count, 2] of a request's samples; see `SessionRecorder.request_keys`."""
    # A negative number is no token: the first role has the keys of a run without roles.
    marks = [-role] if role else []
    numbers = [*np.asarray(episode_key).tolist(), occurrence, *marks, *prompt]
    content = np.asarray(numbers, "<i8").tobytes()
    digests = (
        hashlib.blake2b(content, digest_size=8, salt=index.to_bytes(8, "little")).digest()
        for index in range(count)
    )
    return np.stack([np.frombuffer(digest, "<u4") for digest in digests]).astype(np.uint32)


def _continues(prompt: tuple[int, ...], sequence: EpisodeSequence) -> bool:
    """Whether a prompt begins with all tokens of a sequence."""
    start, end = len(sequence.prompt), len(sequence.prompt) + len(sequence.tokens)
    return (
        len(prompt) >= end
        and prompt[:start] == sequence.prompt
        and list(prompt[start:end]) == sequence.tokens
    )
