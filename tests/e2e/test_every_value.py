"""Every number and text at what users get wrong: one clear problem, or a run that takes a step."""

import json
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest
import runs
from config_fields import declared, nested

import jaxrl_llm
from jaxrl_llm.algorithms.requirements import loss_hyperparameters
from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import JOBS, from_config_dict
from jaxrl_llm.config.recipes import POLICY_LOSSES
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.hf import checkpoint, config_reader
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.processes.supervisor import descendants

NUMBERS = (math.nan, math.inf, -math.inf, -1, 0, 1e-30, 1e30, 2**31, 2**63)
TEXTS = ("", "x" * 2**20, "a\ud800b", "a\0b")
# A folder where a file is wanted, by every suffix that something reads; a file for a folder.
FOLDERS = ("folder", "folder.jsonl", "folder.parquet", "folder.jinja", "folder.py:score", "file")
VALUES = (*TEXTS, *FOLDERS)

BASE: Mapping[str, Any] = {
    **runs.TINY,
    **runs.SAFE_RLHF,
    "rewards.functions.NAME.function": "arithmetic",
    "rewards.cost_functions.NAME2.function": "length",
    "evaluation.functions.NAME.function": "arithmetic",
    "evaluation.num_prompts": 2,
    "evaluation.before": False,
    "evaluation.after": False,
    "warm_start.num_steps": 0,
    "warm_start.batch_size": 2,
}
SUPERVISED: Mapping[str, Any] = {
    **{k: v for k, v in runs.TINY.items() if k.startswith(("model", "data"))},
    "data.task": "arithmetic",
    "data.chat_template": False,
    "rollout.max_response_tokens": 4,
    "trainer.num_steps": 1,
    "trainer.batch_size": 2,
    "trainer.max_sequence_tokens": 64,
    "evaluation.functions.NAME.function": "arithmetic",
    "evaluation.num_prompts": 2,
    "evaluation.before": False,
    "evaluation.after": False,
    "metrics.tensorboard": False,
}
PREFERENCE = {"preference.num_steps": 1, "preference.batch_size": 2}
FILES = {"data.task": "files", "warm_start.num_steps": 0, "data.eval_files": ("ROWS",)}
ROWS = {**FILES, "data.train_files": ("ROWS",)}
WEIGHTS = {
    "data.train_weights": (1.0,),
    "data.last_train_weights": (0.5,),
    "data.last_train_weights_after": 2,
}
EXPERTS = {"model.family": "mixtral"}
# With biases that select experts, which random models have not.
GLM4_MOE = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
}
# What a run must have so that it reads a field.
READ_WITH: Mapping[str, Mapping[str, Any]] = {
    "lora": {"lora.rank": 2},
    "evaluation": {"evaluation.after": True},
    "warm_start": {"warm_start.num_steps": 1},
    "rollout": {"evaluation.after": True},
    "data.prompt_column": ROWS,
    "data.prompt_template": ROWS,
    "data.system_prompt": ROWS,
    "data.answer_pattern": {**ROWS, "data.columns": {"answer": "data_source"}},
    "data.extra_columns": ROWS,
    "data.transcript_roles": ROWS,
    "data.data_source": ROWS,
    "data.train_files": FILES,
    "data.train_weights": {**ROWS, **WEIGHTS},
    "data.last_train_weights": {**ROWS, **WEIGHTS},
    "data.eval_files": ROWS,
    "curriculum": {"curriculum.choice": "success"},
    "model.num_experts": EXPERTS,
    "model.experts_per_token": EXPERTS,
    "router": EXPERTS,
    "router.bias_rate": {"model.path": "EXPERTS"},
    "model.chat_template": {"data.chat_template": True},
    "algorithm.loss_args.tau": {"algorithm.policy_loss": "sapo"},
    "algorithm.loss_args.beta": {"algorithm.policy_loss": "dro"},
    "algorithm.loss_args.coef": {"algorithm.policy_loss": "kl_cov"},
    **{
        f"algorithm.loss_args.{name}": {"algorithm.policy_loss": "clip_cov"}
        for name in ("share", "low", "high")
    },
    **{
        f"algorithm.loss_args.{name}": {"algorithm.policy_loss": "vespo"}
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "algorithm.loss_args.budget": {"algorithm.policy_loss": "m2po"},
    "algorithm.rejection": {
        "algorithm.rejections": ("token_k1",),
        "algorithm.rejection_lows": (0.5,),
        "algorithm.rejection_highs": (2.0,),
    },
    "algorithm.critic_warmup_steps": {"trainer.epochs": 1},
    "algorithm.max_sampling_waves": {"algorithm.dynamic_sampling": True},
    "algorithm.dynamic_sampling_term": {"algorithm.dynamic_sampling": True},
    "preference": {**PREFERENCE, "rewards.models.MODEL.path": ""},
    "rewards.models": {**PREFERENCE, "rewards.models.NAME3.path": ""},
    "rewards.cost_models": {**PREFERENCE, "rewards.cost_models.NAME4.path": ""},
    "distillation": {"distillation.teachers.NAME5.path": "EXPERTS"},
    "rewards.failure_score": {"rewards.on_failure": "score"},
    "rollout.speculation": {"rollout.speculation.draft_tokens": 2},
    "rollout.temperature": {"algorithm.samples_per_prompt": 1, "trainer.minibatch_size": 2},
    "placement": {
        "placement.choice": "by_hand",
        "placement.pools.NAME.devices": -1,
        **{
            f"placement.roles.{role}": "NAME"
            for role in ("policy", "critic", "reference", "reward", "rollout")
        },
    },
    "alerts": {
        key: "continue"
        for key, *_ in declared(RLConfig)
        if key.startswith("alerts") and key.endswith("action")
    },
}
# Entries of mappings, each named differently: a reward and a cost may not share a name.
ENTRIES = {
    "cost_functions.NAME": "NAME2",
    "rewards.models.NAME": "NAME3",
    "cost_models.NAME": "NAME4",
    "teachers.NAME": "NAME5",
}


# Type of every number and text of a job, and whether the field is a tuple of them.
FIELDS: dict[str, dict[str, tuple[type, bool]]] = {
    job: {f.key: (f.kind, f.is_tuple) for f in declared(cls) if f.kind in (int, float, str)}
    for job, cls in JOBS.items()
}
FIELDS["rl"]["placement.roles.policy"] = str, False
FIELDS["rl"] |= {
    f"algorithm.loss_args.{name}": (float, False)
    for loss in POLICY_LOSSES
    for name in loss_hyperparameters(loss)
}


def read_with(key: str) -> str:
    """Returns the last entry of `READ_WITH` that a field needs, or ""."""
    return next((prefix for prefix in reversed(READ_WITH) if key.startswith(prefix)), "")


def renamed(key: str) -> str:
    """Returns the field of the entry that `READ_WITH` makes."""
    for end, name in ENTRIES.items():
        key = key.replace(f"{end}.", f"{end.removesuffix('NAME')}{name}.")
    return key


def described(keys: list[str], value: Any, job: str, files: pathlib.Path) -> dict[str, Any]:
    """Returns the smallest run that reads some fields, with all of them at a value."""
    changes = {**(BASE if job == "rl" else SUPERVISED), **READ_WITH.get(read_with(keys[0]), {})}
    if job != "rl" and changes["data.task"] == "files":
        changes["data.stream"] = True
    for key in keys:
        changes[renamed(key)] = (value,) if FIELDS[job][key][1] else value
    found: dict[str, Any] = runs.values("grpo_tiny").to_dict() if job == "rl" else {}
    found.get("rewards", {}).pop("functions", None)
    known = vars(JOBS[job]())
    places = {("ROWS",): (str(files / f"{job}.jsonl"),), "EXPERTS": str(files / "experts")}
    placed = {key: places.get(item, item) for key, item in changes.items()}
    return nested(
        {k: v for k, v in placed.items() if k.split(".")[0] in known}, {**found, "job": job}
    )


def refusal(key: str, value: Any, job: str, files: pathlib.Path) -> str:
    """Returns the problems of a field that its declaration or a rule between fields refuses."""
    try:
        from_config_dict(described([key], value, job, files))
    except UserError as error:
        return str(error)
    return ""


def outcome(description: Mapping[str, Any], workdir: pathlib.Path) -> str:
    """Returns the problem of a run, or "" if it takes a step."""
    try:
        jaxrl_llm.train(from_config_dict(description), workdir)
    except UserError as error:
        assert not workdir.exists(), error
        return str(error)
    assert max(runs.metrics(workdir)) == 1
    return ""


def left_behind(*folders: pathlib.Path) -> set[str]:
    """Returns the processes below this one, and the entries of folders."""
    processes = {f"process {number}" for number in descendants(os.getpid())}
    return processes | {str(path) for folder in folders for path in folder.iterdir()}


def take_steps(
    keys: list[str], value: Any, job: str, files: pathlib.Path, workdir: pathlib.Path
) -> dict[str, str]:
    """Returns each field's problem, or "": it was at its value in a run that took a step.

    Fields that nothing refuses share a run. One that a problem names is left out of the next.
    """
    said = outcome(described(keys, value, job, files), workdir)
    assert len(said) < 4000, said[:4000]
    if not said or len(keys) == 1:
        return dict.fromkeys(keys, said)
    named = [key for key in keys if re.search(rf"{renamed(key)}\b", said)]
    found = dict.fromkeys(named, said)
    rest = [key for key in keys if key not in named]
    parts = [rest] if named else [keys[: len(keys) // 2], keys[len(keys) // 2 :]]
    for i, part in enumerate(part for part in parts if part):
        found |= take_steps(part, value, job, files, workdir.with_name(f"{workdir.name}.{i}"))
    return found


def groups() -> Iterator[tuple[str, Any, str]]:
    """Yields what a group of fields is read with, their type, and the job that has them."""
    yield from dict.fromkeys(
        (read_with(key), kind, job)
        for job, all_fields in FIELDS.items()
        for key, (kind, _) in all_fields.items()
    )


@pytest.fixture(scope="session")
def experts(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("experts")
    network = Network(config_reader.architecture_from_config(GLM4_MOE))
    params = jax.jit(network.init)(jax.random.key(0))
    checkpoint.save(folder, network, params, character_tokenizer())
    return folder


@pytest.fixture
def files(tmp_path, experts) -> pathlib.Path:
    folder = tmp_path / "files"
    for name in FOLDERS:
        (folder / name.partition(":")[0]).mkdir(parents=True)
    (folder / "file").rmdir()
    (folder / "file").write_text("")
    row = {"data_source": "sums", "prompt": "1+2=", "reward_model": {"ground_truth": "3"}}
    pair = {**row, "chosen": "3", "rejected": "4"}
    (folder / "experts").symlink_to(experts)
    of_jobs = {"rl": row, "sft": {**row, "completion": "3"}, "dpo": pair, "reward_model": pair}
    for job, row in of_jobs.items():
        (folder / f"{job}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize(
    "prefix, kind, job, value",
    [(*group, v) for group in groups() for v in (VALUES if group[1] is str else NUMBERS)],
    ids=lambda v: getattr(v, "__name__", str(v)[:24].encode("ascii", "replace").decode()),
)
def test_fields_at_a_value(prefix, kind, job, value, files, tmp_path, one_device, monkeypatch):
    around, temporary = tmp_path / "runs", tmp_path / "temporary"
    around.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = left_behind(temporary, pathlib.Path())
    keys = [key for key, (k, _) in FIELDS[job].items() if (read_with(key), k) == (prefix, kind)]
    value = str(files / value) if value in FOLDERS else value
    declared = {key: refusal(key, value, job, files) for key in keys}
    found = {key: said for key, said in declared.items() if said}
    if rest := [key for key in keys if key not in found]:
        found |= take_steps(rest, value, job, files, around / "run")
    for key, said in found.items():
        print(f"CASE {key} = {str(value)[:40]!r}: {said[:300] or 'a step'}")
        assert len(said) < 4000, key
    assert left_behind(temporary, pathlib.Path()) <= before
