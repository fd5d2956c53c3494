"""Rows of episodes: which are compared, which end an episode, which count in an evaluation."""

import numpy as np
import pytest

from jaxrl_llm.types import EpisodeLog, Rollouts


def rollouts(logs, roles, groups):
    size = len(groups)
    zeros = np.zeros((size, 2), np.int32)
    return Rollouts(
        tokens=zeros,
        response_mask=zeros > 0,
        rollout_log_probs=zeros.astype(np.float32),
        versions=zeros,
        lengths=np.full(size, 2, np.int32),
        group_ids=np.array(groups, np.int32),
        stopped=np.ones(size, bool),
        prompts=(),
        responses=(),
        episode_logs=tuple(logs),
        roles=None if roles is None else np.array(roles, np.int32),
    )


def test_rows_of_roles():
    a, b, c = (EpisodeLog(role_rewards=[1.0, -1.0]) for _ in range(3))
    # Role 1 has two sequences in the first episode, and in the last one only it has spoken.
    batch = rollouts([a, a, a, b, b, c], [1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1])
    assert batch.last_rows.tolist() == [2, 1, 2, 3, 4, 5]
    assert batch.comparison_ids.tolist() == [1, 0, 1, 0, 1, 2]
    assert batch.episode_rows.tolist() == [1, 3, 5]
    assert [a.total_reward(role) for role in (0, 1)] == [1.0, -1.0]


@pytest.mark.parametrize("has_logs", [True, False])
def test_rows_without_roles_are_compared_by_prompt(has_logs):
    logs = [EpisodeLog(reward=2.0, turn_rewards=[0.5]) for _ in range(3)] if has_logs else []
    batch = rollouts(logs, None, [0, 0, 1])
    assert batch.comparison_ids is batch.group_ids
    assert batch.episode_rows.tolist() == batch.last_rows.tolist() == [0, 1, 2]
    assert not has_logs or logs[0].total_reward() == 2.5
    rewritten = rollouts([logs[0], logs[0], logs[2]], None, [0, 0, 1]) if has_logs else batch
    assert rewritten.episode_rows.tolist() == ([1, 2] if has_logs else [0, 1, 2])
