"""Tools that come with the project."""

import contextlib
import json
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxrl_llm.agents import builtin_tools, tool_schema, tools
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
        ("2**4095 - 1", str(2**4095 - 1)),
        ("1.05**100", "131.50125784630401"),
        ("(-2)**101", str(-(2**101))),
        ("1**99999", "1"),
        ("round(1234.5678, 2) + round(1234, -2)", "2434.5699999999997"),
        ("2**-5000", "0"),
    ],
)
def test_calculator_evaluates_arithmetic(expression, value):
    assert builtin_tools.calculator(expression) == value


def test_worked_products_show_this_calculator():
    assert tool_schema.schema(builtin_tools.calculator) == tasks.CALCULATOR


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9**9**9", "too large"),
        ("2**5000", "too large"),
        ("round(5, -10**8)", "at most 1300 before or after"),
        ("round(5.5, 10**9)", "at most 1300 before or after"),
        ("round(2**2000, 2**60)", "at most 1300 before or after"),
        ("max(2**4095, 1) * max(2**4095, 1)", "too large"),
        ("abs(2**4095) ** 2", "too large"),
        ("1e308 * 10", "too large"),
        ("1.5 ** 100000", "too large"),
        ("2**4000 * 1.5", "too large"),
        ("exp(10000)", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("-" * 1000 + "1", "nested too deeply"),
        ("(" * 500 + "1" + ")" * 500, "nested|parentheses"),
        ("__import__('os').system('ls')", "no arithmetic"),
        ("[1]", "no arithmetic"),
        ("True", "no arithmetic"),
        ("x + 1", "no arithmetic"),
        ("1 +", "invalid syntax"),
        ("1/0", "division by zero"),
        ("1+" * 600 + "1", "over 1024 characters"),
    ],
)
def test_calculator_refuses_unsafe_and_invalid_expressions(expression, problem):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError), match=problem):
        builtin_tools.calculator(expression)


@hypothesis.given(
    st.recursive(
        st.one_of(st.integers(-(10**20), 10**20), st.floats(-1e300, 1e300)).map(str),
        lambda parts: st.one_of(
            st.tuples(parts, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), parts).map(
                lambda three: f"({' '.join(three)})"
            ),
            st.tuples(st.sampled_from(sorted(builtin_tools._FUNCTIONS)), parts, parts).map(
                lambda three: f"{three[0]}({three[1]}, {three[2]})"
            ),
        ),
        max_leaves=12,
    )
)
@hypothesis.settings(max_examples=300, deadline=2000)
def test_calculator_takes_no_time(expression):
    """Whatever is asked, an answer or an error comes at once, and no answer is long."""
    with contextlib.suppress(ValueError, ZeroDivisionError, TypeError):
        assert len(builtin_tools.calculator(expression)) < 1300


def test_python_goes_on_after_an_error_and_begins_anew_after_a_limit():
    python = builtin_tools.Python(wall_s=1.0).python
    assert python("x = [1]\nprint(len(x))\nx + [2]") == "1\n[1, 2]"
    assert "ZeroDivisionError" in python("1/0")
    assert python("x") == "[1]"
    assert len(python("print('y' * 10**7)")) == 1 << 16
    assert python("import os\n_ = os.fork()\nprint(len(x))").startswith("1")
    assert "names are lost" in python("while True: pass")
    assert "NameError" in python("x")


PASSAGES = ("The cat sleeps.", "The dog barks loudly.", "Rain falls on the roof.")


def test_search_ranks_passages(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"text": text, "title": f"T{i}"} for i, text in enumerate(PASSAGES)]
    corpus.write_text("\n\n".join(map(json.dumps, rows)))
    search = builtin_tools.Search(str(corpus)).search
    assert search("a loud dog that barks", 1) == "[1] T1\nThe dog barks loudly."
    assert search("nothing like it") == "nothing found"
    assert search("cat rain", 99).count("[") == 2
    for text, problem in (("{", "line 1"), ('{"a": 1}', "no `text`"), ("", "no line")):
        other = tmp_path / f"{len(text)}.jsonl"
        other.write_text(text)
        with pytest.raises(ValueError, match=problem):
            builtin_tools.bm25_index(str(other))
    # Words that are searched for: at least two letters, no stop words.
    other = tmp_path / "stop.jsonl"
    other.write_text('{"text": "the and of"}\n{"text": "a b c . !"}\n')
    with pytest.raises(
        ValueError, match=r"stop.jsonl: none of its 2 passages contains a searchable word"
    ):
        builtin_tools.bm25_index(str(other))
    assert search("the of") == search("") == search("!?") == "nothing found"
    # U+2028 ends no line of JSON lines.
    other = tmp_path / "separators.jsonl"
    row = json.dumps({"text": "A cat\u2028sleeps."}, ensure_ascii=False)
    other.write_text(f"{row}\n", "utf-8")
    assert builtin_tools.Search(str(other)).search("cat") == "[1] A cat\u2028sleeps."
    # A process that only searches does not start jax.
    code = "from jaxrl_llm.agents.builtin_tools import Search"
    code += f"; print(Search({str(corpus)!r}).search('cat'))"
    code += "; import sys; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cat" in done.stdout


@pytest.mark.parametrize(("side", "text"), [("left", "(cut)...6789"), ("right", "0123...(cut)")])
def test_long_answers_are_cut(side, text):
    assert tools.truncate_text("0123456789", 4, side) == text
    assert tools.truncate_text("0123", 4, side) == "0123"
