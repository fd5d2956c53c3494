"""Rollouts from the dumps of another run, to debug losses without sampling."""

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
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models.hf.vocabulary import TokenRanges, is_inside
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.requests import EngineStatistics
from jaxrl_llm.sampling.source import ScoredRollouts
from jaxrl_llm.storage import files
from jaxrl_llm.text import split_lines
from jaxrl_llm.types import Prompt, Rewards, Rollouts, Weights


class DumpSource:
    """A `RolloutSource` (source.py) that replays dumps, one a step.

    With the config of the run that wrote them, each step repeats that run's update: scores, engine
    log-probs and versions come from the dump.
    """

    def __init__(
        self,
        dumps: Sequence[pathlib.Path],
        config: RLConfig,
        vocab_size: int,
        width: int = 0,
        suppressed: TokenRanges = (),
    ):
        """`width` is T of the original rollouts; 0: derived from each step's longest sequence."""
        self._dumps, self._config, self._vocab_size = dumps, config, vocab_size
        self._width, self._suppressed = width, suppressed
        self._num_taken = 0

    def next_batch(self, weights: Weights, key: jax.Array, clock: Clock) -> ScoredRollouts:
        """Scored rollouts of the next dump; see `RolloutSource.next_batch`."""
        del weights, key
        with clock("gen"):
            path = self._dumps[self._num_taken]
            samples = read_dump(
                path, self._config, self._vocab_size, self._width, suppressed=self._suppressed
            )
        self._num_taken += 1
        return samples

    def on_wait(self, pending: Any) -> None:
        """Does nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Metric `replay/step`, the step of the dump."""
        return {"replay/step": float(self._dumps[self._num_taken - 1].stem)}

    def get_state(self) -> Mapping[str, Any]:
        return {"dumps": self._num_taken}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._num_taken = state["dumps"]


