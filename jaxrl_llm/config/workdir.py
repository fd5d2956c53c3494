"""The workdir of a run, whose `config.json` ensures that only the same run resumes in it."""

import json
import os
import re
import reprlib

from flax.traverse_util import flatten_dict

from jaxrl_llm.config.bridge import from_config_dict, to_dict
from jaxrl_llm.config.job import JobConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.storage import files
from jaxrl_llm.text import json_value

# Settings that a resumed run may change: its length, logging and checkpoints, and the parallelism.
# All others change the results.
RESUMABLE = (
    "trainer.num_steps", "trainer.stop_when", "evaluation", "checkpoint", "metrics", "alerts",
    "profiler",
    "trainer.max_tokens_per_microbatch", "mesh", "placement", "model.remat", "model.attention",
    "trainer.layouts", "rollout.num_slots", "rollout.cache_tokens", "rollout.chunk_steps",
    "rollout.speculation", "rollout.prefix_caching", "rollout.window_cache", "rollout.vllm",
    "rewards.num_workers", "rewards.timeout_s", "rewards.memory_gib", "rewards.environment",
    "rewards.ray_workers", "agent.ray_workers", "agent.num_processes", "agent.memory_gib",
    "agent.harness_timeout_s", "agent.max_harness_processes",
)  # fmt: skip

# Written last into a checkpoint folder (`checkpoint/seal.py`); a folder with it is complete.
SEAL_FILE = "sha256.json"
_STEP = re.compile("[1-9][0-9]{0,17}")  # the name of a checkpoint folder

# Outputs of a run besides its config; a new run never writes into a folder that has them.
OUTPUTS = ("checkpoints", "metrics.jsonl", "goodput.jsonl", "rollouts", "tensorboard")


def check_workdir(config: JobConfig, workdir: str | os.PathLike[str]) -> None:
    """Checks that `workdir` can be the folder of this run; writes nothing.

    Raises:
      ConfigError: If it is a file or lies below one, belongs to a run with other settings or more
        finished steps, or holds outputs without a `config.json`.
    """
    path = files.absolute(files.run_path(workdir)) / "config.json"
    for folder in () if files.in_bucket(path) else path.parents:
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise ConfigError(f"--workdir: {folder} is a file; name a folder, made if missing")
    has_config, entries = files.is_file(path), files.names(path.parent)
    if not has_config and (outputs := [name for name in OUTPUTS if name in entries]):
        message = (
            f"{workdir} holds {', '.join(outputs)} but no config.json, so it is no run that can"
        )
        raise ConfigError(f"{message} go on; use another --workdir")
    if has_config:
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
    folder = files.run_path(workdir) / "checkpoints"
    steps = sorted((int(n) for n in files.names(folder) if _STEP.fullmatch(n)), reverse=True)
    complete = (step for step in steps if files.is_file(folder / str(step) / SEAL_FILE))
    return next(complete, 0)


def claim_workdir(config: JobConfig, workdir: str | os.PathLike[str], write: bool = True) -> None:
    """Checks as `check_workdir`; if `write`, this process also writes `config.json`."""
    check_workdir(config, workdir)
    if write:
        text = json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"
        files.replace_text(files.run_path(workdir) / "config.json", text)


def load_config(workdir: str | os.PathLike[str]) -> JobConfig:
    """Loads the config of the run in `workdir`; raises ConfigError if it cannot be read."""
    path = files.run_path(workdir) / "config.json"
    try:
        values = json_value(files.read_bytes(path))
        if not isinstance(values, dict):
            raise ValueError(f"it holds {reprlib.repr(values)}, no settings")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); is this a run's folder?") from error
    if "model_type" in values:
        message = f"{workdir}: the folder of a model, not of a run; give it as --model where a"
        raise ConfigError(f"{message} command has that, or to a run as --config.model.path")
    return from_config_dict(values)
