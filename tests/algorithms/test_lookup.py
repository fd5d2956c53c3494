import sys

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
