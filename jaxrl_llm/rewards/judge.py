"""Scores of responses by a generative judge: rubric, votes, and how far the votes agree.

A judge is a language model at an address. Each response, or pair of responses to a prompt, gets
several votes; a vote is a JSON object that follows a schema, and one that does not is counted and
left out. Votes that disagree with each other as much as votes on different responses carry no
information: `disagreement` is then 1 (`Judgement`).
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
from jaxtyping import Float

from jaxrl_llm.config.judges import JudgeConfig
from jaxrl_llm.rewards.judge_client import JudgeClient, JudgeError
from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.types import Prompt, Rollouts

# Per-row statistics, from which `metrics.statistics.judge_metrics` computes those of a step.
VOTE_STATISTICS = ("mean", "square", "variance", "unparsable_share")
_MAX_REASON_CHARACTERS = 600


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The scores of some rows, and how far the votes on them agree."""

    scores: Float[np.ndarray, " R"]  # mean of the votes, from 0 to 1; 0 for a failure
    failures: tuple[str, ...]  # why a row has no vote; "": it has
    # Each of `VOTE_STATISTICS`: mean of a row's votes and of their squares, their unbiased variance
    # on the same response or pair, and the share that could not be parsed; NaN without votes.
    statistics: Mapping[str, Float[np.ndarray, " R"]]


@dataclasses.dataclass(frozen=True)
class _Ballot:
    """One question to the judge: a response, or a pair in the order in which it is shown."""

    row: int
    other: int  # the row that it is compared with; -1: none
    is_swapped: bool  # the other one is shown first
    body: Mapping[str, Any]


