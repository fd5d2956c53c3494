"""Data that travels between the phases of a step.

`PromptBatch -> Rollouts -> Rewards -> Predictions -> Estimates -> Minibatch`. Index `t` of every
[B, T] array is about `tokens[:, t]`: its log-prob, the value just before it, the reward for it.
Fields of a model that the run does not have hold a neutral value: `values` and `costs` are zero,
`ref_log_probs` are `old_log_probs`.
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
class PromptImage:
    """An image in a sequence, in its file format."""

    contents: bytes
    digest: str  # hash of the contents
    grid: tuple[int, int]  # rows and columns of its image embeddings, one token each
    start: int = 0  # index of its first token in the sequence

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row of a dataset, tokenized and ready to sample responses for."""

    tokens: tuple[int, ...]  # chat template applied
    text: str  # the prompt as text, for dumps and reward models
    data_source: str  # selects reward terms and groups the evaluation
    ground_truth: Any  # passed to reward functions unchanged
    extra_info: Mapping[str, Any]
    index: int  # row of the dataset
    # The source of `text`, for multi-turn episodes: the dialogue, and `tools` and other variables
    # of the chat template.
    messages: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()  # in token order
    where: str = ""  # `FILE, row N`, for error messages; "": not from a file

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Prompt":
        """A prompt from fields read from JSON, where tuples have become lists."""
        tuples = {name: tuple(fields[name]) for name in ("tokens", "messages", "images")}
        return cls(**{**fields, **tuples})


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """The prompts of one wave."""

    prompts: tuple[Prompt, ...]  # length P
    max_prompt_tokens: int = 0  # tokens of the longest prompt of any wave; 0: unknown


