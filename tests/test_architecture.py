"""The floors of the package: a module imports only from below, and stays short."""

import ast
import graphlib
import pathlib
from collections.abc import Iterator

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jaxrl_llm"

# Ground floor first. A floor lists its blocks: neighbours, none of which imports another. A
# block is a folder or, on the ground floor, modules in the order in which they may import.
FLOORS = (
    (("types",), ("console",), ("text", "errors", "storage", "config")),
    (("algorithms",), ("sharding",), ("processes",)),
    (("models",), ("data",), ("checkpoint",), ("metrics",)),
    (("packing",),),
    (("rollout",), ("rewards",), ("agents",)),
    (("learner",),),
    (("sampling",),),
    (("planning",),),
    (("saved_policy",), ("training_api",)),
    (("serving",),),
    (("trainer",), ("viewer",)),
    (("program",),),
    (("commands",),),
)
DEFAULT_MAX_LINES = 600
MAX_LINES = {
    "trainer/rl.py": 250,  # the loop is to be read in one sitting
}

# Name at the top of the package -> (floor, block, position within the block).
PLACES = {
    name: (floor, block, position)
    for floor, blocks in enumerate(FLOORS)
    for block, names in enumerate(blocks)
    for position, name in enumerate(names)
}


def module_files(package: pathlib.Path = PACKAGE) -> list[pathlib.Path]:
    return sorted(package.rglob("*.py"))


def module_name(path: pathlib.Path, package: pathlib.Path = PACKAGE) -> str:
    """Returns `folder.module` for a file, `folder` for its `__init__.py`."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(
    path: pathlib.Path, package: pathlib.Path = PACKAGE
) -> Iterator[tuple[str, int]]:
    """Yields (module, line) of every import of the package itself, at any depth of the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: use absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            assert top not in ("launch", "configs", "tests"), (
                f"{path}:{node.lineno}: the package does not import {top}/"
            )
            if top == package.name and rest:
                yield as_module(rest, package), node.lineno


def as_module(dotted: str, package: pathlib.Path) -> str:
    """Returns the module that `dotted` names, without a name inside that module."""
    while "." in dotted and not (
        package.joinpath(*dotted.split(".")).with_suffix(".py").exists()
        or package.joinpath(*dotted.split(".")).is_dir()
    ):
        dotted = dotted.rpartition(".")[0]
    return dotted


def misplaced(path: pathlib.Path, package: pathlib.Path = PACKAGE) -> Iterator[str]:
    """Yields the imports of `path` that are not from below."""
    name = module_name(path, package)
    if not name:
        return
    here = name.partition(".")[0]
    assert here in PLACES, f"{name} has no floor; add {here!r} to FLOORS"
    floor, block, position = PLACES[here]
    for imported, line in imported_modules(path, package):
        there = imported.partition(".")[0]
        assert there in PLACES, f"{path}:{line}: {imported} has no floor; add it to FLOORS"
        other_floor, other_block, other_position = PLACES[there]
        below = other_floor < floor
        earlier = (other_floor, other_block) == (floor, block) and other_position < position
        # Within a folder any order will do that has no cycle.
        if not below and not earlier and here != there:
            yield f"{path}:{line}: {name} may not import {imported}"


def import_order(package: pathlib.Path = PACKAGE) -> list[str]:
    """Returns all modules, each after those it imports; raises CycleError if there is none."""
    graph = {
        module_name(path, package): {name for name, _ in imported_modules(path, package)}
        for path in module_files(package)
    }
    return list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", module_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_only_from_below(path):
    assert list(misplaced(path)) == []


@pytest.mark.parametrize("path", module_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_fits_its_budget(path):
    relative = path.relative_to(PACKAGE).as_posix()
    budget = MAX_LINES.get(relative, DEFAULT_MAX_LINES)
    lines = len(path.read_text().splitlines())
    assert lines <= budget, f"{relative} has {lines} lines, budget {budget}: split it by role"


def test_modules_import_each_other_without_a_cycle():
    assert set(import_order()) >= set(PLACES) & {module_name(path) for path in module_files()}


def test_no_module_has_a_name_that_says_nothing():
    nothing = {"utils", "helpers", "common", "misc"}
    assert not [path for path in module_files() if nothing & set(path.with_suffix("").parts[-2:])]


@pytest.fixture
def tree(tmp_path):
    """A package with one legal import of each kind; returns a function that adds files."""
    package = tmp_path / "jaxrl_llm"

    def add(name: str, text: str) -> pathlib.Path:
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    add("types.py", "")
    add("errors.py", "")
    add("config/__init__.py", "from jaxrl_llm.errors import ConfigError\n")
    add(
        "models/heads.py", "from jaxrl_llm.config import RLConfig\nfrom jaxrl_llm.models import b\n"
    )
    add("models/b.py", "import jax\nfrom jaxrl_llm import types\n")
    add("data/rows.py", "")
    add("learner/update.py", "from jaxrl_llm.models.heads import head\n")
    return add


def test_the_check_accepts_imports_from_below(tree):
    package = tree("rewards/base.py", "import jaxrl_llm.models.heads\n").parents[1]
    assert not [line for path in module_files(package) for line in misplaced(path, package)]
    order = import_order(package)
    assert order.index("models.b") < order.index("models.heads") < order.index("learner.update")


@pytest.mark.parametrize(
    "file, text",
    [
        ("models/up.py", "from jaxrl_llm.learner import update\n"),
        ("models/inside.py", "def f():\n    import jaxrl_llm.learner.update\n"),
        ("models/beside.py", "from jaxrl_llm import data\n"),
        ("models/__init__.py", "from jaxrl_llm.data.rows import Row\n"),
        ("errors.py", "from jaxrl_llm.config import RLConfig\n"),
        ("types.py", "from jaxrl_llm import config\n"),
    ],
)
def test_the_check_finds_imports_from_above_and_beside(tree, file, text):
    path = tree(file, text)
    package = next(parent for parent in path.parents if parent.name == "jaxrl_llm")
    assert len(list(misplaced(path, package))) == 1


def test_the_check_finds_relative_unknown_and_launch_imports(tree):
    path = tree("models/x.py", "from . import b\n")
    package = path.parents[1]
    with pytest.raises(AssertionError, match="absolute imports"):
        list(misplaced(path, package))
    with pytest.raises(AssertionError, match="does not import configs/"):
        list(misplaced(tree("models/y.py", "from configs import tiny\n"), package))
    with pytest.raises(AssertionError, match="has no floor"):
        list(misplaced(tree("extras/z.py", ""), package))


def test_the_check_finds_a_cycle_within_a_folder(tree):
    path = tree("models/b.py", "def f():\n    from jaxrl_llm.models import heads\n")
    with pytest.raises(graphlib.CycleError):
        import_order(path.parents[1])


JOB_CLASSES = ("RL", "SFT", "DPO", "RewardModeling", "Policy", "Supervised")


def test_no_code_asks_for_the_class_of_a_job():
    """What depends on the job is a property of its config."""
    classes = {f"{name}Config" for name in JOB_CLASSES}
    asked = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in module_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        if any(getattr(name, "id", "") in classes for name in ast.walk(node.args[1]))
    ]
    assert not asked
