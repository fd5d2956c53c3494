"""A capital letter in an annotated shape is in the table of CONTRIBUTING.md."""

import ast
import pathlib
import re

import jaxtyping
import pytest

ROOT = pathlib.Path(__file__).parents[1]
TABLE = (ROOT / "CONTRIBUTING.md").read_text().split("## The letters of shapes")[1].split("##")[0]
LETTERS = set(re.findall(r"`([A-Z])`", TABLE))
FOLDERS = sorted(path.name for path in (ROOT / "jaxrl_llm").iterdir() if path.name[0] not in "_.")


def unknown_letters(source: str) -> dict[str, int]:
    """Returns capitals of jaxtyping's shapes that the table lacks, and a line of each."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(ast.Name(kind), ast.Tuple([_, ast.Constant(str(shape))])) if hasattr(
                jaxtyping, kind
            ):
                for name in re.findall(r"\b[A-Z]\w*", shape):
                    if name[0] not in LETTERS or not re.fullmatch(r"[\d_a-z]*", name[1:]):
                        found[name] = node.lineno
    return found


def test_a_letter_is_known_by_the_table():
    assert {"B", "T", "R", "W", "V"} <= LETTERS
    assert unknown_letters('x: Float[Array, "B T/2 H2 *kept #K 1"]') == {}
    assert unknown_letters('x: int\ny: Int[np.ndarray, "B Z 2*PP"]') == {"Z": 2, "PP": 2}


@pytest.mark.parametrize("folder", FOLDERS)
def test_letters_are_those_of_the_table(folder):
    path = ROOT / "jaxrl_llm" / folder
    files = path.rglob("*.py") if path.is_dir() else [path]
    unknown = {
        f"{file.relative_to(ROOT)}:{line}": name
        for file in files
        if file.suffix == ".py"
        for name, line in unknown_letters(file.read_text()).items()
    }
    assert not unknown, "write a lowercase word, or extend the table of CONTRIBUTING.md"
