"""Runs of `rl.train` in this process, small enough to try every algorithm in the loop."""

import copy
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import digits

from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.recipes import RECIPES

SEQUENCES = 64  # of a step
# How long something took differs from run to run; all other numbers must not.
MEASURED = (
    "timing_",
    "perf/",
    "rollout/prefill_tokens_per_s",
    "rollout/decode_tokens_per_s",
    "alerts/throughput",
    "alerts/disk",
)

# Sums of two digits by a model of 60 thousand parameters, taught by a teacher who errs in every
# second sum: it begins with a score of a third and learns which half to believe.
SUMS: Mapping[str, Any] = {
    "model": {
        "hidden_size": 64,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "mlp_size": 128,
    },
    "data": {
        "task": "arithmetic",
        "arithmetic_terms": 2,
        "arithmetic_train_prompts": 48,
        "arithmetic_eval_prompts": 4,
        "arithmetic_errors": 0.5,
        "max_prompt_tokens": 8,
        "chat_template": False,
    },
    "rollout": {"max_response_tokens": 12},
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}, "num_workers": 1},
    # Towards the end nearly all groups are right, and dynamic sampling has to search.
    "algorithm": {"max_sampling_waves": 60},
    "warm_start": {
        "num_steps": 800,
        "batch_size": 64,
        "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "weight_decay": 0.0},
    },
    "critic": {"optimizer": {"learning_rate": 1e-3}},
    "trainer": {
        "num_steps": 40,
        "max_tokens_per_microbatch": 4096,
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3, "weight_decay": 0.0},
    },
    "evaluation": {"before": False, "after": False},
    "metrics": {"console": False, "tensorboard": False},
}
# Without a warm start, which takes longer than a test of one or two steps may.
UNTAUGHT: Mapping[str, Any] = {
    "rewards": {"functions": {"answer": {"function": f"{digits.__file__}:score"}}},
    "warm_start": {"num_steps": 0},
}


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested settings with `changes` on top."""
    result = dict(copy.deepcopy(dict(values)))
    for key, change in changes.items():
        inner = result.get(key)
        # An empty mapping takes away what was there.
        both = isinstance(change, Mapping) and isinstance(inner, Mapping) and change
        result[key] = merged(inner, change) if both else change
    return result


def config(recipe: str, changes: Mapping[str, Any] = {}) -> RLConfig:
    """Returns a run of `SEQUENCES` sums a step by a recipe, with `changes` on top."""
    samples = RECIPES[recipe].get("samples_per_prompt", 8)
    sizes = {
        "algorithm": {"recipe": recipe, "samples_per_prompt": samples},
        "trainer": {"prompts_per_step": SEQUENCES // samples},
    }
    if RECIPES[recipe].get("safe"):
        # A cost that nobody minds: right answers may cost up to 1.
        cost = {"cost_functions": {"harm": {"function": "arithmetic"}}}
        sizes = merged(sizes, {"algorithm": {"cost_limit": 1.0}, "rewards": cost})
    return from_config_dict(merged(merged(SUMS, sizes), changes))


def metrics(workdir: pathlib.Path) -> dict[int, dict[str, float]]:
    """Returns the numbers of each step that another run of the same seed must repeat."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {k: v for k, v in line["data"].items() if not k.startswith(MEASURED)}
        for line in lines
    }


def dump(workdir: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Returns the rollouts of a step."""
    lines = (workdir / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
