"""Rollout dumps: what was asked, answered and scored, one file a step.

Files are JSON lines under verl's keys, readable by its viewers.
"""

import io
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.errors import naming
from jaxrl_llm.types import Rewards, Rollouts


def write_rollouts(
    folder: str | os.PathLike[str], step: int, rollouts: Rollouts, rewards: Rewards
) -> pathlib.Path:
    """Writes `FOLDER/STEP.jsonl`, complete or not at all; returns its path.

    A line holds `input`, `output`, `gts`, `score`, `step` and beside verl's keys
    `data_source`, `num_tokens` (of the response), `stopped`, `terms` (each reward term,
    unweighted) and `details` (what reward functions returned beside the score).

    Args:
      folder: Made if missing.
      step: Names the file; a file of that name is replaced.
      rollouts: The sequences, one line each.
      rewards: What they are worth.
    """
    lines = []
    for row, output in enumerate(rollouts.responses):
        prompt = rollouts.prompt_of(row)
        record = {
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
        }
        lines.append(json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")
    path = pathlib.Path(folder) / f"{step}.jsonl"
    replace_text(path, "".join(lines))
    return path


def jsonable(value: Any) -> Any:
    """Returns `value` as JSON can hold it.

    Arrays become lists, numbers that are not finite become None (JSON has no NaN), and
    objects that JSON does not know become their text.

    >>> jsonable({"a": np.float32(0.5), "b": (1, float("nan"))})
    {'a': 0.5, 'b': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def write_all(file: io.RawIOBase, data: bytes) -> None:
    """Writes all of `data` to an unbuffered file, which may take a part at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes `path` so that a reader sees the file before or after, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")  # one process writes; a kill leaves one at most
    try:
        with naming(path):
            partial.write_text(text, encoding="utf-8", errors="replace")  # lone surrogates: "?"
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