def find_dumps(paths: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """The dump files of paths, in their order; those of a folder sorted by step.

    Raises:
      DataError: If one is missing, or a folder has none.
    """
    dumps: list[pathlib.Path] = []
    for path in map(files.run_path, paths):
        is_dump = re.fullmatch(r"\d+\.jsonl", path.name) and files.is_file(path)
        if is_dump:
            dumps.append(path)
        elif files.exists(path):
            step_files = [path / name for name in files.names(path) if name.endswith(".jsonl")]
            numbered = [each for each in step_files if each.stem.isdecimal()]
            dumps += sorted(numbered, key=lambda each: int(each.stem))
        else:
            raise DataError(f"--replay: {path}: no dump; name WORKDIR/rollouts/STEP.jsonl")
    if paths and not dumps:
        raise DataError(f"--replay: no dump STEP.jsonl in {', '.join(map(str, paths))}")
    return dumps


def read_dump(
    path: pathlib.Path,
    config: RLConfig,
    vocab_size: int,
    width: int = 0,
    suppressed: TokenRanges = (),
) -> ScoredRollouts:
    """Scored rollouts of a dump; `width` as in `DumpSource`.

    Tokens in `suppressed` have probability 0 under the policy.

    Raises:
      DataError: If it holds no tokens, or does not fit this run.
    """

    def dump_error(what: str, remedy: str) -> DataError:
        return DataError(f"--replay: {path}: {what}; {remedy}")

    try:
        rows = [json.loads(line) for line in split_lines(files.read_text(path))]
        if not all("prompt_tokens" in row for row in rows):
            remedy = "write dumps with --config.metrics.rollout_tokens=True"
            raise dump_error("holds no tokens", remedy)
        if any(("support" in row) != bool(config.rollout.support_tokens) for row in rows):
            setting = f"rollout.support_tokens={config.rollout.support_tokens}"
            problem = f"its run did not sample with {setting}, as this one learns"
            raise dump_error(problem, "set rollout.support_tokens as in its run")
        samples = _scored_rollouts(
            rows, config.max_sequence_tokens, width, config.rollout.support_tokens
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        problem = f"no dump of rollouts ({type(error).__name__}: {error})"
        raise dump_error(problem, "use a file that a run wrote") from error
    tokens, lengths = samples.rollouts.tokens, samples.rollouts.lengths
    if len(rows) != config.sequences_per_step:
        problem = f"{len(rows)} sequences, but a step has {config.sequences_per_step}"
        remedy = "set trainer.prompts_per_step and algorithm.samples_per_prompt as in its run"
        raise dump_error(problem, remedy)
    if lengths.max() > config.max_sequence_tokens:
        problem = f"a sequence has {lengths.max()} tokens, above {config.max_sequence_tokens}"
        raise dump_error(problem, "raise data.max_prompt_tokens or rollout.max_response_tokens")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        problem = f"the token {tokens.max()} is not among the model's {vocab_size}"
        raise dump_error(problem, "use the model of its run")
    if (support := samples.rollouts.support) is not None:
        is_outside = (support != tokens[..., None]).all(-1) & samples.rollouts.response_mask
        if support.max() >= vocab_size or (support < -1).any() or is_outside.any():
            raise dump_error("a token is not in its support", "use a file that a run wrote")
    impossible = np.asarray(is_inside(jnp.asarray(tokens), suppressed))
    if (sampled := tokens[impossible & samples.rollouts.response_mask]).size:
        problem = (
            f"the token {sampled[0]} was sampled, which stands for no text and has probability 0"
        )
        raise dump_error(problem, "set rollout.suppress_unused_tokens=False, as in its run")
    return samples


def _scored_rollouts(
    rows: Sequence[Mapping[str, Any]], max_tokens: int, width: int, support_tokens: int
) -> ScoredRollouts:
    """Builds the rollouts of a dump's rows, padded for sequences of up to `max_tokens` tokens.

    With `support_tokens` they have supports of at most that size.
    """
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
    # As wide as they were sampled: another width compiles another program, which may round
    # differently.
    width = max(width, max(lengths), episodes.padded_width(max(lengths), max_tokens))

    def token_field(name: str, dtype: Any) -> np.ndarray:
        """A per-token field of the responses as [B, T], zero elsewhere."""
        array = np.zeros((len(rows), width), dtype)
        for row_index, row in enumerate(rows):
            begin = len(row["prompt_tokens"])
            if len(row[name]) != len(row["tokens"]):
                raise ValueError(f"line {row_index + 1}: {name!r} and 'tokens' differ in length")
            array[row_index, begin : lengths[row_index]] = row[name]
        return array

    tokens = token_field("tokens", np.int32)
    for row_index, row in enumerate(rows):
        tokens[row_index, : len(row["prompt_tokens"])] = row["prompt_tokens"]
    support = None
    if support_tokens:
        support = np.full((*tokens.shape, support_tokens), -1, np.int32)
        for row_index, row in enumerate(rows):
            begin = len(row["prompt_tokens"])
            for position, ids in enumerate(row["support"], begin):
                support[row_index, position, : len(ids)] = ids
    rollouts = Rollouts(
        tokens=tokens,
        support=support,
        response_mask=token_field("mask", bool),
        rollout_log_probs=token_field("rollout_log_probs", np.float32),
        versions=token_field("versions", np.int32),
        lengths=np.array(lengths, np.int32),
        group_ids=np.array([groups.index(row["group"]) for row in rows], np.int32),
        # An episode whose next turn did not fit was truncated; no log says so here.
        stopped=np.array(
            [row["stopped"] and not (row.get("errors") or {}).get("too_long") for row in rows], bool
        ),
        prompts=prompts,
        responses=tuple(row["output"] for row in rows),
        roles=np.array([row["role"] for row in rows], np.int32) if "role" in rows[0] else None,
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
        excluded=left_out if left_out.any() else None,
    )
    return ScoredRollouts(rollouts, rewards, EngineStatistics())


def check_dumps(
    dumps: Sequence[pathlib.Path],
    config: RLConfig,
    vocab_size: int,
    suppressed: TokenRanges = (),
) -> None:
    """Checks the first dump; the others are checked as they are read. Raises as `read_dump`."""
    if dumps:
        read_dump(dumps[0], config, vocab_size, suppressed=suppressed)
