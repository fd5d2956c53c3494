"""docs/data.md: its rows are read as it says, and its errors are told as it says."""

import ast
import pathlib
import re

import pytest

from jaxrl_llm.config import CurriculumConfig, DataConfig
from jaxrl_llm.config.bridge import JOBS, from_config_dict
from jaxrl_llm.config.datasets.presets import PRESETS, TARGETS
from jaxrl_llm.config.datasets.slices import split_slice
from jaxrl_llm.config.rollout_data import MAPPING_FIELDS
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.rows.row_files import CODECS, SUFFIXES
from jaxrl_llm.data.tasks import TASKS, task_rows
from jaxrl_llm.types import Prompt

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "data.md").read_text()
BY_CONFIG = DOCUMENT.partition("## Columns by config")[2].partition("## What becomes")[0]
ERRORS, ERRORS_BY_CONFIG = (
    re.findall(r"^\| `([{\[].*)` \| `(.*)` \|$", text, re.MULTILINE)
    for text in (DOCUMENT.partition("## What is an error")[2], BY_CONFIG)
)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def read(*paths):
    return task_rows(DataConfig(task="files", train_files=tuple(map(str, paths))), "train", 0)


def test_every_task_has_its_row():
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \|$", DOCUMENT, re.MULTILINE)
    assert rows[: len(TASKS)] == list(TASKS)


def test_the_rows_are_read_as_it_says(tmp_path):
    (lines, _), (wanted, *_) = blocks("json"), blocks("python")
    (tmp_path / "two.jsonl").write_text(lines)
    first, second = read(tmp_path / "two.jsonl")
    assert first["prompt"] == [{"role": "user", "content": "3+4+2="}]
    assert first["extra_info"] == {} and first["reward_model"]["ground_truth"] == "9"
    assert [message["role"] for message in second["prompt"]] == ["system", "user"]
    given = {**second, "ground_truth": second["reward_model"]["ground_truth"]}
    wanted = ast.literal_eval(wanted)
    assert {name: given[name] for name in wanted} == wanted


def test_its_script_writes_both_kinds_of_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[1], {})
    both = [[row | {"where": ""} for row in read(f"sums.{kind}")] for kind in ("jsonl", "parquet")]
    assert len(both[0]) == 100 and both[0] == both[1]


@pytest.mark.parametrize(("line", "message"), ERRORS)
def test_errors_are_told_as_it_says(line, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(DataError) as error:
        read(tmp_path / "rows.jsonl")
    assert "rows.jsonl, row 1" in str(error.value) and message in str(error.value)


@pytest.mark.parametrize(("line", "message"), ERRORS_BY_CONFIG)
def test_errors_of_columns_are_told_as_it_says(line, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    config = DataConfig(task="files", preset="gsm8k", train_files=(f"{tmp_path}/rows.jsonl",))
    with pytest.raises(DataError) as error:
        task_rows(config, "train", 0)
    assert "rows.jsonl, row 1: " in str(error.value) and message in str(error.value)


def test_its_tables_of_presets_and_columns_are_the_code():
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|`]+) \| ([a-z_, ]+) \| (.*) \| (.*) \|$", BY_CONFIG, re.M
    )
    assert [name for name, *_ in rows] == [name for name in PRESETS if name != "none"]
    for name, _, jobs, columns, template in rows:
        preset = PRESETS[name]
        assert {*jobs.split(", ")} <= set(JOBS)
        wanted = [f"`{target}={column}`" for target, column in preset.columns.items()]
        assert columns == ", ".join(wanted)
        assert template.strip("`").replace("\\n", "\n") == preset.prompt_template
    described = re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", BY_CONFIG, re.MULTILINE)
    assert dict(described) == dict(TARGETS)
    settings = re.findall(r"^\| `data\.(\w+)` \|", BY_CONFIG, re.MULTILINE)
    assert sorted(settings) == sorted(MAPPING_FIELDS)


def test_its_config_is_valid(tmp_path):
    names: dict = {}
    exec(blocks("python")[2], names)
    assert not list(from_config_dict(names["config"]).data.problems())


def test_its_table_of_suffixes_is_complete():
    rows = re.findall(r"^\| `(\.\w+)` \|", DOCUMENT, re.MULTILINE)
    assert sorted(rows) == list(SUFFIXES)
    assert all(f".jsonl{codec}" in DOCUMENT for codec in CODECS)


def test_its_slices_are_valid():
    slices = re.findall(r"`(\[[^`]*:[^`]*\])`", DOCUMENT.partition("**Slices.**")[2][:900])
    assert "[100:200]" in slices and len(slices) >= 5
    for text in slices:
        assert text in ("[start:stop]", "[:p%]", "[p%:]") or split_slice(f"a{text}")[1], text


def test_documented_curriculum_works(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(blocks("python")[3])
    config = CurriculumConfig(choice=f"{path}:shortest_first")
    prompts = [Prompt((1,) * (3 + 4 * i), "", "s", None, {}, i) for i in range(4)]
    drawn = Curriculum(prompts, config, 0)
    assert [{prompt.index for prompt in drawn.take(9)} for _ in range(3)] == [
        {0, 1},
        {0, 1, 2},
        {0, 1, 2, 3},
    ]
