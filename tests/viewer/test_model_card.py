"""Model cards: the hub's header, what the run was, no path of this machine."""

import dataclasses

import hub_server
import made_runs
import pytest
from huggingface_hub import ModelCard

import jaxrl_llm
from jaxrl_llm.config import bridge
from jaxrl_llm.viewer import model_card
from jaxrl_llm.viewer.runs import RecordedRun

LICENSED = "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n# Base\n"


def settings(job="rl", **changes):
    config = jaxrl_llm.default_config(job)
    if job == "rl":
        config.rewards.functions.answer = {"function": "arithmetic"}
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        target = config
        for part in filter(None, group.split("__")):
            target = target[part]
        target[name] = value
    return bridge.to_dict(bridge.from_config_dict(config))


@pytest.fixture
def exported(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    return model_card.Exported(folder, "alice/sums", 40, "hf", "AutoModelForCausalLM")


@pytest.fixture
def run(tmp_path):
    return RecordedRun(made_runs.make(tmp_path / "run", 50, 1))


def card(exported, run, config, has_curves=False):
    return ModelCard(model_card.card_text(exported, run, config, has_curves))


def test_header_and_text_tell_the_run(exported, run):
    config = settings(
        algorithm__recipe="dapo",
        trainer__optimizer__learning_rate=2e-6,
        data__task="files",
        data__train_files=(
            "hf://datasets/openai/gsm8k/main/train.parquet",
            "/home/me/own.jsonl",
            "data/more.jsonl",  # no name of the hub
        ),
        rewards__functions__answer__function="/home/me/reward.py:score",
    )
    made = card(exported, run, config, has_curves=True)
    assert made.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["jaxrl_llm", "reinforcement-learning", "dapo"],
        "datasets": ["openai/gsm8k"],
    }
    for text in (
        "# sums\n\nWeights after step 40 of reinforcement learning (dapo) with jaxrl_llm",
        "| learning rate | 2e-06 |",
        "| recipe | dapo |",
        "| reward functions | reward.py:score |",
        "- `hf://datasets/openai/gsm8k@main/main/train.parquet` ([openai/gsm8k](https://",
        "- `own.jsonl`\n- `more.jsonl`",
        'AutoModelForCausalLM.from_pretrained("alice/sums", dtype="auto")',
        "![metrics by step](curves.png)",
    ):
        assert text in made.text, text
    assert "/home" not in made.content and "LoRA" not in made.content


def test_evaluations_are_those_until_the_exported_step(exported, run):
    steps, values = run.columns["val-core/sums/mean@4"]
    assert (steps[0], steps[39]) == (1, 40)
    row = f"| val-core/sums/mean@4 | {values[0]:.4g} (1) | {values[39]:.4g} (40) |"
    assert row in card(exported, run, settings()).text
    earlier = dataclasses.replace(exported, step=0)
    assert "## Evaluation" not in card(earlier, run, settings()).text


@pytest.mark.parametrize(
    "job, tags, kind",
    [
        ("sft", ["jaxrl_llm", "sft"], "AutoModelForCausalLM"),
        ("reward_model", ["jaxrl_llm", "reward-model"], "AutoModelForSequenceClassification"),
    ],
)
def test_other_jobs_and_heads(exported, run, job, tags, kind):
    made = card(dataclasses.replace(exported, auto_class=kind), run, settings(job))
    assert made.data.tags == tags
    tag = "text-generation" if job == "sft" else "text-classification"
    assert made.data.pipeline_tag == tag and f"import {kind}" in made.text


def test_base_and_license_of_a_folder(exported, run, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(model_card.logger, "warning", lambda text, *_: warnings.append(text))
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    assert model_card.base_model_fields(str(folder)) == {"base_model": "Qwen/Qwen3-0.6B"}
    assert warnings == ["the license of %s is not known: %s"]
    (folder / "README.md").write_text(LICENSED)
    made = card(exported, run, settings(model__path=str(folder)))
    assert made.data.base_model == "Qwen/Qwen3-0.6B"
    assert made.data.base_model_relation == "finetune"
    assert (made.data.license, made.data.license_name) == ("other", "qwen")
    assert "from [Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B)." in made.text
    other = tmp_path / "own"
    other.mkdir()
    made = card(exported, run, settings(model__path=str(other)))
    assert "base_model" not in made.data.to_dict() and "from own." in made.text
    assert str(tmp_path) not in made.content


def test_base_and_license_of_a_name(exported, run, tmp_path, monkeypatch):
    with hub_server.HubServer() as hub:
        hub_server.use_hub(monkeypatch, hub, tmp_path / "hf")
        commit = hub.add("org/base", {"README.md": LICENSED.encode()})
        expected = {"base_model": "org/base", "license": "other", "license_name": "qwen"}
        pinned = f"hf://org/base@main#{commit}"
        for path in ("hf://org/base", pinned):
            found = model_card.base_model_fields(path)
            assert found == {**expected, "license_link": "LICENSE"}
        adapters = dataclasses.replace(exported, format="peft")
        made = card(adapters, run, settings(model__path=pinned, lora__rank=8))
        assert made.data.library_name == "peft"
        assert made.data.base_model_relation == "adapter"
        assert 'PeftModel.from_pretrained(base, "alice/sums")' in made.text
        assert "| LoRA rank | 8 |" in made.text and "| LoRA alpha | 16 |" in made.text


def test_gguf_files_are_loaded_by_their_type(exported, run):
    (exported.folder / "sums-Q8_0.gguf").touch()
    made = card(dataclasses.replace(exported, format="gguf"), run, settings())
    assert "llama-server -hf alice/sums:Q8_0" in made.text
    assert "ollama run hf.co/alice/sums:Q8_0" in made.text
    assert made.data.library_name == "gguf" and made.data.tags[-1] == "gguf"
    place = dataclasses.replace(exported, format="gguf", name="gs://bucket/sums")
    assert "llama-server -m sums-Q8_0.gguf" in card(place, run, settings()).text


def test_curves_need_matplotlib(exported, run, monkeypatch):
    config = settings()
    model_card.write_card(exported, str(run.path), config)
    assert (exported.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "curves.png" in (exported.folder / "README.md").read_text()
    (exported.folder / "curves.png").unlink()
    warnings = []
    monkeypatch.setattr(model_card.logger, "warning", warnings.append)
    monkeypatch.setattr(model_card.importlib.util, "find_spec", lambda name: None)
    model_card.write_card(exported, str(run.path), config)
    assert "curves.png" not in (exported.folder / "README.md").read_text()
    assert "pip install 'jaxrl_llm[plot]'" in warnings[0]
    assert not (exported.folder / "curves.png").exists()


def test_cells_of_tables_stay_cells():
    rows = [("a|b", "c\nd")]
    assert model_card._table(("x", "y"), rows).splitlines()[-1] == "| a\\|b | c d |"
