"""A GGUF file becomes a folder that every command takes."""

import json
import sys

import commands
import gguf_files
import numpy as np
from gguf import GGMLQuantizationType

from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.models.hf import checkpoint, config_reader, safetensors_file


def test_imported_gguf_is_a_model_folder(capsys, tmp_path, monkeypatch):
    file = gguf_files.make(tmp_path / "model.gguf", "llama", GGMLQuantizationType.Q8_0)
    out = tmp_path / "folder"
    flags = [f"--file={file}", f"--out={out}"]
    code, _, log = commands.call(capsys, "import_gguf", *flags, "--dtype=bfloat16")
    assert code == 0, log
    stored = safetensors_file.open_folder(out)
    assert {tensor.dtype_code for tensor in stored.values()} == {"BF16"}
    assert checkpoint.read_architecture(out).norm_eps == 1e-5  # stored as a float32
    assert config_reader.eos_token_ids(out) == (2,)
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 1
    assert load_tokenizer(str(out)).chat_template == gguf_files.TEMPLATE
    sampled = ["--prompt=hello", "--max_tokens=3"]
    code, said, log = commands.call(capsys, "generate", f"--model={out}", *sampled)
    assert code == 0 and json.loads(said)["prompt"] == "<|im_start|>hello<|im_end|>", log

    # Another tokenizer in place of the file's; the earlier folder is replaced.
    bare = {"tokenizer.ggml.model": None}
    gguf_files.make(file, "llama", **bare)
    code, _, log = commands.call(capsys, "import_gguf", *flags)
    assert code == 1 and f"{file}: tokenizer.ggml.model is None" in log
    assert "give --tokenizer=FOLDER" in log
    code, _, log = commands.call(capsys, "import_gguf", *flags, f"--tokenizer={out}")
    assert code == 0, log
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = gguf_files.tensors("llama")[name]
    np.testing.assert_array_equal(safetensors_file.open_folder(out)[name].view(), expected)
    assert config_reader.eos_token_ids(out) == (2,)

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "gguf", None)
        code, _, log = commands.call(capsys, "import_gguf", *flags)
    assert code == 1 and "pip install 'jaxrl_llm[gguf]'" in log
