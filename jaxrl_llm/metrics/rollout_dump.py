"""The records of a rollout dump: one per sampled sequence, optionally with its tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_llm.types import Estimates, Predictions, Rewards, Rollouts


def sequence_records(step: int, rollouts: Rollouts, rewards: Rewards) -> Iterator[dict[str, Any]]:
    """Yields a record per sequence, with verl's keys `input`, `output`, `gts`, `score`, `step`.

    Further keys: `data_source`, `num_tokens` (of the response), `stopped`, `terms` (each reward
    term, unweighted) and `details` (extra values returned by reward functions). Episodes with tools
    or an environment have `messages` (after the prompt), `sampled` (token spans of the response
    that the policy sampled), `num_turns`, `calls` and `errors` (counts by name) and `turn_rewards`;
    with `agent.roles` also `role`, its index.
    If calls of reward functions failed, `failure` is the reason, and `left_out` is true for a
    sequence that is excluded from learning.
    """
    starts = rollouts.prompt_lengths.tolist()
    for row, output in enumerate(rollouts.responses):
        prompt = rollouts.prompts[rollouts.group_ids[row]]
        yield {
            "input": prompt.text,
            "output": output,
            "gts": prompt.ground_truth,
            "score": rewards.scores[row],
            "step": step,
            "data_source": prompt.data_source,
            "num_tokens": rollouts.lengths[row] - starts[row],
            "stopped": rollouts.stopped[row],
            "terms": {name: term[row] for name, term in rewards.terms.items()},
            "details": rewards.details[row],
            **({"failure": failure} if (failure := _failure(rewards, row)) else {}),
            **({"left_out": True} if not rewards.valid_rows[row] else {}),
            **(_episode_fields(rollouts, row, starts[row]) if rollouts.episode_logs else {}),
        }


def _failure(rewards: Rewards, row: int) -> str:
    """The first line of the failure of a row's reward call, without traceback; "" if none."""
    return rewards.failures[row].partition("\n")[0][:500] if rewards.failures else ""


def _episode_fields(rollouts: Rollouts, row: int, prompt_tokens: int) -> dict[str, Any]:
    log = rollouts.episode_logs[row]
    mask = np.pad(rollouts.response_mask[row, prompt_tokens:].astype(np.int8), 1)
    starts, ends = (np.flatnonzero(np.diff(mask) == change) for change in (1, -1))
    return {
        "messages": log.messages,
        "sampled": list(zip(starts.tolist(), ends.tolist(), strict=True)),
        "num_turns": log.num_turns,
        "calls": dict(log.calls),
        "errors": dict(log.errors),
        "turn_rewards": log.turn_rewards,
        **({} if rollouts.roles is None else {"role": rollouts.roles[row]}),
    }


def token_records(
    rollouts: Rollouts,
    rewards: Rewards,
    predictions: Predictions,
    estimates: Estimates,
    tokenizer: Any,
) -> Iterator[dict[str, Any]]:
    """Yields the fields of each sequence that a replay needs, and the text of its tokens.

    Lists are over the tokens after `prompt_tokens`: `tokens`, `pieces` (their texts), `mask` (1:
    sampled by the policy), `rollout_log_probs`, `log_probs` (of the policy when the step began),
    `advantages` and `versions`, with `rollout.support_tokens` also `support`, the tokens among
    which each was drawn. `group` is the index of the prompt in the step.
    """
    log_probs, advantages = (
        np.asarray(a) for a in (predictions.old_log_probs, estimates.advantages)
    )
    starts = rollouts.prompt_lengths.tolist()
    for row, group in enumerate(rollouts.group_ids):
        prompt = rollouts.prompts[group]
        response = slice(starts[row], rollouts.lengths[row])
        tokens = rollouts.tokens[row, response].tolist()
        yield {
            "group": group,
            "index": prompt.index,
            "extra_info": prompt.extra_info,
            "weights": {name: weight[row] for name, weight in rewards.weights.items()},
            "cost": rewards.costs[row],
            "baseline": rewards.baselines[row],
            "prompt_tokens": rollouts.tokens[row, : starts[row]].tolist(),
            "tokens": tokens,
            "pieces": [tokenizer.decode([token]) for token in tokens],
            "mask": rollouts.response_mask[row, response].astype(int),
            "rollout_log_probs": rollouts.rollout_log_probs[row, response],
            "log_probs": log_probs[row, response],
            "advantages": advantages[row, response],
            "versions": rollouts.versions[row, response],
            **({} if rollouts.support is None else {"support": _support(rollouts, row, response)}),
        }


def _support(rollouts: Rollouts, row: int, response: slice) -> list[list[int]]:
    """The support of each token, without padding."""
    assert rollouts.support is not None
    return [ids[ids >= 0].tolist() for ids in rollouts.support[row, response]]
