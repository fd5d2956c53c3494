"""The names in docs/architecture.md and in the READMEs of folders exist; the floors are FLOORS."""

import ast
import functools
import importlib.util
import pathlib
import re
from collections.abc import Iterator

import pytest
from test_architecture import FLOORS, PACKAGE, PLACES

ROOT = PACKAGE.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ROWS = [line for line in SECTIONS["Where to add"].splitlines() if line.startswith("| ")][1:]
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})
QUOTE = re.compile(r"`([^`\n]+)`")


def resolved(path: str) -> pathlib.Path:
    """A path of the page: relative to the package or to the repository."""
    inside = PACKAGE / path
    return inside if inside.exists() else ROOT / path


def is_path(quote: str) -> bool:
    return "/" in quote or re.search(r"\.(py|md|yml|toml)$", quote) is not None


@functools.cache
def members(path: pathlib.Path) -> dict[str, set[str]]:
    """The names at the top of a module; for a class also those of its body."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = set().union(*map(assigned, node.body))
        else:
            found |= {name: set() for name in assigned(node)}
    return found


def assigned(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def modules(folder: pathlib.Path = PACKAGE) -> Iterator[pathlib.Path]:
    yield from ([folder] if folder.suffix else folder.rglob("*.py"))


def exists(name: str, files: list[pathlib.Path]) -> bool:
    """Whether `module.name` or `Class.member` is in the package, a plain name in a file."""
    owner, _, member = name.rpartition(".")
    if owner:
        return any(
            member in (names if path.stem == owner else names.get(owner, ()))
            for path in modules()
            for names in [members(path)]
        )
    return any(member in members(path) for file in files for path in modules(file))


def floors_of_page() -> list[set[tuple[str, ...]]]:
    """The blocks of each floor, ground floor first; `a` → `b` is a block in which a imports b."""
    floors: dict[int, set[tuple[str, ...]]] = {}
    floor = -1
    for number, folders in re.findall(r"^\| (\d*) ?\| (`.+?) \|", SECTIONS["Floors"], re.MULTILINE):
        floor = int(number) if number else floor
        blocks = {
            tuple(name.strip("` /") for name in reversed(block.split("→")))
            for block in folders.split(",")
        }
        floors.setdefault(floor, set()).update(blocks)
    return [floors[number] for number in range(len(floors))]


def test_the_floors_of_the_page_are_those_that_are_enforced():
    assert floors_of_page() == [set(blocks) for blocks in FLOORS]


def test_every_path_of_the_page_exists():
    paths = [quote for quote in QUOTE.findall(PAGE) if is_path(quote) and quote.upper() != quote]
    assert len(paths) > 80
    assert not [path for path in paths if "WORKDIR" not in path and not resolved(path).exists()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_name_under_where_to_add_exists(row):
    quotes = QUOTE.findall(row)
    files = [path for path in map(resolved, filter(is_path, quotes)) if path.suffix in ("", ".py")]
    names = [re.sub(r"\(.*", "", quote) for quote in quotes if not is_path(quote)]
    assert not [name for name in names if not exists(name, files)]


def test_names_with_an_owner_exist():
    owned = {quote for quote in QUOTE.findall(PAGE) if re.fullmatch(r"[A-Za-z_]+\.[a-z_]+", quote)}
    local = {"source", "sampler", "phase"}  # names of the loop, see the test below
    owned = {
        quote for quote in owned if quote.partition(".")[0] not in local and not is_path(quote)
    }
    settings = {"rollout.engine"}
    assert len(owned) > 10
    assert not [quote for quote in owned - settings if not exists(quote, [])]


def test_the_calls_of_a_step_are_those_of_the_loop_in_their_order():
    calls = re.findall(r"^\| [\w, ]+ \| `([\w.]+)` \|", SECTIONS["A step of RL"], re.MULTILINE)
    loop = (PACKAGE / "trainer" / "rl.py").read_text()
    places = [loop.find(f"{call}(") for call in calls]
    assert len(calls) == 9 and -1 not in places and places == sorted(places)


def test_the_picture_is_that_of_the_imports():
    path = ROOT / "docs" / "images" / "make_architecture.py"
    spec = importlib.util.spec_from_file_location("make_architecture", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PICTURE.read_text() == script.picture(), f"run python {path.relative_to(ROOT)}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_each_folder_has_a_readme_that_names_its_files(folder):
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 20
    quotes = {quote for quote in QUOTE.findall(text) if is_path(quote) or quote.endswith(".cc")}
    assert not [q for q in quotes if not any((at / q).exists() for at in (folder, *folder.parents))]
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert not (files | folders) - quotes


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_floor_in_a_readme_is_that_of_the_folder(folder):
    floor, block, position = PLACES[folder.relative_to(PACKAGE).parts[0]]
    (rule,) = re.findall(
        r"^Floor (\d+) .*: imports only (.*)\.$", (folder / "README.md").read_text(), re.M
    )
    assert int(rule[0]) == floor
    if floor == 0:
        assert QUOTE.findall(rule[1]) == list(reversed(FLOORS[floor][block][:position]))
    else:
        below = "floor 0" if floor == 1 else f"floors 0 to {floor - 1}"
        assert rule[1].startswith(f"{below}, or from ")


def test_a_wrong_name_is_found():
    files = [PACKAGE / "config" / "recipes.py"]
    assert exists("RECIPES", files) and exists("loops.train", []) and exists("Saver.save", [])
    assert not exists("RECEIPTS", files) and not exists("loops.begin", [])
    assert not exists("Saver.keep", []) and not resolved("learner/source.py").exists()
