import math
import sys
from typing import Annotated

import pytest

from jaxrl_llm.algorithms.lookup import FunctionError, call_by_name, hyperparameters, resolve
from jaxrl_llm.config.validation import Range

TABLE = {"one": lambda: 1}


def test_a_name_of_the_table_wins():
    assert resolve("one", TABLE)() == 1


def test_a_file_is_loaded_once_until_it_changes(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f():\n    return 1\n")
    first = resolve(f"{path}:f", TABLE)
    assert first() == 1
    assert resolve(f"{path}:f", TABLE) is first


def test_a_file_imports_what_lies_beside_it(tmp_path):
    """Each file its own: folders may have modules of one name. Imports inside functions too."""
    text = "import beside\n\ndef f():\n    import later\n    return beside.NAME, later.NAME\n"
    search_path = sys.path.copy()
    try:
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "beside.py").write_text(f"NAME = {name!r}\n")
            (folder / "later.py").write_text(f"NAME = {name!r}\n")
            (folder / "json.py").write_text("raise ImportError('not the library')\n")
            (folder / "mine.py").write_text(text)
        first = resolve(f"{tmp_path}/first/mine.py:f", TABLE)
        assert first() == ("first", "first")
        second = resolve(f"{tmp_path}/second/mine.py:f", TABLE)
        assert second()[0] == "second" and first()[0] == "first"
        assert sys.path[: len(search_path)] == search_path  # no library meets a file of the user's
    finally:
        sys.path[:] = search_path
        for name in ("beside", "later"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("two", ValueError, "unknown policy loss 'two'; known: one; or your own function as"),
        (":f", ValueError, "unknown policy loss ':f'"),
        ("no/such/file.py:f", FileNotFoundError, "no file .*no/such/file.py; give it absolute"),
        ("no_such_module:f", ModuleNotFoundError, "cannot import module 'no_such_module'.*install"),
        ("operator:no_such", AttributeError, "operator has no 'no_such'; its functions: "),
        ("math:pi", TypeError, "'math:pi' is a float, not a function"),
    ],
)
def test_lookup_errors_list_what_is_known(name, error, message):
    with pytest.raises(error, match=message):
        resolve(name, TABLE, "policy loss")


def test_arguments_are_passed_by_name():
    available = {"a": 1, "b": 2, "c": 3}
    assert call_by_name(lambda c, a: (a, c), available, "here") == (1, 3)
    assert call_by_name(lambda a, d=4: (a, d), available, "here") == (1, 4)
    assert call_by_name(lambda a, **rest: (a, rest), available, "here") == (1, {"b": 2, "c": 3})
    with pytest.raises(TypeError, match="here: parameter 'd' is not available; available: a, b, c"):
        call_by_name(lambda d: d, available, "here")

    def positional(a, /):
        return a

    with pytest.raises(TypeError, match="positional-only"):
        call_by_name(positional, available, "here")


def with_numbers(
    rewards,
    values=None,
    flag=True,
    mode="mean",
    tau: Annotated[float, "half", Range("(0, 1]")] = 1,
    scale: float = 2,
    power=3,
    rate=0.5,
):
    return tau, scale, power, rate


def test_hyperparameters_are_the_numbers_of_a_signature():
    found = hyperparameters(with_numbers)
    assert {name: (each.kind, each.default, each.range.text) for name, each in found.items()} == {
        "tau": (float, 1, "(0, 1]"),
        "scale": (float, 2, "[-inf, inf]"),
        "power": (int, 3, "[-inf, inf]"),
        "rate": (float, 0.5, "[-inf, inf]"),
    }


@pytest.mark.parametrize(
    "name, value, problem",
    [
        ("tau", 0.0, ["must be in (0, 1], got 0.0"]),
        ("tau", 1.0, []),
        ("power", 2.5, ["expected int, got 2.5"]),
        ("power", math.inf, ["expected int, got inf"]),
        ("power", 4.0, []),
        ("rate", math.nan, ["must be in [-inf, inf], got nan"]),
        ("rate", math.inf, []),
    ],
)
def test_a_hyperparameter_has_the_rules_of_a_field(name, value, problem):
    assert list(hyperparameters(with_numbers)[name].problems(value)) == problem


def test_annotations_that_are_texts_are_evaluated(tmp_path):
    path = tmp_path / "mine.py"
    head = "from __future__ import annotations\nfrom typing import Annotated\n"
    # Annotations of arrays may name what is imported for a type checker alone.
    body = "def f(log_probs: Array, tau: Annotated[float, Range('(0, 1]')] = 0.5): ...\n"
    path.write_text(f"{head}from jaxrl_llm.config.validation import Range\n{body}")
    assert hyperparameters(resolve(f"{path}:f", {}))["tau"].range.text == "(0, 1]"
    path.write_text(head + body)
    unreadable = resolve(f"{path}:f", {})
    with pytest.raises(FunctionError, match=r"here: the annotation .* of 'tau' .*: name 'Range'"):
        call_by_name(unreadable, {"log_probs": 0}, "here", {"tau": 1.0})


def test_settings_replace_defaults_and_keep_their_types():
    def call(**settings):
        return call_by_name(with_numbers, {"rewards": 0}, "here", settings)

    assert call() == (1, 2, 3, 0.5)
    found = call(tau=1, power=4.0, unknown=9.0, flag=0.0)
    assert found == (1.0, 2, 4, 0.5) and [type(x) for x in found] == [float, int, int, float]
    # What is available is no hyperparameter.
    assert call_by_name(with_numbers, {"rewards": 0, "rate": 1}, "here", {"rate": 2.0})[3] == 1
