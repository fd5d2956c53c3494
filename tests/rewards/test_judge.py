"""Generative judges against a real HTTP server: votes, agreement, failures."""

import contextlib
import dataclasses
import json
import random

import local_server
import numpy as np
import pytest

from jaxrl_llm.config import RewardsConfig
from jaxrl_llm.config.judges import JudgeConfig
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.metrics import statistics
from jaxrl_llm.rewards import judge_client
from jaxrl_llm.rewards.base import RolloutScorer, check_rewards
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.rollout.structured_outputs import GrammarCompiler, json_part, source_of
from jaxrl_llm.types import Prompt, Rollouts

QUALITY = {"bad": 1, "fair": 4, "good": 9}


def rollouts(responses=("good", "bad", "fair", "good", "bad", "fair"), group_size=3):
    size = len(responses)
    zeros = np.zeros((size, 4), np.int32)
    groups = np.arange(size, dtype=np.int32) // group_size
    prompts = tuple(
        Prompt((1,), f"Question {i}?", "test", "truth", {}, i) for i in range(groups.max() + 1)
    )
    return Rollouts(
        tokens=zeros,
        response_mask=zeros > 0,
        rollout_log_probs=zeros.astype(np.float32),
        versions=zeros,
        lengths=np.full(size, 4, np.int32),
        group_ids=groups,
        stopped=np.ones(size, bool),
        prompts=prompts,
        responses=tuple(responses),
    )


def between(text, mark):
    return text.partition(f"<{mark}>\n")[2].partition(f"\n</{mark}>")[0]


def honest(body, draw):
    question = body["messages"][0]["content"]
    if "<answer_a>" in question:
        a, b = (QUALITY[between(question, f"answer_{side}")] for side in "ab")
        return {"reason": "", "winner": "A" if a > b else "B" if b > a else "tie"}
    return {"reason": "", "score": QUALITY[between(question, "answer")]}


def at_random(body, draw):
    if "<answer_a>" in body["messages"][0]["content"]:
        return {"reason": "", "winner": draw.choice(["A", "B"])}
    return {"reason": "", "score": draw.randint(0, 10)}


@contextlib.contextmanager
def server(verdict, statuses=()):
    """The address of a server that answers with a verdict; `statuses` are those of its first."""
    requests, pending = [], list(statuses)

    class Handler(local_server.JsonHandler):
        def do_POST(self):
            body = self.read_json()
            requests.append((self.path, self.headers.get("Authorization"), body))
            status = pending.pop(0) if pending else 200
            # Of the request alone: requests come in any order.
            value = verdict(body, random.Random(json.dumps(body)))
            text = value if isinstance(value, str) else json.dumps(value)
            reply = {"choices": [{"message": {"role": "assistant", "content": text}}]}
            self.reply(status, reply if status == 200 else {"error": "busy"})

    with local_server.serving(Handler) as address:
        yield f"{address}/v1", requests


def scored(verdict, batch=None, on_failure="stop", statuses=(), **settings):
    with server(verdict, statuses) as (address, requests):
        judge = JudgeConfig(address=address, **settings)
        config = RewardsConfig(judges={"j": judge}, on_failure=on_failure, failure_score=-1.0)
        with RolloutScorer(config, {}) as scorer:
            rewards = scorer.score(batch or rollouts())
    return rewards, statistics.reward_metrics(rewards, (batch or rollouts()).group_ids), requests


def test_scores_are_mean_votes_between_0_and_1():
    rewards, metrics, requests = scored(honest, votes=2, weight=2.0)
    np.testing.assert_allclose(rewards.terms["j"], [0.9, 0.1, 0.4] * 2, rtol=1e-6)
    np.testing.assert_allclose(rewards.scores, [1.8, 0.2, 0.8] * 2, rtol=1e-6)
    assert metrics["judge/j/disagreement"] == 0.0 == metrics["judge/j/unparsable_share"]
    assert len(requests) == 12 and rewards.num_calls == 6
    path, _, body = requests[0]
    assert path == "/v1/chat/completions"
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "number", "minimum": 0.0, "maximum": 10.0}
    # Votes on one response have seeds of their own.
    assert len({body["seed"] for _, _, body in requests}) == 12


def test_pairs_are_won_in_both_orders():
    rewards, metrics, requests = scored(honest, mode="pairwise", votes=2)
    np.testing.assert_allclose(rewards.scores, [1.0, 0.0, 0.5] * 2)
    assert len(requests) == 2 * 3 * 2 and metrics["judge/j/disagreement"] == 0.0
    by_place = lambda body, draw: {"reason": "", "winner": "A"}  # noqa: E731
    rewards, metrics, _ = scored(by_place, mode="pairwise", votes=2)
    np.testing.assert_allclose(rewards.scores, 0.5)  # its preference cancels, and shows
    assert metrics["judge/j/disagreement"] == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["score", "pairwise"])
