"""Every block of Python and of JSON in the documents is executed, in the order of its document."""

import json
import pathlib
import re

import pytest

import jaxrl_llm
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.trainer import rl, supervised

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^( *)```(python|json)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


# The log tells what was on its day. A client of a server: see tests/serving/test_server.py. Of the
# training service: tests/serving/training_service/test_sdk.py, and tests/training_api/.
ELSEWHERE = ("log.md", "serving.md", "service.md")


def blocks(path):
    """Returns (language, text) of the blocks of a document."""
    found = BLOCK.findall(path.read_text()) if path.name not in ELSEWHERE else []
    return [
        (language, re.sub(f"^{space}", "", text, flags=re.M)) for space, language, text in found
    ]


BLOCKS = {path: found for path in sorted(DOCS.rglob("*.md")) if (found := blocks(path))}


def test_enough_snippets_are_found():
    count = sum(map(len, BLOCKS.values()))
    print(f"{count} blocks in {len(BLOCKS)} documents")
    assert count > 20


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to write into, with what users bring; a run is validated and not taken."""
    runs = []
    for module in (rl, supervised):
        monkeypatch.setattr(module, "train", lambda config, *_, **__: runs.append(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    return runs


@pytest.mark.parametrize("path", BLOCKS, ids=lambda p: p.stem)
def test_a_documents_blocks_run(path, place):
    # What a document leaves to the reader: a config to change.
    names = {"config": jaxrl_llm.default_config(), "__name__": path.stem}
    for language, text in BLOCKS[path]:
        if language == "json":
            assert all(json.loads(line) for line in text.splitlines())
        else:
            exec(compile(text, path.name, "exec"), names)
    if made := names.get("get_config"):
        place.append(from_config_dict(made()))
    for config in place:
        assert list(config.warnings()) == []


def test_documented_examples_give_these_scores(place):
    names: dict = {}
    for _, text in BLOCKS[DOCS / "examples.md"]:
        exec(text, names)
    judge = names["last_line_holds_answer"]
    assert judge("q", "It is far.\nAnswer: aare.", "Aare", {})["score"] == 1.0
    assert judge("q", "Answer: Rhine", "Aare", {})["score"] == 0.1
    assert judge("q", "Aare", "Aare", {})["score"] == 0.0
