"""Tools that come with the project."""

import json
import subprocess
import sys

import pytest

from jaxrl_llm.agents import ready, tools
from jaxrl_llm.data import tasks


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*24", "888"),
        (" (3 + 4) * 2^3 / 7 ", "8"),
        ("7 // 2 + 7 % 4", "6"),
        ("sqrt(2)", "1.4142135623730951"),
        ("-max(1, 2, round(2.6)) + pi - pi", "-3"),
        ("6 ÷ 4 × 2", "3"),
        ("2**100", str(2**100)),
    ],
)
def test_calculator(expression, value):
    assert ready.calculator(expression) == value


def test_worked_products_show_this_calculator():
    assert tools.schema(ready.calculator) == tasks.CALCULATOR


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9**9**9", "too large"),
        ("2**5000", "too large"),
        ("__import__('os').system('ls')", "no arithmetic"),
        ("[1]", "no arithmetic"),
        ("True", "no arithmetic"),
        ("x + 1", "no arithmetic"),
        ("1 +", "invalid syntax"),
        ("1/0", "division by zero"),
        ("1+" * 600 + "1", "over 1024 characters"),
    ],
)
def test_calculator_refuses(expression, problem):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError), match=problem):
        ready.calculator(expression)


def test_python_goes_on_after_an_error_and_begins_anew_after_a_limit():
    python = ready.Python(wall_s=1.0).python
    assert python("x = [1]\nprint(len(x))\nx + [2]") == "1\n[1, 2]"
    assert "ZeroDivisionError" in python("1/0")
    assert python("x") == "[1]"
    assert len(python("print('y' * 10**7)")) == 1 << 16
    assert python("import os\n_ = os.fork()\nprint(len(x))").startswith("1")
    assert "names are lost" in python("while True: pass")
    assert "NameError" in python("x")


PASSAGES = ("The cat sleeps.", "The dog barks loudly.", "Rain falls on the roof.")


def test_search(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"text": text, "title": f"T{i}"} for i, text in enumerate(PASSAGES)]
    corpus.write_text("\n\n".join(map(json.dumps, rows)))
    search = ready.Search(str(corpus)).search
    assert search("a loud dog that barks", 1) == "[1] T1\nThe dog barks loudly."
    assert search("nothing like it") == "nothing found"
    assert search("cat rain", 99).count("[") == 2
    for text, problem in (("{", "line 1"), ('{"a": 1}', "no `text`"), ("", "no line")):
        other = tmp_path / f"{len(text)}.jsonl"
        other.write_text(text)
        with pytest.raises(ValueError, match=problem):
            ready.index(str(other))
    # A process that only searches does not start jax.
    code = f"from jaxrl_llm.agents import ready; print(ready.Search({str(corpus)!r}).search('cat'))"
    code += "; import sys; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cat" in done.stdout


@pytest.mark.parametrize(("side", "text"), [("left", "(cut)...6789"), ("right", "0123...(cut)")])
def test_long_answers_are_cut(side, text):
    assert tools.shortened("0123456789", 4, side) == text
    assert tools.shortened("0123", 4, side) == "0123"