class Judge(contextlib.AbstractContextManager["Judge"]):
    """A judge of a run; a context manager that ends its threads."""

    def __init__(self, name: str, config: JudgeConfig):
        """RewardError if the rubric cannot be read, or its template is wrong."""
        self._name, self._config = name, config
        self._template = _template(name, config)
        self._client = JudgeClient(config)

    def __exit__(self, *exception: object) -> None:
        self._client.__exit__(*exception)

    def check(self, prompt: Prompt) -> None:
        """Renders the rubric for a row.

        Raises:
          RewardError: If the rubric uses a variable that there is not, or the key of the server is
            not in the environment.
        """
        if (variable := self._config.api_key_variable) and not os.environ.get(variable):
            raise RewardError(
                f"config.rewards.judges.{self._name}.api_key_variable: the environment has no"
                f" {variable}; export it before the run, or leave the setting empty"
            )
        self._render(prompt, "a response", "another response")

    def score(self, rollouts: Rollouts, rows: Sequence[int]) -> Judgement:
        """The judgement on some rows; of "pairwise" they are whole groups.

        A score is the mean vote, moved from the range of the config to 0 to 1; of "pairwise", the
        share of comparisons won, a tie as half. Each pair is shown in both orders in turn, so that
        a judge that prefers a place disagrees with itself.
        """
        ballots = self._ballots(rollouts, rows)
        replies = self._client.replies([ballot.body for ballot in ballots])
        votes: dict[int, dict[int, list[float]]] = {row: {} for row in rows}  # by row and other
        counts = {row: [0, 0] for row in rows}  # replies, of which unparsable
        failures = dict.fromkeys(rows, "")
        for ballot, reply in zip(ballots, replies, strict=True):
            sides = (ballot.row,) if ballot.other < 0 else (ballot.row, ballot.other)
            vote = None if isinstance(reply, JudgeError) else self.parse(reply)
            for row in sides:
                if isinstance(reply, JudgeError):
                    failures[row] = failures[row] or str(reply)
                    continue
                counts[row][0] += 1
                counts[row][1] += vote is None
                if vote is None:
                    failures[row] = failures[row] or f"unparsable vote {reply!r:.200}"
                    continue
                is_turned = ballot.is_swapped ^ (row != ballot.row)
                other = ballot.other if row == ballot.row else ballot.row
                votes[row].setdefault(other, []).append(1 - vote if is_turned else vote)
        return _judgement(rows, votes, counts, failures)

    def parse(self, text: str) -> float | None:
        """The vote in a reply, from 0 to 1 (1: the first one won); None if it breaks the schema."""
        start, end = text.find("{"), text.rfind("}")
        try:
            verdict = json.loads(text[start : end + 1])
        except (ValueError, RecursionError):
            return None
        if not isinstance(verdict, dict):
            return None
        if self._config.mode == "pairwise":
            winner = verdict.get("winner")
            return {"A": 1.0, "B": 0.0, "tie": 0.5}.get(winner) if isinstance(winner, str) else None
        low, high, score = self._config.min_score, self._config.max_score, verdict.get("score")
        if isinstance(score, bool) or not isinstance(score, (int, float)):
            return None
        return (score - low) / (high - low) if low <= score <= high else None

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a verdict: a reason, then the score or the winner."""
        key, value = "winner", dict[str, Any](type="string", enum=["A", "B", "tie"])
        if self._config.mode == "score":
            low, high = self._config.min_score, self._config.max_score
            key, value = "score", {"type": "number", "minimum": low, "maximum": high}
        # Half of the tokens at most, so that the verdict itself always fits.
        longest = min(_MAX_REASON_CHARACTERS, self._config.max_tokens // 2)
        reason = {"type": "string", "maxLength": longest}
        return {
            "type": "object",
            "properties": {"reason": reason, key: value},
            "required": ["reason", key],
            "additionalProperties": False,
        }

    def _ballots(self, rollouts: Rollouts, rows: Sequence[int]) -> list[_Ballot]:
        pairs = [(row, -1) for row in rows]
        if self._config.mode == "pairwise":
            pairs = _opponents(rollouts.comparison_ids, rows, self._config.num_opponents)
        ballots = []
        for (row, other), vote in itertools.product(pairs, range(self._config.votes)):
            is_swapped = other >= 0 and vote % 2 == 1
            shown = (other, row) if is_swapped else (row, other)
            texts = [rollouts.responses[each] if each >= 0 else "" for each in shown]
            prompt = rollouts.prompts[rollouts.group_ids[row]]
            body = self._body(self._render(prompt, *texts), vote)
            ballots.append(_Ballot(row, other, is_swapped, body))
        return ballots

    def _render(self, prompt: Prompt, first: str, second: str) -> str:
        config = self._config
        answers: dict[str, Any] = {"response": first}
        if config.mode == "pairwise":
            answers = {"response_a": first, "response_b": second}
        else:
            answers |= {"min_score": config.min_score, "max_score": config.max_score}
        try:
            return self._template.render(
                **answers,
                prompt=prompt.text,
                messages=list(prompt.messages),
                ground_truth=prompt.ground_truth,
                data_source=prompt.data_source,
                extra_info=dict(prompt.extra_info),
            )
        except jinja2.TemplateError as error:
            known = [*answers, "prompt", "messages", "ground_truth", "data_source", "extra_info"]
            raise RewardError(
                f"config.rewards.judges.{self._name}.rubric: {error}; it may use {', '.join(known)}"
            ) from error

    def _body(self, question: str, vote: int) -> dict[str, Any]:
        config = self._config
        schema = {"name": "verdict", "schema": self.schema, "strict": True}
        return {
            "model": config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            # The same question gets the same votes, from servers that follow it.
            "seed": (zlib.crc32(question.encode()) + vote) % 2**31,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }


def _template(name: str, config: JudgeConfig) -> jinja2.Template:
    path = pathlib.Path(
        config.rubric or pathlib.Path(__file__).parent / f"judge_{config.mode}.jinja"
    )
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, jinja2.TemplateSyntaxError) as error:
        raise RewardError(
            f"config.rewards.judges.{name}.rubric: {path} cannot be read as a template: {error}"
        ) from error


def _opponents(
    group_ids: np.ndarray, rows: Sequence[int], num_opponents: int
) -> list[tuple[int, int]]:
    """Pairs of rows of a group, each once: of each row and the next ones, around the group.

    >>> _opponents(np.array([0, 0, 0, 1]), [0, 1, 2, 3], 0)
    [(0, 1), (0, 2), (1, 2)]
    >>> _opponents(np.array([0, 0, 0, 0, 0]), [0, 1, 2, 3, 4], 2)
    [(0, 1), (0, 4), (1, 2), (2, 3), (3, 4)]
    """
    pairs = set()
    for group in np.unique(group_ids[list(rows)]):
        members = [row for row in rows if group_ids[row] == group]
        size = len(members)
        # A row meets those ahead of it, and those that are ahead of them meet it: both sides count.
        reach = size // 2 if not num_opponents else min(size // 2, -(-num_opponents // 2))
        for i, distance in itertools.product(range(size), range(1, reach + 1)):
            pair = members[i], members[(i + distance) % size]
            pairs.add((min(pair), max(pair)))
    return sorted(pairs)


def _judgement(
    rows: Sequence[int],
    votes: Mapping[int, Mapping[int, Sequence[float]]],
    counts: Mapping[int, Sequence[int]],
    failures: Mapping[int, str],
) -> Judgement:
    scores = np.zeros(len(rows))
    statistics = {name: np.full(len(rows), np.nan) for name in VOTE_STATISTICS}
    reasons = []
    for place, row in enumerate(rows):
        own = [np.asarray(group) for group in votes[row].values()]
        if counts[row][0]:
            statistics["unparsable_share"][place] = counts[row][1] / counts[row][0]
        reasons.append("" if own else failures[row] or "no other response to compare it with")
        if not own:
            continue
        scores[place] = np.mean([group.mean() for group in own])
        together = np.concatenate(own)
        statistics["mean"][place], statistics["square"][place] = (
            together.mean(),
            (together**2).mean(),
        )
        if repeated := [group.var(ddof=1) for group in own if len(group) > 1]:
            statistics["variance"][place] = np.mean(repeated)
    return Judgement(scores, tuple(reasons), statistics)
