"""Published datasets are trained from with a config alone: the right job takes a step."""

import gzip
import json

import hub_server
import jax
import numpy as np
import pyarrow
import pytest
import runs
from published_rows import LAYOUTS, OTHERS
from pyarrow import parquet

import jaxrl_llm
from jaxrl_llm.errors import ConfigError

REWARDS = {"gsm8k": "gsm8k", "math": "math", "math_500": "math", "rlvr": "gsm8k"}


def config(job, files, **data):
    """Returns one step of a job over rows in files, with a model that is tiny."""
    found = jaxrl_llm.default_config(job)
    found.model.update(
        {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_size": 16}
    )
    found.model.mlp_size = 32
    found.data.update({"task": "files", "train_files": files, "max_prompt_tokens": 256, **data})
    found.trainer.num_steps = 1
    found.metrics.tensorboard = found.metrics.console = False
    found.metrics.rollouts_every = 1
    found.evaluation.update({"before": False, "after": False, "every": 0})
    if job == "rl":
        found.algorithm.update({"recipe": "grpo", "samples_per_prompt": 2})
        found.rollout.max_response_tokens = 8
        found.trainer.update({"prompts_per_step": 2, "minibatch_size": 4})
    else:
        found.trainer.update({"batch_size": 2, "max_sequence_tokens": 512})
    return found


def write(path, rows):
    """Writes rows four times, so that every step has enough."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows * 4), path)
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows * 4).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *OTHERS])
def test_a_step_of_a_published_layout(name, tmp_path, one_device):
    layout = LAYOUTS.get(name) or OTHERS[name]
    file = write(tmp_path / "train-00000-of-00001.parquet", layout.rows)
    found = config(layout.job, (file,), **{"preset": name, **layout.changes})
    if layout.job == "rl":
        found.rewards.functions.answer = {"function": REWARDS.get(name, "length")}
    jaxrl_llm.train(found, tmp_path / "run")
    (step,) = runs.metrics(tmp_path / "run").keys() - {0}
    assert step == 1
    if layout.job == "rl":
        dump = (tmp_path / "run" / "rollouts" / "1.jsonl").read_text().splitlines()
        prompts = [json.loads(line)["input"] for line in dump]
        assert any(layout.messages[-1][1] in prompt for prompt in prompts)


@pytest.mark.slow
def test_a_resumed_run_reads_the_commit_that_it_began_with(tmp_path, one_device, monkeypatch):
    rows = {name: json.dumps(LAYOUTS["alpaca"].rows[i]) for i, name in enumerate(("old", "new"))}

    def train(workdir, num_steps, *files):
        found = config("sft", files or ("org/words:train[:90%]",), preset="alpaca", shuffle=False)
        found.trainer.num_steps, found.checkpoint.every = num_steps, 1
        return jax.tree.leaves(jax.device_get(jaxrl_llm.train(found, tmp_path / workdir)))

    with hub_server.HubServer() as hub:
        hub_server.use_hub(monkeypatch, hub, tmp_path / "hf")
        commit = hub.add("org/words", {"train.jsonl": f"{rows['old']}\n".encode() * 9}, "dataset")
        train("run", 1)
        saved = json.loads((tmp_path / "run" / "config.json").read_text())["data"]["train_files"]
        assert saved == [f"hf://datasets/org/words@main#{commit}:train[:90%]"]
        hub.add("org/words", {"train.jsonl": f"{rows['new']}\n".encode() * 9}, "dataset")
        resumed = train("run", 3)
        with pytest.raises(ConfigError, match="belongs to another run"):
            train("run", 3, "org/words:train")
    whole = train("whole", 3, write(tmp_path / "old.jsonl", LAYOUTS["alpaca"].rows[:1]))
    assert all(np.array_equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.slow
def test_streamed_slices_of_compressed_files_resume_bit_for_bit(tmp_path, one_device):
    folder = tmp_path / "rows"
    folder.mkdir()
    for i, name in enumerate(("a.jsonl.gz", "b.jsonl", "c.parquet")):
        rows = [{**LAYOUTS["alpaca"].rows[0], "input": f"{i} {j}"} for j in range(5)]
        write(folder / name, rows)
    data = {"preset": "alpaca", "stream": True, "system_prompt": "Be brief."}

    def train(workdir, num_steps):
        found = config("sft", (f"{folder}/*[10%:-3]",), **data)
        found.trainer.num_steps, found.checkpoint.every = num_steps, 1
        state = jaxrl_llm.train(found, tmp_path / workdir)
        return jax.tree.leaves(jax.device_get(state))

    whole = train("whole", 4)
    train("parts", 2)
    resumed = train("parts", 4)
    assert all(np.array_equal(a, b) for a, b in zip(whole, resumed, strict=True))
    ours, theirs = (runs.metrics(tmp_path / workdir) for workdir in ("whole", "parts"))
    assert runs.repeatable(ours[4]) == runs.repeatable(theirs[4])