def test_a_judge_that_answers_at_random_is_caught(mode):
    names = [random.Random(i).choice(list(QUALITY)) for i in range(32)]
    batch = rollouts(names, group_size=4)
    _, honest_metrics, _ = scored(honest, batch, mode=mode, votes=3)
    _, random_metrics, _ = scored(at_random, batch, mode=mode, votes=3)
    assert honest_metrics["judge/j/disagreement"] < 1e-9
    assert random_metrics["judge/j/disagreement"] > 0.8

    def noisy(body, draw):
        return honest(body, draw) if draw.random() < 0.8 else at_random(body, draw)

    _, noisy_metrics, _ = scored(noisy, batch, mode=mode, votes=3)
    assert 0.05 < noisy_metrics["judge/j/disagreement"] < 0.7


def test_votes_that_break_the_schema_are_counted_and_left_out():
    count = iter(range(10**6))

    def half(body, draw):
        return honest(body, draw) if next(count) % 2 else '{"reason": "", "score": 99}'

    rewards, metrics, _ = scored(half, votes=2, max_requests=1)
    np.testing.assert_allclose(rewards.scores, [0.9, 0.1, 0.4] * 2, rtol=1e-6)
    assert metrics["judge/j/unparsable_share"] == 0.5 and rewards.num_failures == 0
    words = lambda body, draw: "I would say nine."  # noqa: E731
    with pytest.raises(RewardError, match=r"row 0: unparsable vote 'I would say nine\.'"):
        scored(words)
    rewards, metrics, _ = scored(words, on_failure="leave_out")
    assert rewards.excluded.all() and rewards.num_failures == 6
    assert metrics["judge/j/unparsable_share"] == 1.0 and "judge/j/disagreement" not in metrics
    rewards, _, _ = scored(words, on_failure="score")
    np.testing.assert_allclose(rewards.scores, -1.0)


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        ('{"score": 5}', 0.5),
        ('```json\n{"score": 10}\n```', 1.0),
        ('{"score": true}', None),
        ('{"score": "5"}', None),
        ('{"score": NaN}', None),
        ('{"score": -1}', None),
        ("[5]", None),
        ("{" * 100_000, None),
    ],
)
def test_verdicts(text, vote):
    with Judge("j", JudgeConfig(address="http://x")) as judge:
        assert judge.parse(text) == vote


def test_requests_are_retried_and_then_given_up(monkeypatch):
    monkeypatch.setattr(judge_client, "_FIRST_DELAY_S", 0.01)
    rewards, _, requests = scored(honest, statuses=[503, 429, 500], votes=1, num_retries=3)
    np.testing.assert_allclose(rewards.scores, [0.9, 0.1, 0.4] * 2, rtol=1e-6)
    assert len(requests) == 9
    with pytest.raises(RewardError, match=r"status 400: .*busy"):
        scored(honest, statuses=[400] * 99, votes=1)
    # No more requests once a server is given up.
    _, _, requests = scored(
        honest,
        rollouts(["good"] * 30),
        "score",
        [503] * 999,
        votes=1,
        num_retries=0,
        max_requests=1,
    )
    assert len(requests) == judge_client._BREAKER_FAILURES


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    _, _, requests = scored(honest, votes=1, api_key_variable="JUDGE_KEY")
    assert {key for _, key, _ in requests} == {"Bearer secret"}


def test_a_missing_key_is_refused_before_the_run(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = JudgeConfig(address="http://127.0.0.1:1/v1", api_key_variable="JUDGE_KEY")
    config = RewardsConfig(judges={"j": judge})
    with pytest.raises(RewardError, match=r"judges.j.api_key_variable.*no JUDGE_KEY; export it"):
        check_rewards(config, rollouts().prompts)


def test_rubrics_are_checked_before_the_run(tmp_path):
    prompts = rollouts().prompts
    for text, problem in (
        ("{{ answer }}", "'answer' is undefined; it may use response, "),
        ("{% if %}", "cannot be read as a template"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ):
        (tmp_path / "rubric.jinja").write_text(text)
        judge = JudgeConfig(address="http://x", rubric=str(tmp_path / "rubric.jinja"))
        with pytest.raises(RewardError, match=f"judges.j.rubric: .*{problem}"):
            check_rewards(RewardsConfig(judges={"j": judge}), prompts)
    (tmp_path / "rubric.jinja").write_text("{{ prompt }} {{ response_a }} {{ response_b }}")
    judge = dataclasses.replace(judge, mode="pairwise")
    check_rewards(RewardsConfig(judges={"j": judge}), prompts)


def test_schemas_are_ones_that_our_server_follows():
    tokenizer = character_tokenizer()
    for mode in ("score", "pairwise"):
        with Judge("j", JudgeConfig(address="http://x", mode=mode)) as judge:
            compiler = GrammarCompiler(tokenizer, len(tokenizer))
            assert compiler.compile(source_of(json_part(judge.schema), "schema"))


def test_settings_that_cannot_work():
    problems = dict(
        JudgeConfig(min_score=1.0, max_score=1.0, num_opponents=2, temperature=0.0).problems()
    )
    assert {*problems} == {"address", "max_score", "num_opponents", "votes"}
