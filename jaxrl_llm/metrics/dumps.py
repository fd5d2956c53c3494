"""A sampled sequence as a line of a dump of rollouts, with its tokens if they are asked for."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_llm.types import Estimates, Predictions, Rewards, Rollouts


def records(step: int, rollouts: Rollouts, rewards: Rewards) -> Iterator[dict[str, Any]]:
    """Yields verl's keys `input`, `output`, `gts`, `score`, `step` of each sequence, and more.

    That is `data_source`, `num_tokens` (of the response), `stopped`, `terms` (each reward term,
    unweighted) and `details` (what reward functions returned beside the score). Of an episode with
    tools or an environment also `messages` (after the prompt), `sampled` (spans of the response
    that the policy chose, in tokens), `num_turns`, `calls` and `errors` (counts by name) and
    `turn_rewards`. Where calls of reward functions failed, `failure` says why, and `left_out` is
    true of a sequence that is not learned from.
    """
    for row, output in enumerate(rollouts.responses):
        prompt = rollouts.prompts[rollouts.group_ids[row]]
        yield {
            "input": prompt.text,
            "output": output,
            "gts": prompt.ground_truth,
            "score": rewards.scores[row],
            "step": step,
            "data_source": prompt.data_source,
            "num_tokens": rollouts.lengths[row] - len(prompt.tokens),
            "stopped": rollouts.stopped[row],
            "terms": {name: term[row] for name, term in rewards.terms.items()},
            "details": rewards.details[row],
            **({"failure": failure} if (failure := _failure(rewards, row)) else {}),
            **({"left_out": True} if not rewards.kept[row] else {}),
            **(_of_episode(rollouts, row, len(prompt.tokens)) if rollouts.logs else {}),
        }


def _failure(rewards: Rewards, row: int) -> str:
    """Why a row has no score of its own; its first lines, without the traceback."""
    return rewards.failures[row].partition("\n")[0][:500] if rewards.failures else ""


def _of_episode(rollouts: Rollouts, row: int, prompt_tokens: int) -> dict[str, Any]:
    log = rollouts.logs[row]
    mask = np.pad(rollouts.response_mask[row, prompt_tokens:].astype(np.int8), 1)
    starts, ends = (np.flatnonzero(np.diff(mask) == change) for change in (1, -1))
    return {
        "messages": log.messages,
        "sampled": list(zip(starts.tolist(), ends.tolist(), strict=True)),
        "num_turns": log.num_turns,
        "calls": dict(log.calls),
        "errors": dict(log.errors),
        "turn_rewards": log.turn_rewards,
    }


def of_tokens(
    rollouts: Rollouts,
    rewards: Rewards,
    predictions: Predictions,
    estimates: Estimates,
    tokenizer: Any,
) -> Iterator[dict[str, Any]]:
    """Yields what a replay of each sequence needs, and the text of its tokens.

    Lists begin after the `prompt_tokens`: `tokens`, `pieces` (their texts), `mask` (1: the policy
    chose it), `rollout_log_probs`, `log_probs` (of the policy when the step began), `advantages`
    and `versions`. `group` is the number of the prompt in the step.
    """
    log_probs, advantages = (
        np.asarray(a) for a in (predictions.old_log_probs, estimates.advantages)
    )
    for row, group in enumerate(rollouts.group_ids):
        prompt = rollouts.prompts[group]
        after = slice(len(prompt.tokens), rollouts.lengths[row])
        tokens = rollouts.tokens[row, after].tolist()
        yield {
            "group": group,
            "index": prompt.index,
            "extra_info": prompt.extra_info,
            "weights": {name: weight[row] for name, weight in rewards.weights.items()},
            "cost": rewards.costs[row],
            "baseline": rewards.baselines[row],
            "prompt_tokens": prompt.tokens,
            "tokens": tokens,
            "pieces": [tokenizer.decode([token]) for token in tokens],
            "mask": rollouts.response_mask[row, after].astype(int),
            "rollout_log_probs": rollouts.rollout_log_probs[row, after],
            "log_probs": log_probs[row, after],
            "advantages": advantages[row, after],
            "versions": rollouts.versions[row, after],
        }
