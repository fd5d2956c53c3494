"""What travels between the phases of a step.

`PromptBatch -> Rollouts -> Rewards -> Predictions -> Estimates -> Minibatch`. Index `t` of every
[B, T] array is about `tokens[:, t]`: its log-prob, the value just before it, the reward for it. No
field is optional: without a model `values` are zero, `ref_log_probs` are `old_log_probs`, `costs`
are zero.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image in a sequence, as its file came."""

    contents: bytes
    digest: str  # of these
    grid: tuple[int, int]  # rows and columns of the vectors that stand for it, one token each
    start: int = 0  # its first token in the sequence

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row of a dataset, ready to be answered."""

    tokens: tuple[int, ...]  # chat template applied
    text: str  # the same as text, for dumps and reward models
    data_source: str  # selects reward terms and groups the evaluation
    ground_truth: Any  # handed to reward functions as it came
    extra_info: Mapping[str, Any]
    index: int  # row of the dataset
    # What `text` was made of, where episodes go on after an answer: the dialogue, and `tools` and
    # other variables of the template.
    messages: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    images: tuple[Picture, ...] = ()  # in the order of their tokens
    where: str = ""  # `FILE, row N`, for messages; "": of no file

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Prompt":
        """Returns the prompt with these fields, of which a text has made lists of tuples."""
        tuples = {name: tuple(fields[name]) for name in ("tokens", "messages", "images")}
        return cls(**{**fields, **tuples})


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """The prompts of one wave."""

    prompts: tuple[Prompt, ...]  # P of them
    longest: int = 0  # tokens of the longest prompt of any wave; 0: not known


class Example(NamedTuple):
    """A sequence to learn from."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]  # which tokens bear loss
    images: tuple[Picture, ...] = ()


class Pair(NamedTuple):
    """Two sequences, of which the first is preferred."""

    chosen: Example
    rejected: Example


@dataclasses.dataclass(frozen=True)
class Weights:
    """The policy in the rollout layout, and which of its versions this is."""

    params: dict[str, Any]
    version: int  # completed steps


class Lessons(NamedTuple):
    """What teachers say of sampled tokens: log-probs of k tokens in place of each. Host arrays.

    The k likeliest of the vocabulary, which descend, or the sampled token alone.
    """

    tokens: Int[np.ndarray, "B T k"]  # -1: no teacher speaks of this place
    log_probs: Float[np.ndarray, "B T k"]


@dataclasses.dataclass
class EpisodeLog:
    """What happened in an episode of several turns."""

    messages: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)  # after the prompt
    environment: str = ""  # its name; "": none
    num_turns: int = 0  # of the policy
    turn_rewards: list[float] = dataclasses.field(default_factory=list)  # of the environment
    reward: float = 0.0  # of the environment, for the whole episode, beside those of the turns
    calls: Counter[str] = dataclasses.field(default_factory=Counter)  # of each tool
    errors: Counter[str] = dataclasses.field(default_factory=Counter)  # of each kind
    seconds: float = 0.0  # that calls and steps took
    num_rewritten: int = 0  # times that the template rewrote the dialogue and a sequence began


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Sampled sequences, those of a prompt side by side. Host arrays, equal on all processes."""

    tokens: Int[np.ndarray, "B T"]  # prompt, then response, right-padded with 0
    response_mask: Bool[np.ndarray, "B T"]  # the policy chose this token
    rollout_log_probs: Float[np.ndarray, "B T"]  # as the engine reported; 0 outside the mask
    versions: Int[np.ndarray, "B T"]  # of the weights that drew each token; 0 outside the mask
    lengths: Int[np.ndarray, " B"]  # tokens of prompt and response
    group_ids: Int[np.ndarray, " B"]  # position of the row's prompt in `prompts`
    stopped: Bool[np.ndarray, " B"]  # ended by a stop token, not by the length limit
    prompts: tuple[Prompt, ...]
    responses: tuple[str, ...]  # text of each of the B responses
    # Experts that a token visited in each layer with experts, -1: not known, as of the last token,
    # which was never read; None: not kept.
    routes: Int[np.ndarray, "B T routes"] | None = None
    lessons: Lessons | None = None  # None: the run has no teacher
    # The episode of each row; empty where all have one turn. Rows of an episode share its log.
    logs: tuple[EpisodeLog, ...] = ()
    # Of each row, in prompt and response; empty: those of the prompts alone.
    images: tuple[tuple[Picture, ...], ...] = ()

    @property
    def last_rows(self) -> Int[np.ndarray, " B"]:
        """The row with the end of each row's episode: itself, unless the template rewrote it."""
        last = {id(log): row for row, log in enumerate(self.logs)}
        rows = [last[id(log)] for log in self.logs] or range(len(self.lengths))
        return np.array(rows, np.int32)

    @property
    def truncated(self) -> Bool[np.ndarray, " B"]:
        """Rows of responses that a limit cut: no stop token ended them, or the next turn of their
        dialogue did not fit. Earlier rows of such an episode too."""
        last = self.last_rows
        too_long = [self.logs[row].errors["too_long"] > 0 for row in last] if self.logs else False
        return ~self.stopped[last] | np.asarray(too_long)

    @property
    def missing_routes(self) -> int:
        """Tokens without routes; the last of a sequence is never read and needs none."""
        read = np.arange(self.tokens.shape[1]) < self.lengths[:, None] - 1
        known = np.zeros_like(read) if self.routes is None else (self.routes >= 0).all(-1)
        return int((read & ~known).sum())


