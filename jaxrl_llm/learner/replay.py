"""The samples of a step from the dumps of another run: losses are debugged without sampling."""

import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import RLConfig
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.learner.source import Samples
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models.vocabulary import TokenRanges, is_inside
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.requests import Statistics
from jaxrl_llm.text import split_lines
from jaxrl_llm.types import Prompt, Rewards, Rollouts, Weights


class Replayed:
    """Gives the samples of dumps, a dump a step; a `Source` (source.py).

    With the config of the run that wrote them, each step learns what that run's did: scores,
    log-probs of the engine and versions are those of the dump.
    """

    def __init__(
        self,
        dumps: Sequence[pathlib.Path],
        config: RLConfig,
        vocab_size: int,
        width: int = 0,
        suppressed: TokenRanges = (),
    ):
        """`width` is T of what the run sampled; 0: it followed from the step's longest sequence."""
        self._dumps, self._config, self._vocab_size = dumps, config, vocab_size
        self._width, self._suppressed = width, suppressed
        self._taken = 0

    def take(self, weights: Weights, key: jax.Array, clock: Clock) -> Samples:
        """Returns the samples of the next dump; see `Source.take`."""
        del weights, key
        with clock("gen"):
            path = self._dumps[self._taken]
            samples = read(
                path, self._config, self._vocab_size, self._width, suppressed=self._suppressed
            )
        self._taken += 1
        return samples

    def meanwhile(self, pending: Any) -> None:
        """Does nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Returns `replay/step`, the step that was dumped."""
        return {"replay/step": float(self._dumps[self._taken - 1].stem)}

    def get_state(self) -> Mapping[str, Any]:
        return {"dumps": self._taken}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._taken = state["dumps"]


def find(paths: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """Returns dumps in the order given, those of a folder in the order of their steps.

    Raises:
      DataError: If one is missing, or a folder has none.
    """
    found: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            inside = [each for each in path.glob("*.jsonl") if each.stem.isdecimal()]
            found += sorted(inside, key=lambda each: int(each.stem))
        elif re.fullmatch(r"\d+\.jsonl", path.name) and path.exists():
            found.append(path)
        else:
            raise DataError(f"--replay: {path}: no dump; name WORKDIR/rollouts/STEP.jsonl")
    if paths and not found:
        raise DataError(f"--replay: no dump STEP.jsonl in {', '.join(map(str, paths))}")
    return found


def read(
    path: pathlib.Path,
    config: RLConfig,
    vocab_size: int,
    width: int = 0,
    suppressed: TokenRanges = (),
) -> Samples:
    """Returns the samples of a dump; `width` as in `Replayed`.

    Tokens in `suppressed` have probability 0 under the policy.

    Raises:
      DataError: If it holds no tokens, or does not fit this run.
    """

    def refuse(what: str, remedy: str) -> DataError:
        return DataError(f"--replay: {path}: {what}; {remedy}")

    try:
        rows = [json.loads(line) for line in split_lines(path.read_text("utf-8"))]
        if not all("prompt_tokens" in row for row in rows):
            remedy = "write dumps with --config.metrics.rollout_tokens=True"
            raise refuse("holds no tokens", remedy)
        samples = _samples(rows, config.max_sequence_tokens, width)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        said = f"no dump of rollouts ({type(error).__name__}: {error})"
        raise refuse(said, "use a file that a run wrote") from error
    tokens, lengths = samples.rollouts.tokens, samples.rollouts.lengths
    if len(rows) != config.sequences_per_step:
        said = f"{len(rows)} sequences, but a step has {config.sequences_per_step}"
        remedy = "set trainer.prompts_per_step and algorithm.samples_per_prompt as in its run"
        raise refuse(said, remedy)
    if lengths.max() > config.max_sequence_tokens:
        said = f"a sequence has {lengths.max()} tokens, above {config.max_sequence_tokens}"
        raise refuse(said, "raise data.max_prompt_tokens or rollout.max_response_tokens")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        said = f"the token {tokens.max()} is not among the model's {vocab_size}"
        raise refuse(said, "use the model of its run")
    impossible = np.asarray(is_inside(jnp.asarray(tokens), suppressed))
    if (sampled := tokens[impossible & samples.rollouts.response_mask]).size:
        said = f"the token {sampled[0]} was sampled, which stands for no text and has probability 0"
        raise refuse(said, "set rollout.suppress_unused_tokens=False, as in its run")
    return samples


def _samples(rows: Sequence[Mapping[str, Any]], most: int, width: int) -> Samples:
    """Returns the samples of a dump's rows, as wide as if sequences had up to `most` tokens."""
    groups = sorted({row["group"] for row in rows})
    first_rows = {group: next(r for r in rows if r["group"] == group) for group in groups}
    prompts = tuple(
        Prompt(
            tuple(row["prompt_tokens"]),
            row["input"],
            row["data_source"],
            row["gts"],
            row["extra_info"],
            row["index"],
        )
        for row in first_rows.values()
    )
    lengths = [len(row["prompt_tokens"]) + len(row["tokens"]) for row in rows]
    # As wide as they were sampled: other shapes are other programs, which round in other ways.
    width = max(width, max(lengths), episodes.padded_width(max(lengths), most))

    def whole(name: str, dtype: Any) -> np.ndarray:
        """Returns what is said of the answers' tokens as [B, T]."""
        found = np.zeros((len(rows), width), dtype)
        for at, row in enumerate(rows):
            begin = len(row["prompt_tokens"])
            if len(row[name]) != len(row["tokens"]):
                raise ValueError(f"line {at + 1}: {name!r} and 'tokens' differ in length")
            found[at, begin : lengths[at]] = row[name]
        return found

    tokens = whole("tokens", np.int32)
    for at, row in enumerate(rows):
        tokens[at, : len(row["prompt_tokens"])] = row["prompt_tokens"]
    rollouts = Rollouts(
        tokens=tokens,
        response_mask=whole("mask", bool),
        rollout_log_probs=whole("rollout_log_probs", np.float32),
        versions=whole("versions", np.int32),
        lengths=np.array(lengths, np.int32),
        group_ids=np.array([groups.index(row["group"]) for row in rows], np.int32),
        # An episode whose next turn did not fit was cut: a replay has no logs that say so.
        stopped=np.array(
            [row["stopped"] and not (row.get("errors") or {}).get("too_long") for row in rows], bool
        ),
        prompts=prompts,
        responses=tuple(row["output"] for row in rows),
    )

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], np.float32)

    def columns(name: str) -> dict[str, np.ndarray]:
        terms = rows[0][name]
        return {term: np.array([row[name][term] for row in rows], np.float32) for term in terms}

    failures = tuple(row.get("failure", "") for row in rows)
    left_out = np.array([row.get("left_out", False) for row in rows], bool)
    rewards = Rewards(
        scores=column("score"),
        terms=columns("terms"),
        weights=columns("weights"),
        costs=column("cost"),
        baselines=column("baseline"),
        details=tuple(row["details"] for row in rows),
        num_failures=0,
        failures=failures if any(failures) else (),
        left_out=left_out if left_out.any() else None,
    )
    return Samples(rollouts, rewards, Statistics())


def check(
    dumps: Sequence[pathlib.Path],
    config: RLConfig,
    vocab_size: int,
    suppressed: TokenRanges = (),
) -> None:
    """Raises DataError as `read`, for the first of the dumps; the others come one by one."""
    if dumps:
        read(dumps[0], config, vocab_size, suppressed=suppressed)
