"""A random model is a folder that every command takes."""

import json

import commands

from jaxrl_llm.models.hf import checkpoint, random_model


def test_random_model_is_a_model_folder(capsys, tmp_path):
    out, config = tmp_path / "folder", tmp_path / "config.json"
    code, _, log = commands.call(capsys, "random_model", "--family=olmo3", f"--out={out}")
    assert code == 0, log
    sampled = ["--prompt=hello", "--max_tokens=3"]
    code, said, log = commands.call(capsys, "generate", f"--model={out}", *sampled)
    assert code == 0 and "hello" in json.loads(said)["prompt"], log

    # Of a config with other sizes; the earlier folder is replaced.
    config.write_text(json.dumps(random_model.example("smollm3", hidden_size=40, vocab_size=200)))
    flags = [f"--model_config={config}", f"--out={out}", "--dtype=bfloat16"]
    code, _, log = commands.call(capsys, "random_model", *flags)
    assert code == 0, log
    shape = checkpoint.read_architecture(out)
    assert (shape.family, shape.hidden_size, shape.vocab_size) == ("smollm3", 40, 200)


def test_what_it_cannot_make_is_refused(capsys, tmp_path):
    out, config = f"--out={tmp_path / 'folder'}", tmp_path / "config.json"
    refused = commands.refused(capsys, "random_model", out)
    assert "give either --family or --model_config" in refused
    refused = commands.refused(capsys, "random_model", out, "--family=gpt2")
    assert "'gpt2' is no known family of models; known: llama, " in refused
    config.write_text(json.dumps(random_model.example("llama", vocab_size=5)))
    refused = commands.refused(capsys, "random_model", out, f"--model_config={config}")
    assert "the model's vocabulary only 5" in refused
    config.write_text(json.dumps(random_model.example("olmo2", num_key_value_heads=3)))
    refused = commands.refused(capsys, "random_model", out, f"--model_config={config}")
    assert "num_key_value_heads=3 does not divide" in refused
    assert not (tmp_path / "folder").exists()
