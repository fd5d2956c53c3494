"""Runs of the programs in `launch/`, as a user starts them, in sizes that take seconds."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import quick_compiler
from ml_collections import ConfigDict

from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import from_config_dict

ROOT = pathlib.Path(__file__).parents[2]

# 15 thousand parameters and 16 short sequences a step; everything else is the config's.
TINY: Mapping[str, Any] = {
    "model.hidden_size": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_size": 16,
    "model.mlp_size": 64,
    "data.max_prompt_tokens": 16,
    "rollout.max_response_tokens": 16,
    "warm_start.num_steps": 4,
    "warm_start.batch_size": 16,
    "algorithm.samples_per_prompt": 4,
    "trainer.num_steps": 12,
    "trainer.prompts_per_step": 4,
    "trainer.minibatch_size": 8,
    "evaluation.num_prompts": 8,
    "evaluation.samples_per_prompt": 1,
    "evaluation.temperature": 0.0,
    "evaluation.every": 5,
    "checkpoint.every": 3,
    "metrics.tensorboard": False,
}
# One step of Safe-RLHF, which reads most of the fields: two critics, a cost, KL in the reward.
SAFE_RLHF: Mapping[str, Any] = {
    "trainer.num_steps": 1,
    "trainer.prompts_per_step": 2,
    "trainer.minibatch_size": 4,
    "algorithm.recipe": "safe_rlhf",
    "algorithm.samples_per_prompt": 2,
    "algorithm.overlong_buffer_tokens": 4,
    "algorithm.correction": "token",
    "algorithm.kl_controller": "adaptive",
    "algorithm.aggregation": "seq-mean-token-sum-norm",
}
# What a config's run has besides, so that a resume is tried with it.
ALSO: Mapping[str, Mapping[str, Any]] = {
    "ppo_tiny": {
        "algorithm.kl_controller": "adaptive",
        "algorithm.kl_target": 0.01,
        "algorithm.kl_horizon": 100,
    },
}

# How long something took differs from run to run; all other numbers must not.
MEASURED = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/",
    "rollout/prefill_tokens_per_s",
    "rollout/decode_tokens_per_s",
    "alerts/throughput",
    "alerts/disk",
)


def values(name: str) -> ConfigDict:
    """Returns what `configs/NAME.py` describes."""
    spec = importlib.util.spec_from_file_location("config_file", ROOT / "configs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def changes(found: ConfigDict, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what makes a config tiny, as far as its job has it, with `settings` on top."""
    tiny = {key: value for key, value in TINY.items() if _has(found, key)}
    return {**tiny, **ALSO.get(name, {}), **settings}


def _has(found: Any, key: str) -> bool:
    for part in key.split("."):
        if part not in found:
            return False
        found = found[part]
    return True


def config(name: str, settings: Mapping[str, Any] = {}) -> RLConfig:
    """Returns the typed config of `configs/NAME.py`, made tiny, with `settings` on top."""
    found = values(name)
    found.update_from_flattened_dict(changes(found, name, settings))
    return from_config_dict(found)


def flags(name: str, settings: Mapping[str, Any] = {}) -> list[str]:
    """Returns the command line of the same run."""
    return [
        f"--config={ROOT / 'configs' / name}.py",
        *(f"--config.{k}={v}" for k, v in changes(values(name), name, settings).items()),
    ]


def start(
    program: str, arguments: Iterable[Any], cache: Any, root: pathlib.Path = ROOT, **options: Any
) -> subprocess.Popen:
    """Starts `launch/PROGRAM.py` on one CPU device; `cache` keeps compiled programs.

    `root` is the source tree whose program and package run.
    """
    environment = quick_compiler.environment(1, cache, [root], inherits_paths=False)
    return subprocess.Popen(
        [sys.executable, root / "launch" / f"{program}.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=environment,
        **options,
    )


def finish(process: subprocess.Popen, timeout_s: float = 400.0) -> subprocess.CompletedProcess:
    """Returns what the process said and its exit code."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def launch(program: str, arguments: Iterable[Any], cache: Any, **options: Any) -> str:
    """Runs `launch/PROGRAM.py` to its end, which must be a good one; returns its output."""
    result = finish(start(program, arguments, cache, **options))
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def refused(program: str, arguments: Iterable[Any], cache: Any, **options: Any) -> str:
    """Runs `launch/PROGRAM.py`, which must end with a message; returns the message."""
    result = finish(start(program, arguments, cache, **options))
    said = result.stdout + result.stderr
    assert result.returncode == 1, said[-4000:]
    assert not re.search(r"^[IWEF]\d{4} ", said, re.MULTILINE), said[-4000:]  # a log's prefix
    # Threads of tensorstore print their own traces when a disk is full; the program shows none.
    trace = "Traceback" in said and "Event loop is closed" not in said
    assert not trace and f'File "{ROOT}' not in said, said[-4000:]
    return said


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, limit_s=300.0) -> None:
    """Returns once the condition holds; the process must still be running then."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()[1][-4000:]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


def metrics(workdir: pathlib.Path) -> dict[int, dict[str, float]]:
    """Returns the numbers of each step, in the order of the file; a step has one line."""
    path = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), steps
    return {line["step"]: line["data"] for line in lines}


def repeatable(data: Mapping[str, float]) -> dict[str, float]:
    """Returns the numbers of a step that another run of the same seed must repeat."""
    return {name: value for name, value in data.items() if not name.startswith(MEASURED)}


def metrics_written(workdir: pathlib.Path) -> set[int]:
    """Returns the steps whose lines are complete, while the run may be writing more."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {json.loads(line)["step"] for line in lines if line.endswith("\n")}
