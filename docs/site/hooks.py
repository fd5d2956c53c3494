"""What mkdocs does besides: makes the reference from the code, and pages of linked source files.

The documents link to files of the repository as they do on a code host. In the site, each such file
is a page of its own, so that no link leaves the site.
"""

import json
import pathlib
import posixpath
import re
import sys
from collections.abc import Iterator

from mkdocs.structure.files import File

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import settings

ROOT = pathlib.Path(__file__).parents[2]
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s:]+)(#[^)]*)?\)")
# Modules of the reference of the Python API, those that users call or name in a config.
MODULES = (
    "jaxrl_llm", "jaxrl_llm.config.bridge", "jaxrl_llm.algorithms.advantages",
    "jaxrl_llm.algorithms.token_baselines", "jaxrl_llm.algorithms.policy_losses",
    "jaxrl_llm.algorithms.losses", "jaxrl_llm.algorithms.kl", "jaxrl_llm.algorithms.aggregation",
    "jaxrl_llm.algorithms.corrections", "jaxrl_llm.algorithms.safe_rlhf",
    "jaxrl_llm.rewards.functions", "jaxrl_llm.rewards.math", "jaxrl_llm.rewards.code",
    "jaxrl_llm.agents.environments", "jaxrl_llm.agents.tools", "jaxrl_llm.rollout.engine.engine",
    "jaxrl_llm.rollout.engine_api", "jaxrl_llm.rollout.engine.requests",
    "jaxrl_llm.planning.memory_plan", "jaxrl_llm.types", "jaxrl_llm.processes.sandbox",
    "jaxrl_llm.metrics.alerts",
)  # fmt: skip


def on_config(config):
    """Adds the documents that the navigation does not name."""
    docs = pathlib.Path(config.docs_dir)
    found = {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")}
    if rest := sorted(found - set(named(config.nav)) - {"README.md"}):
        config.nav.append({"More": rest})
    return config


def named(nav) -> Iterator[str]:
    """Yields the documents in a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from named(part)


def on_files(files, config):
    """Adds the reference, and a page for each file that a document links to."""
    made = {"reference/settings.md": settings.page(), "reference/alerts.md": settings.alerts()}
    made["reference/api.md"] = api()
    for page in [*files.documentation_pages()]:
        text = pathlib.Path(page.abs_src_path).read_text()
        for target in linked(page.src_uri, text):
            made[address_of(target)] = source_page(target)
            if target.endswith(".md"):  # a document outside of docs/: its own links too
                for other in linked(address_of(target), made[address_of(target)]):
                    made.setdefault(address_of(other), source_page(other))
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links to files of the repository into links to their pages."""
    here = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        target = outside(here, match[2])
        if target is None:
            return match[0]
        to = posixpath.relpath(address_of(target), posixpath.dirname(here) or ".")
        return f"{match[1]}{to}{match[3] or ''})"

    return LINK.sub(replaced, markdown)


def outside(uri: str, link: str) -> str | None:
    """Returns the path of a linked file below the root of the repository, if it is not in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), link))
    return None if path.startswith("docs/") or path.startswith("..") else path


def linked(uri: str, text: str) -> Iterator[str]:
    """Yields the files of the repository that a document links to."""
    for match in LINK.finditer(text):
        target = outside(uri, match[2])
        if target is not None:
            yield target


def address_of(path: str) -> str:
    """Returns the page of a file of the repository."""
    if path.endswith(".md"):
        return f"repository/{path}"
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def source_page(path: str) -> str:
    """Returns a file as a page: a document as it is, a notebook's cells, others as code."""
    file = ROOT / path
    if not file.exists():
        raise FileNotFoundError(f"a document links to {path}, which does not exist")
    if file.is_dir():
        names = sorted(p.name for p in file.iterdir() if p.suffix == ".py")
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    if path.endswith(".md"):
        return as_in_site(path, file.read_text())
    if path.endswith(".ipynb"):
        return f"# {path}\n\n" + "\n\n".join(cells(path))
    if path.endswith(".png"):
        return f"# {path}\n"
    language = LANGUAGES.get(file.suffix, "")
    return f"# {path}\n\n````{language}\n{file.read_text()}\n````\n"


def as_in_site(path: str, text: str) -> str:
    """Returns text of a file of the repository with links as seen from the file's page."""
    here = posixpath.join("docs", posixpath.dirname(address_of(path)))

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        return f"{match[1]}{posixpath.relpath(target, here)}{match[3] or ''})"

    return LINK.sub(replaced, text)


def cells(path: str) -> Iterator[str]:
    """Yields the cells of a notebook as Markdown."""
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        text = "".join(cell["source"])
        is_text = cell["cell_type"] == "markdown"
        yield as_in_site(path, text) if is_text else f"```python\n{text}\n```"


def api() -> str:
    """Returns the page of the Python API."""
    parts = ["# Python API\n\nWhat users call, or name in a config. Other modules may change."]
    return "\n\n".join([*parts, *(f"::: {module}" for module in MODULES)]) + "\n"
