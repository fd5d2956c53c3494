"""The workdir of a run, whose `config.json` ensures that only the same run resumes in it."""

import contextlib
import json
import os
import pathlib
import re
import reprlib
from collections.abc import Iterator

from flax.traverse_util import flatten_dict

from jaxrl_llm.config.bridge import from_config_dict, to_dict
from jaxrl_llm.config.job import JobConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.text import json_value

# Settings that a resumed run may change: its length, logging and checkpoints, and the parallelism.
# All others change the results.
RESUMABLE = (
    "trainer.num_steps", "evaluation", "checkpoint", "metrics", "alerts", "profiler",
    "trainer.max_tokens_per_microbatch", "mesh", "placement", "model.remat", "model.attention",
    "trainer.layouts", "rollout.num_slots", "rollout.cache_tokens", "rollout.chunk_steps",
    "rollout.speculation",
    "rewards.num_workers", "rewards.timeout_s", "rewards.memory_gib", "rewards.environment",
    "rewards.ray_workers", "agent.ray_workers", "agent.num_processes", "agent.memory_gib",
)  # fmt: skip

# Written last into a checkpoint folder (`checkpoint/seal.py`); a folder with it is complete.
SEAL_FILE = "sha256.json"
_STEP = re.compile("[1-9][0-9]{0,17}")  # the name of a checkpoint folder

# Outputs of a run besides its config; a new run never writes into a folder that has them.
OUTPUTS = ("checkpoints", "metrics.jsonl", "rollouts", "tensorboard")


def check_workdir(config: JobConfig, workdir: str | os.PathLike[str]) -> None:
    """Checks that `workdir` can be the folder of this run; writes nothing.

    Raises:
      ConfigError: If it is a file or lies below one, belongs to a run with other settings or more
        finished steps, or holds outputs without a `config.json`.
    """
    path = pathlib.Path(workdir).absolute() / "config.json"
    for folder in path.parents:
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise ConfigError(f"--workdir: {folder} is a file; name a folder, made if missing")
    if not path.exists() and (outputs := [n for n in OUTPUTS if (path.parent / n).exists()]):
        message = (
            f"{workdir} holds {', '.join(outputs)} but no config.json, so it is no run that can"
        )
        raise ConfigError(f"{message} go on; use another --workdir")
    if path.exists():
        ours, theirs = (flatten_dict(to_dict(c), sep=".") for c in (config, load_config(workdir)))
        changed = [
            f"config.{key}: {ours.get(key, 'not set')!r} here, {theirs.get(key, 'not set')!r} there"
            for key in sorted(ours.keys() | theirs.keys())
            if not any(f"{key}.".startswith(f"{name}.") for name in RESUMABLE)
            and ours.get(key) != theirs.get(key)
        ]
        if changed:
            message = f"{path} belongs to another run; use another --workdir, or the same settings"
            raise ConfigError([message, *changed])
    done = newest_step(path.parent)
    if config.trainer.num_steps < done:
        message = f"config.trainer.num_steps: {config.trainer.num_steps}, but {workdir} has done"
        remedy = f"set it above {done} to go on, or use another --workdir"
        raise ConfigError(f"{message} {done} steps; {remedy}")


def newest_step(workdir: str | os.PathLike[str]) -> int:
    """The newest step with a complete checkpoint in the folder of a run, 0 if there is none."""
    folders = pathlib.Path(workdir).glob("checkpoints/*")
    complete = (each.name for each in folders if (each / SEAL_FILE).is_file())
    return max((int(name) for name in complete if _STEP.fullmatch(name)), default=0)


def claim_workdir(config: JobConfig, workdir: str | os.PathLike[str], write: bool = True) -> None:
    """Checks as `check_workdir`; if `write`, this process also writes `config.json`."""
    check_workdir(config, workdir)
    if write:
        text = json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"
        replace_text(pathlib.Path(workdir) / "config.json", text)


@contextlib.contextmanager
def naming_file(path: pathlib.Path) -> Iterator[None]:
    """Adds `path` to an OSError raised inside; a failed write alone names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes `path` atomically: a reader sees the old or the new file, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")  # one process writes; a kill leaves one at most
    try:
        with naming_file(path):
            partial.write_text(text, encoding="utf-8", errors="replace")  # lone surrogates: "?"
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load_config(workdir: str | os.PathLike[str]) -> JobConfig:
    """Loads the config of the run in `workdir`; raises ConfigError if it cannot be read."""
    path = pathlib.Path(workdir) / "config.json"
    try:
        values = json_value(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds {reprlib.repr(values)}, no settings")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); is this a run's folder?") from error
    if "model_type" in values:
        message = f"{workdir}: the folder of a model, not of a run; give it as --model where a"
        raise ConfigError(f"{message} command has that, or to a run as --config.model.path")
    return from_config_dict(values)