class Example(NamedTuple):
    """A sequence to train on."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]  # tokens that count in the loss
    images: tuple[PromptImage, ...] = ()
    desirable: bool = True  # its label, for losses on single answers


class PreferencePair(NamedTuple):
    """A preference pair."""

    chosen: Example
    rejected: Example


@dataclasses.dataclass(frozen=True)
class Weights:
    """The policy in the rollout layout, and its version."""

    params: dict[str, Any]
    version: int  # completed training steps


class TeacherLogProbs(NamedTuple):
    """Teacher log-probs of k tokens at each sampled position, for distillation. Host arrays.

    The teacher's top k in descending order, or only the sampled token (k = 1).
    """

    tokens: Int[np.ndarray, "B T k"]  # -1: no teacher for this position
    log_probs: Float[np.ndarray, "B T k"]


@dataclasses.dataclass
class EpisodeLog:
    """The record of a multi-turn episode."""

    messages: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)  # after the prompt
    environment: str = ""  # its name; "": no environment
    num_turns: int = 0  # of the policy
    turn_rewards: list[float] = dataclasses.field(default_factory=list)  # of the environment
    reward: float = 0.0  # of the environment for the whole episode, on top of turn_rewards
    # The same of each role of `agent.roles`, in place of `reward`; empty: `reward` is of all.
    role_rewards: list[float] = dataclasses.field(default_factory=list)
    calls: Counter[str] = dataclasses.field(default_factory=Counter)  # by tool
    errors: Counter[str] = dataclasses.field(default_factory=Counter)  # by kind
    seconds: float = 0.0  # spent in tool calls and environment steps
    num_rewritten: int = 0  # times the template rewrote history, which starts a new sequence
    # Of a black-box agent:
    num_branches: int = 0  # sequences beyond the first of each role
    num_unmatched: int = 0  # replies that came back changed, so that a branch began
    num_requests: int = 0

    def total_reward(self, role: int = 0) -> float:
        """The environment's reward of the episode for a role: of all its turns and of the whole."""
        whole = self.role_rewards[role] if self.role_rewards else self.reward
        return whole + sum(self.turn_rewards)


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Sampled sequences, grouped by prompt. Host arrays, the same on all processes."""

    tokens: Int[np.ndarray, "B T"]  # prompt, then response, right-padded with 0
    response_mask: Bool[np.ndarray, "B T"]  # tokens sampled by the policy
    rollout_log_probs: Float[np.ndarray, "B T"]  # as reported by the engine; 0 outside the mask
    versions: Int[np.ndarray, "B T"]  # weight version of each token; 0 outside the mask
    lengths: Int[np.ndarray, " B"]  # tokens of prompt and response
    group_ids: Int[np.ndarray, " B"]  # index of the row's prompt in `prompts`
    stopped: Bool[np.ndarray, " B"]  # ended by a stop token, not by the length limit
    prompts: tuple[Prompt, ...]
    responses: tuple[str, ...]  # text of the B responses
    # Experts that each token was routed to in every MoE layer, for router replay; -1: unknown, as
    # for the last token, which was never a model input; None: not recorded.
    routed_experts: Int[np.ndarray, "B T routes"] | None = None
    teacher_log_probs: TeacherLogProbs | None = None  # None: no teacher
    # Episode log of each row; empty if all are single-turn. Rows of an episode share one log.
    episode_logs: tuple[EpisodeLog, ...] = ()
    # Images of each row, in prompt and response; empty: only those of the prompts.
    images: tuple[tuple[PromptImage, ...], ...] = ()
    # Tokens among which each token was drawn, itself among them, padded with -1; log-probs, also of
    # the trained policy, are renormalized over them. Where only -1 stands, and everywhere if it is
    # None, they are of the whole vocabulary.
    support: Int[np.ndarray, "B T k"] | None = None
    # Who speaks in each row, an index of `agent.roles`; 0 in runs without roles.
    roles: Int[np.ndarray, " B"] | None = None  # None: all 0

    @property
    def role_ids(self) -> Int[np.ndarray, " B"]:
        """The role of each row."""
        return np.zeros(len(self.lengths), np.int32) if self.roles is None else self.roles

    @property
    def comparison_ids(self) -> Int[np.ndarray, " B"]:
        """Which rows are compared with each other: those of one prompt and one role, from 0."""
        if self.roles is None:
            return self.group_ids
        pairs = np.stack([self.group_ids, self.roles], axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)

    @property
    def prompt_lengths(self) -> Int[np.ndarray, " B"]:
        """Tokens before the first sampled one of each row; without any, those of its prompt.

        A row of an episode may have another prompt than its row of the dataset.
        """
        is_sampled = self.response_mask
        lengths = np.array([len(self.prompts[group].tokens) for group in self.group_ids])
        return np.where(is_sampled.any(1), is_sampled.argmax(1), lengths).astype(np.int32)

    @property
    def last_rows(self) -> Int[np.ndarray, " B"]:
        """The last row of each row's episode and role: itself, unless history was rewritten."""
        pairs = zip(self.episode_logs, self.role_ids.tolist(), strict=False)  # there may be no logs
        keys = [(id(log), role) for log, role in pairs]
        last = {key: row for row, key in enumerate(keys)}
        rows = [last[key] for key in keys] or range(len(self.lengths))
        return np.array(rows, np.int32)

    @property
    def episode_rows(self) -> Int[np.ndarray, " E"]:
        """One row of each episode, in order: the last one of the first role that has any."""
        roles, rows = self.role_ids, np.unique(self.last_rows)
        chosen: dict[int, int] = {}
        for row in rows[np.argsort(-roles[rows], kind="stable")].tolist():
            chosen[id(self.episode_logs[row]) if self.episode_logs else row] = row
        keys = (id(self.episode_logs[row]) if self.episode_logs else row for row in rows.tolist())
        return np.array([chosen[key] for key in dict.fromkeys(keys)], np.int32)

    @property
    def truncated(self) -> Bool[np.ndarray, " B"]:
        """Rows truncated by a limit: they did not end with a stop token, or the next turn of their
        dialogue did not fit. Includes earlier rows of such an episode."""
        last = self.last_rows
        too_long = (
            [self.episode_logs[row].errors["too_long"] > 0 for row in last]
            if self.episode_logs
            else False
        )
        return ~self.stopped[last] | np.asarray(too_long)

    @property
    def missing_routes(self) -> int:
        """Number of tokens without routes; the last of a sequence, never an input, needs none."""
        is_input = np.arange(self.tokens.shape[1]) < self.lengths[:, None] - 1
        has_routes = (
            np.zeros_like(is_input)
            if self.routed_experts is None
            else (self.routed_experts >= 0).all(-1)
        )
        return int((is_input & ~has_routes).sum())


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Rewards of the responses. Host arrays."""

    scores: Float[np.ndarray, " B"]  # weighted sum of the terms that apply
    terms: Mapping[str, Float[np.ndarray, " B"]]  # each reward term, unweighted; 0 where unused
    weights: Mapping[str, Float[np.ndarray, " B"]]  # its weight on each row
    costs: Float[np.ndarray, " B"]  # Safe-RLHF's cost; zero without one
    baselines: Float[np.ndarray, " B"]  # score of the prompt's greedy response (ReMax), or zero
    details: tuple[Mapping[str, Any], ...]  # extra outputs of the reward functions
    num_failures: int  # reward calls that raised, hung or returned no finite number
    num_calls: int = 0  # reward calls in all
    num_dropped: int = 0  # sequences of groups that dynamic sampling replaced
    # Per-turn environment rewards, part of `scores`, on the last token of each turn; None: none.
    turn_rewards: Float[np.ndarray, "B T"] | None = None
    # Why reward calls for a row failed, "": none failed; empty tuple: unknown.
    failures: tuple[str, ...] = ()
    # By `JUDGE/STATISTIC` (`rewards.judge.VOTE_STATISTICS`), NaN for rows that it did not judge.
    votes: Mapping[str, Float[np.ndarray, " B"]] = dataclasses.field(default_factory=dict)
    # Rows without a valid score: excluded from groups and gradients; None: there are none.
    excluded: Bool[np.ndarray, " B"] | None = None

    @property
    def valid_rows(self) -> Bool[np.ndarray, " B"]:
        """Mask of the rows that are trained on."""
        return np.ones(len(self.scores), bool) if self.excluded is None else ~self.excluded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Predictions:
    """Model outputs for the sampled tokens; zero outside the response mask."""

    # Policy at the start of the step; the engine's, unused, if the update computes its own.
    old_log_probs: Float[Array, "B T"]
    ref_log_probs: Float[Array, "B T"]  # frozen reference
    entropies: Float[Array, "B T"]  # of the distribution each token was sampled from
    sum_squared_probs: Float[Array, "B T"]  # sum over the vocabulary of p**2
    values: Float[Array, "B T"]  # predicted return before the token
    cost_values: Float[Array, "B T"]  # predicted cost, Safe-RLHF


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Estimates:
    """Inputs of the loss beside log-probs; zero outside `loss_mask`."""

    shaped_rewards: Float[Array, "B T"]  # score on the last token, minus the KL penalty
    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"]  # critic target
    cost_returns: Float[Array, "B T"]  # cost critic target
    loss_mask: Bool[Array, "B T"]  # response tokens that passed rejection
    correction_weights: Float[Array, "B T"]  # off-policy importance weights; 1 without correction


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Minibatch:
    """The sequences of one optimizer update, selected from the rows of a step."""

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
    # Of `corrections.interpolated_log_probs`; zero unless old log-probs are interpolated.
    proximal_shares: Float[Array, "B T"]

    @classmethod
    def zeros(cls, num_rows: int, num_tokens: int) -> "Minibatch":
        """Rows of zeros with empty masks, for examples and tests."""
        dtypes = {"tokens": "int32", "response_mask": "bool", "loss_mask": "bool"}
        names = [field.name for field in dataclasses.fields(cls)]
        fields = {n: jnp.zeros((num_rows, num_tokens), dtypes.get(n, "float32")) for n in names}
        return cls(**fields | {"lengths": jnp.zeros(num_rows, "int32")})