@dataclasses.dataclass(frozen=True)
class Rewards:
    """What the responses are worth. Host arrays."""

    scores: Float[np.ndarray, " B"]  # weighted sum of the terms that apply
    terms: Mapping[str, Float[np.ndarray, " B"]]  # each reward term, unweighted; 0 where unused
    weights: Mapping[str, Float[np.ndarray, " B"]]  # its weight on each row
    costs: Float[np.ndarray, " B"]  # Safe-RLHF's cost; zero without one
    baselines: Float[np.ndarray, " B"]  # score of the prompt's greedy answer (ReMax), or zero
    details: tuple[Mapping[str, Any], ...]  # what reward functions returned beside the score
    num_failures: int  # reward calls that raised, hung or returned no finite number
    num_calls: int = 0  # reward calls in all
    num_dropped: int = 0  # sequences of groups that dynamic sampling replaced by others
    # What of `scores` environments gave for single turns, on the last token of each; None: nothing.
    turn_rewards: Float[np.ndarray, "B T"] | None = None
    # Why the calls of reward functions for a row failed, "": none did; empty: not known.
    failures: tuple[str, ...] = ()
    # Rows without a score of their own: in no group, no gradient; None: there are none.
    left_out: Bool[np.ndarray, " B"] | None = None

    @property
    def kept(self) -> Bool[np.ndarray, " B"]:
        """The rows that are learned from."""
        return np.ones(len(self.scores), bool) if self.left_out is None else ~self.left_out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Predictions:
    """What the models say about the sampled tokens; zero outside the response mask."""

    # Policy when the step began; the engine's, which nothing reads, where the update finds its own.
    old_log_probs: Float[Array, "B T"]
    ref_log_probs: Float[Array, "B T"]  # frozen reference
    entropies: Float[Array, "B T"]  # of the distribution each token was drawn from
    sum_squared_probs: Float[Array, "B T"]  # sum over the vocabulary of p**2
    values: Float[Array, "B T"]  # predicted return just before the token
    cost_values: Float[Array, "B T"]  # predicted cost, Safe-RLHF


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Estimates:
    """What the loss needs beside log-probs; zero outside `loss_mask`."""

    shaped_rewards: Float[Array, "B T"]  # score on the last token, KL taken off
    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"]  # target of the critic
    cost_returns: Float[Array, "B T"]  # target of the cost critic
    loss_mask: Bool[Array, "B T"]  # response tokens that survived rejection
    correction_weights: Float[Array, "B T"]  # off-policy correction; 1 without one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Minibatch:
    """The sequences of one optimizer update; the rows of a step, chosen and ordered."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    response_mask: Bool[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    old_log_probs: Float[Array, "B T"]
    ref_log_probs: Float[Array, "B T"]
    rollout_log_probs: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"]
    values: Float[Array, "B T"]
    cost_returns: Float[Array, "B T"]
    cost_values: Float[Array, "B T"]
    correction_weights: Float[Array, "B T"]

    @classmethod
    def zeros(cls, num_rows: int, num_tokens: int) -> "Minibatch":
        """Returns rows of zeros with empty masks, for examples and tests."""
        dtypes = {"tokens": "int32", "response_mask": "bool", "loss_mask": "bool"}
        names = [field.name for field in dataclasses.fields(cls)]
        fields = {n: jnp.zeros((num_rows, num_tokens), dtypes.get(n, "float32")) for n in names}
        return cls(**fields | {"lengths": jnp.zeros(num_rows, "int32")})
