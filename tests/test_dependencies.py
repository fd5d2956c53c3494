"""pyproject.toml declares exactly the distributions that the code imports."""

import ast
import functools
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Set

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT_FILE = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PROJECT_FILE)["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Name of an import -> name of its distribution, where they differ.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "agents": "openai-agents",
    "google": "google-cloud-storage",  # google.cloud.exceptions comes with it
    "griffe": "mkdocstrings",  # which is built on it
    "grpc": "grpcio",
    "jaxlib": "jax",  # which needs its own version of it
    "jetstream": "google-jetstream",
    "mcp_types": "mcp",  # which needs its own version of it
    "orbax": "orbax-checkpoint",
    "PIL": "pillow",
    "cfnlint": "cfn-lint",
    "pydantic_core": "pydantic",  # which needs its own version of it
    "yaml": "pyyaml",
}
# Extras for work on this repository; the others are features of the package.
DEVELOPMENT = {"dev", "docs", "goldens", "notebook", "parity", "test"}
# Requirements of features that .ci/run does not install.
UNPINNED = {"lm-eval", "mlflow", "trackio", "verifiers", "wandb"}
# Plugins of jax that tests probe for; the extras `tpu` and `cuda` bring them through jax.
PROBED = {"libtpu", "jax_plugins"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution(module: str) -> str:
    name = module.partition(".")[0]
    return normalized(DISTRIBUTIONS.get(name, name))


def declared(requirements: list[str]) -> set[str]:
    """The distributions of requirements; `jaxrl_llm[extra]` stands for those of the extra."""
    names = set()
    for requirement in requirements:
        name, _, extras = re.fullmatch(r"([\w.-]+)(\[([\w,]+)\])?[^\[]*", requirement).groups()
        if name == PROJECT["name"]:
            names |= set().union(*(declared(EXTRAS[extra]) for extra in extras.split(",")))
        else:
            names.add(normalized(name))
    return names


BASE = declared(PROJECT["dependencies"])


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a module that run when it is imported."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            waiting += ast.iter_child_nodes(node)


@functools.cache
def imported(path: pathlib.Path, inside_functions: bool = True) -> frozenset[str]:
    """The modules that a file imports, `import_module("name")` and `importorskip` included."""
    tree, names = ast.parse(path.read_text()), set()
    for node in ast.walk(tree) if inside_functions else outside_functions(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            argument = node.args[0] if node.args else None
            is_import = node.func.attr in ("import_module", "importorskip")
            if is_import and isinstance(argument, ast.Constant):
                names.add(argument.value)
    return frozenset(names)


def python_files(*folders: str) -> list[pathlib.Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


# They run in the interpreter of an environment with vLLM, not in that of the package.
FOREIGN = {
    ROOT / "jaxrl_llm" / "rollout" / "vllm_engine" / name
    for name in ("vllm_backend.py", "weight_readback.py")
}
PACKAGE_FILES = [path for path in python_files("jaxrl_llm") if path not in FOREIGN]
# Agents of others run in an environment of their own, with the frameworks that they import.
OTHER_FILES = [p for p in python_files("tests", "docs") if "foreign_agents" not in p.parts]
# Tests and docs import each other by file name.
OWN_NAMES = {"jaxrl_llm", *(path.stem for path in OTHER_FILES)}


def third_party(
    files: Iterable[pathlib.Path], own: Set[str], inside_functions: bool = True
) -> set[str]:
    """The distributions that files import, without modules named in `own`."""
    modules = set().union(*(imported(path, inside_functions) for path in files))
    names = {name.partition(".")[0] for name in modules}
    return {distribution(name) for name in names - own - PROBED - set(sys.stdlib_module_names)}


@functools.cache
def loaded_files(path: pathlib.Path) -> frozenset[pathlib.Path]:
    """The files of the package that a file imports directly, parent packages included."""
    files = set()
    for module in imported(path, inside_functions=False):
        parts = module.split(".") if module.startswith("jaxrl_llm.") else []
        for end in range(1, len(parts) + 1):
            stem = ROOT.joinpath(*parts[:end])
            files |= {stem / "__init__.py", stem.with_suffix(".py")}
    return frozenset(files.intersection(PACKAGE_FILES))


def needed(path: pathlib.Path) -> set[str]:
    """The distributions that importing a file of the package imports, directly or not."""
    files, waiting = set(), {path}
    while waiting:
        files |= waiting
        waiting = set().union(*map(loaded_files, waiting)) - files
    return third_party(files, {"jaxrl_llm"}, inside_functions=False)


def test_the_base_and_at_most_one_extra_cover_the_imports_of_each_module():
    features = [declared(EXTRAS[extra]) for extra in EXTRAS if extra not in DEVELOPMENT]
    for path in PACKAGE_FILES:
        missing = needed(path) - BASE
        assert not missing or any(missing <= feature for feature in features), (path, missing)
    assert third_party(PACKAGE_FILES, {"jaxrl_llm"}) <= BASE.union(*features)


def test_errors_about_missing_packages_name_an_extra_that_has_them():
    calls = [
        node
        for path in PACKAGE_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "check_package"
    ]
    pairs = [
        (node.args[0].value, node.args[1].value)
        for node in calls
        if len(node.args) == 3 and all(isinstance(arg, ast.Constant) for arg in node.args[:2])
    ]
    assert len(pairs) > 4
    assert not [(p, extra) for p, extra in pairs if distribution(p) not in declared(EXTRAS[extra])]


def test_tests_and_docs_import_only_declared_packages():
    declared_names = BASE.union(*(declared(extra) for extra in EXTRAS.values()))
    assert third_party(OTHER_FILES, OWN_NAMES) <= declared_names


def has_comment(requirement: str) -> bool:
    """Whether a comment precedes the line of a requirement in pyproject.toml."""
    lines = PROJECT_FILE.splitlines()
    numbers = [number for number, line in enumerate(lines) if f'"{requirement}"' in line]
    return any(lines[number - 1].lstrip().startswith("#") for number in numbers)


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_each_requirement_is_imported_or_has_a_comment(extra):
    """The package must import base and features; tests and docs may use the other extras."""
    files = PACKAGE_FILES + (OTHER_FILES if extra in DEVELOPMENT else [])
    imports = third_party(files, OWN_NAMES if extra in DEVELOPMENT else {"jaxrl_llm"})
    requirements = EXTRAS[extra] if extra else PROJECT["dependencies"]
    own = [each for each in requirements if not each.startswith(PROJECT["name"])]
    unused = [each for each in own if not declared([each]) <= imports]
    assert not [each for each in unused if not has_comment(each)]


def test_constraints_name_a_version_of_each_requirement():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normalized(line.partition("==")[0]) for line in lines if "==" in line}
    declared_names = BASE.union(*(declared(extra) for extra in EXTRAS.values()))
    assert declared_names - pinned == UNPINNED
