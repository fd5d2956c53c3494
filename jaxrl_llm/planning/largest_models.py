"""The largest model that a device can train, by job and by the weights that are trained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config import ConfigError, JobConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.planning.accelerators import GIB
from jaxrl_llm.planning.memory_plan import MemoryPlan
from jaxrl_llm.planning.resolve_sizes import HardwareTarget

# Dense models of one family, from small to large.
MODELS = tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B"))
_GROUP, _PROMPTS, _PROMPT_TOKENS = 8, 8, 512
_ADAPTERS = {"rank": 32, "alpha": 32.0}
# What is trained: settings beside those of the job.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "all weights": {"model": {"param_dtype": "float32"}},
    "adapters": {"model": {"param_dtype": "bfloat16"}, "lora": _ADAPTERS},
    "adapters, nf4 base": {
        "model": {"param_dtype": "bfloat16", "quantization": "nf4"},
        "lora": _ADAPTERS,
    },
}


def _supervised(job: str, tokens: int, batch_size: int) -> dict[str, Any]:
    return {
        "job": job,
        "data": {"task": "files", "train_files": (f"data/{job}.jsonl",)},
        "trainer": {"batch_size": batch_size, "max_sequence_tokens": tokens},
    }


def _grpo(response_tokens: int) -> dict[str, Any]:
    return {
        "job": "rl",
        "data": {
            "task": "gsm8k",
            "train_files": ("data/gsm8k/train.jsonl",),
            "eval_files": ("data/gsm8k/test.jsonl",),
            "max_prompt_tokens": _PROMPT_TOKENS,
        },
        "rollout": {"max_response_tokens": response_tokens},
        "rewards": {"functions": {"answer": {"function": "gsm8k"}}},
        "algorithm": {"recipe": "grpo", "samples_per_prompt": _GROUP, "kl_coef": 0.001},
        "trainer": {"prompts_per_step": _PROMPTS, "minibatch_size": _PROMPTS * _GROUP},
    }


JOBS: Mapping[str, Mapping[str, Any]] = {
    "sft, 4096 tokens": _supervised("sft", 4096, 16),
    "dpo, 4096 tokens": _supervised("dpo", 4096, 16),
    "grpo, 512 + 1024 tokens": _grpo(1024),
    "grpo, 512 + 4096 tokens": _grpo(4096),
}


class LargestModel(NamedTuple):
    """The largest of `MODELS` that a job can train on a target."""

    job: str
    method: str
    plan: MemoryPlan | None  # None: not even the smallest fits

    def __str__(self) -> str:
        if self.plan is None:
            return "none"
        name = self.plan.job.model.path.rpartition("/")[2]
        return f"{name} ({self.plan.peak_bytes / GIB:.1f} GiB)"


def make_config(job: str, method: str, model: str) -> JobConfig:
    """The config of a row of the table for one model."""
    settings, changes = JOBS[job], METHODS[method]
    model_settings = {"path": model, "compute_dtype": "bfloat16", "remat": "full"}
    values = {**settings, **changes, "model": {**model_settings, **changes["model"]}}
    longest = _longest_sequence(settings)
    trainer = {"max_tokens_per_microbatch": longest, **settings["trainer"]}
    return from_config_dict({**values, "trainer": trainer})


def _longest_sequence(settings: Mapping[str, Any]) -> int:
    if "rollout" in settings:
        return settings["data"]["max_prompt_tokens"] + settings["rollout"]["max_response_tokens"]
    return settings["trainer"]["max_sequence_tokens"]


def largest_models(target: HardwareTarget) -> Iterator[LargestModel]:
    """The largest model of each job and method, in the order of `JOBS` and `METHODS`."""
    for job in JOBS:
        for method in METHODS:
            fitting = (_fitting_plan(job, method, model, target) for model in reversed(MODELS))
            yield LargestModel(job, method, next((plan for plan in fitting if plan), None))


def _fitting_plan(job: str, method: str, model: str, target: HardwareTarget) -> MemoryPlan | None:
    config = resolve_sizes.fit_mesh(make_config(job, method, model), target)
    try:
        plan = resolve_sizes.make_plan(config, target)
    except ConfigError:  # a mesh that cannot split this model
        return None
    return plan if plan.fits else None


def table(rows: Sequence[LargestModel], target: HardwareTarget) -> str:
    """The rows as text, a line per job and a column per method."""
    width = max(map(len, JOBS)) + 2
    device = target.device
    title = f"{target.num_devices} x {device.name}, {device.memory_bytes / GIB:.1f} GiB each"
    lines = [f"largest model that fits {title}:", ""]
    lines.append(f"{'':{width}}" + "".join(f"{method:24}" for method in METHODS).rstrip())
    cells = {(row.job, row.method): str(row) for row in rows}
    for job in JOBS:
        line = f"{job:{width}}" + "".join(f"{cells[job, method]:24}" for method in METHODS)
        lines.append(line.rstrip())
    return "\n".join(lines)
