"""The starter configs that the package brings: what `--config=NAME` means without a file."""

import ast
import dataclasses
import difflib
import pathlib
import re

_INSTALLED = pathlib.Path(__file__).parents[1] / "starter_configs"
# `configs/` of a checkout; a wheel has the same files in a package of its own (pyproject.toml).
FOLDER = _INSTALLED if _INSTALLED.is_dir() else pathlib.Path(__file__).parents[2] / "configs"
_PLAN = re.compile(r"(\d+ x [^\n]*?: [\d.]+ of [\d.]+ GiB a device)")


@dataclasses.dataclass(frozen=True)
class Starter:
    """A starter config as its docstring describes it."""

    name: str
    task: str
    machine: str
    memory: str  # planned; "": the docstring has no plan

    @classmethod
    def from_file(cls, path: pathlib.Path) -> "Starter":
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        task, _, machine = text.partition("\n")[0].rstrip(".").rpartition(": ")
        plan = _PLAN.search(text)
        return cls(path.stem, task, machine, plan[1] if plan else "")


def names() -> list[str]:
    """The names of all starter configs, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def find(name: str) -> pathlib.Path | None:
    """The file of a starter config; None if there is none of this name."""
    path = FOLDER / f"{name}.py"
    return path if re.fullmatch(r"[\w.]+", name) and path.is_file() else None


def hint(name: str) -> str:
    """Remedy for a name that is neither a file nor a starter config."""
    near = difflib.get_close_matches(pathlib.Path(name).stem, names(), n=1)
    about = f"did you mean the starter config {near[0]!r}? " if near else ""
    return f"{about}`jaxrl_llm configs` lists those that come with the package"
