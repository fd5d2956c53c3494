"""Each exercise fails as it is given and passes with the kept solution."""

import pathlib
import re
import sys

import pytest

LEARN = pathlib.Path(__file__).parents[2] / "docs" / "learn"
sys.path.insert(0, str(LEARN))

import check  # noqa: E402


def test_every_file_has_a_check_and_a_mention():
    stubs, solutions = (
        {p.stem for p in (LEARN / folder).glob("*.py")} for folder in ("exercises", "solutions")
    )
    assert stubs == solutions == set(check.CHECKS) and len(stubs) >= 14
    listed = set(re.findall(r"^\| `(\w+)` \|", (LEARN / "exercises.md").read_text(), re.MULTILINE))
    assert listed == stubs
    chapters = "".join(p.read_text() for p in LEARN.glob("*.md") if p.name != "exercises.md")
    assert not [name for name in stubs if f"`{name}`" not in chapters]


@pytest.mark.parametrize("name", check.CHECKS)
def test_exercise_fails_before_and_passes_after_its_solution(name):
    with pytest.raises(NotImplementedError):
        check.CHECKS[name](check.load(name))
    check.CHECKS[name](check.load(name, "solutions"))


def test_wrong_answer_is_reported(capsys, monkeypatch):
    wrong = check.load("gae")
    wrong.gae = lambda rewards, values, gamma, gae_lambda: rewards - values
    right = check.load("pass_at_k", "solutions")
    found = {"gae": wrong, "pass_at_k": right, "dpo": check.load("dpo")}
    monkeypatch.setattr(check, "load", found.__getitem__)
    assert check.main(list(found)) == 2
    out = capsys.readouterr().out
    assert re.search(r"gae: wrong, see line \d+ of check.py: \s*Not equal", out)
    assert "pass_at_k: right" in out and "dpo: not written yet" in out


@pytest.mark.parametrize(
    ("kind", "least"), [("basic", 30), ("advanced", 20), ("system", 15)]
)  # fmt: skip
def test_the_bank_of_questions_has_answers(kind, least):
    text = (LEARN / f"questions_{kind}.md").read_text()
    parts = re.split(r"^### (\d+)\. (.+)$", text, flags=re.MULTILINE)[1:]
    numbers, answers = parts[::3], parts[2::3]
    assert [int(n) for n in numbers] == list(range(1, len(numbers) + 1))
    assert len(numbers) >= least
    assert all(len(answer.split()) >= 15 for answer in answers)
