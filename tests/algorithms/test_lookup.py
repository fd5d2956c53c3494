import pytest

from jaxrl_llm.algorithms.lookup import call_by_name, resolve

TABLE = {"one": lambda: 1}


def test_a_name_of_the_table_wins():
    assert resolve("one", TABLE)() == 1


def test_a_file_is_loaded_once_until_it_changes(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f():\n    return 1\n")
    first = resolve(f"{path}:f", TABLE)
    assert first() == 1
    assert resolve(f"{path}:f", TABLE) is first


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
def test_errors(name, error, message):
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
