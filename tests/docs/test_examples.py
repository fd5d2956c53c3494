"""The configs of docs/examples.md take a step with a small random model, on the documents' rows."""

import json
import pathlib
import re

import pytest
import runs
import serving_model

import jaxrl_llm
from jaxrl_llm.config.bridge import from_config_dict

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "examples.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
# Rows that the document's blocks write, and what a run on them needs in place of the published.
SMALL = {
    "evaluation.before": False, "evaluation.after": False, "evaluation.every": 0,
    "trainer.num_steps": 1, "trainer.max_tokens_per_microbatch": 4096,
    "model.compute_dtype": "float32", "metrics.tensorboard": False,
}  # fmt: skip
RL = {
    "rollout.max_response_tokens": 48, "algorithm.samples_per_prompt": 2,
    "trainer.prompts_per_step": 1, "trainer.minibatch_size": 0,
    "algorithm.overlong_buffer_tokens": 0, "algorithm.dynamic_sampling": False,
}  # fmt: skip
PAIRS = {"trainer.batch_size": 2, "trainer.max_sequence_tokens": 256}
EXAMPLES = {
    "grpo_math_qwen2.5_1.5b": ("math.jsonl", RL),
    "grpo_code_qwen2.5_1.5b": ("code.jsonl", {**RL, "rewards.num_workers": 1}),
    "agent_search_qwen2.5_3b": ("questions.jsonl", RL),
    "dpo_qwen2.5_0.5b": ("pairs.jsonl", PAIRS),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_step_on_the_rows_of_the_document(name, tmp_path, one_device, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = {"problem": "1+1?", "solution": "It is $\\boxed{2}$."}
    pathlib.Path("math.jsonl").write_text(json.dumps(raw) + "\n")
    for block in BLOCKS:
        exec(block, {})
    (reward,) = (block for block in BLOCKS if "def last_line_holds_answer" in block)
    pathlib.Path("search_reward.py").write_text(reward)
    serving_model.make_folder(tmp_path / "FOLDER")
    config = runs.values(name)
    rows, changes = EXAMPLES[name]
    changes = {**SMALL, **changes, "model.path": "FOLDER", "data.train_files": (rows,)}
    if name.startswith("agent"):
        changes["agent.corpus"] = "passages.jsonl"
        root = pathlib.Path(jaxrl_llm.__file__).parent
        changes["model.chat_template"] = str(root / "agents" / "chatml_tools.jinja")
    config.update_from_flattened_dict({**changes, "data.eval_files": ()})
    jaxrl_llm.train(from_config_dict(config), tmp_path / "run")
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    numbers = json.loads(line)["data"]
    if name.startswith("dpo"):
        # log 2: it is its reference still
        assert numbers["dpo/loss"] == pytest.approx(0.6931, abs=1e-3)
    else:
        assert numbers["reward/num_failures"] == 0 and numbers["response_length/mean"] > 0
