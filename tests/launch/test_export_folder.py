"""An export keeps what its source has beside the weights: tokenizer, generation settings."""

import json
import sys
import unicodedata

import gguf
import numpy as np
import pytest
import serving_model
from absl import logging
from commands import call, refused

import jaxrl_llm
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.data.tokenizer_folder import PROBES
from jaxrl_llm.models.hf import config_reader, safetensors_file

GENERATION = {
    "bos_token_id": None,
    "do_sample": True,
    "eos_token_id": None,  # set below
    "repetition_penalty": 1.05,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


@pytest.fixture
def source(tmp_path):
    """A model folder whose files are not as transformers would write them."""
    folder = tmp_path / "source"
    serving_model.make_folder(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "of_the_authors": "kept"}, indent=7))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1, ensure_ascii=True))
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    contents = {**GENERATION, "eos_token_id": [end, 7]}
    (folder / "generation_config.json").write_text(json.dumps(contents))
    return folder


def trained(source, tmp_path, **model):
    config = jaxrl_llm.default_config("sft")
    config.model.path = str(source)
    for key, value in model.items():
        config.model[key] = value
    config.data.chat_template = False
    config.trainer.num_steps, config.trainer.batch_size = 1, 8
    config.trainer.max_sequence_tokens = 128
    config.evaluation.before, config.data.arithmetic_eval_prompts = False, 8
    config.metrics.tensorboard = config.metrics.console = False
    jaxrl_llm.train(config, tmp_path / "run")


def exported(tmp_path, capsys):
    out = tmp_path / "out"
    code, _, said = call(capsys, "export", f"--workdir={tmp_path / 'run'}", f"--out={out}")
    assert code == 0, said
    return out


def test_files_beside_the_weights_are_the_sources(tmp_path, source, capsys, monkeypatch):
    trained(source, tmp_path)
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))
    out = exported(tmp_path, capsys)
    assert warnings == []
    names = [path.name for path in source.iterdir() if "token" in path.name]
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(names)
    for name in names:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    ends = json.loads((source / "generation_config.json").read_text())["eos_token_id"]
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == ends
    kept = {key: value for key, value in GENERATION.items() if not key.endswith("_token_id")}
    assert kept.items() <= generation.items()


@pytest.mark.slow
def test_a_template_of_the_config_is_exported(tmp_path, source, capsys):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    trained(source, tmp_path, chat_template=str(template))
    out = exported(tmp_path, capsys)
    assert (out / "chat_template.jinja").read_text() == template.read_text()
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_gguf_file_is_the_folder_in_another_format(tmp_path, source, capsys):
    trained(source, tmp_path)
    folder = exported(tmp_path, capsys)
    run, out = f"--workdir={tmp_path / 'run'}", tmp_path / "files"
    for kind in ("F16", "Q8_0"):
        flags = ("--format=gguf", f"--gguf_type={kind.lower()}")
        code, _, log = call(capsys, "export", run, f"--out={out}", *flags)
        assert code == 0, log
        file = out / f"files-{kind}.gguf"
        fields = gguf.GGUFReader(file).fields
        assert fields["general.name"].contents() == "run"
        again = tmp_path / f"again-{kind}"
        code, _, log = call(capsys, "import_gguf", f"--file={file}", f"--out={again}")
        assert code == 0, log
        stored, expected = map(safetensors_file.open_folder, (again, folder))
        assert stored.keys() == expected.keys()
        for name, tensor in expected.items():
            array = tensor.view()[...]
            if kind == "F16" and array.ndim > 1:
                array = array.astype(np.float16)
            # Half a step of 127 of the largest number of a block, which is at most the tensor's.
            bound = 0 if kind == "F16" or array.ndim == 1 else np.abs(array).max() * 0.6 / 127
            np.testing.assert_allclose(stored[name].view(), array, rtol=0, atol=bound)
        tokenizers = [load_tokenizer(str(each)) for each in (folder, again)]
        for text in PROBES:
            first, second = (t(unicodedata.normalize("NFC", text)).input_ids for t in tokenizers)
            assert first == second
        assert tokenizers[0].chat_template == tokenizers[1].chat_template
    ends = config_reader.eos_token_ids(again)
    assert ends == config_reader.eos_token_ids(folder)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--format=gguf", "--adapters"], "--adapters: a GGUF file holds the whole model"),
        (["--format=gguf", "--dtype=float16"], "--dtype: is of a folder; give --gguf_type"),
        (["--out=model.gguf"], "--out: 'model.gguf' is a file's name; give --format=gguf"),
    ],
)
def test_flags_of_another_format(capsys, flags, message):
    assert message in refused(capsys, "export", "--workdir=none", "--out=none", *flags)


def test_a_gguf_file_needs_its_package(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    message = refused(capsys, "export", "--workdir=none", "--out=none", "--format=gguf")
    assert "pip install 'jaxrl_llm[gguf]'" in message
