"""The site is built strictly; settings, metrics and alerts are documented without exception."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "site"))

import settings  # noqa: E402

from jaxrl_llm.config.bridge import JOBS  # noqa: E402
from jaxrl_llm.config.stop_condition import METRIC_NAMES  # noqa: E402
from jaxrl_llm.metrics.alerts import ALERTS  # noqa: E402

KEYS = {s.key: s for cls in JOBS.values() for s in settings.settings(cls, outer=cls())}
# Parts of a name that stand for others.
PLACES = r"SOURCE|NAME|ROLE|PHASE|MODULE|KIND|OPTION|JOB|K\b|P\b|E\b"


def documented():
    """Returns the names of docs/metrics.md, `{a,b}` spelled out."""
    rows = re.findall(r"^\| (`.*?`) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    found = []
    for name in (name for row in rows for name in re.findall(r"`([^`]+)`", row)):
        parts = re.search(r"\{(.*)\}", name)
        each = parts[1].split(",") if parts else [""]
        found += [name.replace(parts[0], part) if parts else name for part in each]
    return found


DOCUMENTED = documented()
KNOWN = [re.compile(re.sub(PLACES, ".+", re.escape(name))) for name in DOCUMENTED]


def named_in_code():
    """Yields what looks like the name of a metric in the package; `*` for what is computed."""
    looks = re.compile(r"[a-z_*]+(?:/[\w*@]+)+")
    for path in sorted((ROOT / "jaxrl_llm").rglob("*.py")):
        if path.parts[-2] in ("config", "commands", "viewer", "serving", "models", "processes"):
            continue
        tree = ast.parse(path.read_text())
        texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
                 for part in node.values}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = "" if id(node) in texts else node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(
                    part.value if isinstance(part, ast.Constant) else "*" for part in node.values
                )
            else:
                continue
            if looks.fullmatch(text) and not text.startswith("*"):
                yield text


def is_documented(name):
    """Returns whether a row is of this name; a name that is computed in part may have several."""
    probe, pattern = name.replace("*", "x"), re.escape(name).replace(r"\*", ".+")
    return any(known.fullmatch(probe) for known in KNOWN) or any(
        re.fullmatch(f"(?:.+/)?{pattern}", each) for each in DOCUMENTED
    )


# No metrics: units, places, types of content.
OTHERS = {
    "tokens/s",
    "application/json",
    "jaxrl_llm/alive",
    "row/*",
    "reward_models/*",
    "openai/gsm8k",
    "n/a",
}
OTHERS |= {"runs/from_python", "checkpoints/*", "critic/cost", "critic/rewards", "critic/returns"}
OTHERS |= {"critic/score", "critic/values", "critic/advantages"}  # followed by mean, max, min


def test_every_metric_of_the_code_is_documented():
    found = set(named_in_code()) - OTHERS
    assert len(found) > 80
    missing = [name for name in found if not is_documented(name)]
    assert not missing, f"add a row to docs/metrics.md: {sorted(missing)}"


def test_every_documented_metric_is_in_the_code():
    files = (ROOT / "jaxrl_llm").rglob("*.py")
    source = "".join(p.read_text() for p in files if p.stem != "stop_condition")  # the names alone
    for name in DOCUMENTED:
        parts = [p for p in re.split(r"[/@]", name) if p and not re.search(PLACES, p)]
        words = [word for part in parts for word in part.split("_")]  # f"{name}_length"
        assert words and not [word for word in words if word not in source], name


def test_conditions_know_the_documented_metrics():
    assert set(METRIC_NAMES) == set(DOCUMENTED)


def test_every_setting_has_a_meaning_and_every_meaning_a_setting():
    assert len(KEYS) > 250
    without = sorted(key for key, found in KEYS.items() if not found.meaning)
    assert not without, f"write a comment at the field, or a line in meanings.yaml: {without}"
    seen = {f"{base.__name__}.{field}" for cls in groups() for base in cls.__mro__
            for field in vars(base).get("__annotations__", {})}  # fmt: skip
    assert not [name for name in settings.MEANINGS if name not in seen]


def groups():
    """Returns every group of settings."""
    from jaxrl_llm.config.validation import ConfigGroup

    found, todo = [], [ConfigGroup]
    while todo:
        todo += (below := todo.pop().__subclasses__())
        found += below
    return found


def test_pages_of_the_reference_have_every_key_and_alert():
    page, alerts = settings.page(), settings.alerts()
    assert not [key for key in KEYS if f"`{key.removeprefix('config.')}`" not in page]
    assert not [name for name in ALERTS if f"| `{name}` |" not in alerts]
    of_guide = (DOCS / "reliability.md").read_text()
    assert not [name for name in ALERTS if f"| `{name}` |" not in of_guide]


GROUPS = "|".join(sorted({key.split(".")[1] for key in KEYS if key.count(".") > 1}))
NAMED = re.compile(rf"`(?:--)?(?:config\.)?((?:{GROUPS})\.[a-zA-Z_0-9.]+)")


def exists(key):
    """Returns whether a setting, or a group of settings, has this name; NAME may be any name."""
    parts = key.split(".")
    for known in KEYS:
        found = known.split(".")[1:]
        if KEYS[known].allowed == "names with values" and parts[: len(found)] == found:
            return True
        if len(parts) <= len(found) and all(
            a == b or b == "NAME" for a, b in zip(parts, found, strict=False)
        ):
            return True
    return False


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda p: p.stem)
def test_settings_that_a_document_names_exist(path):
    if path.name == "log.md":  # it tells what was on its day
        return
    text = path.read_text()
    if path.name in ("from_verl.md", "from_trl.md"):  # the other's keys are in the first column
        text = re.sub(r"^\| .*? \| ", "| ", text, flags=re.MULTILINE)
    named = {found.rstrip(".") for found in NAMED.findall(text)} - {"rewards.cost_"}
    files = {name for name in named if re.search(r"\.(py|md|jsonl|parquet|json)$", name)}
    assert not sorted(name for name in named - files if not exists(name))


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")  # what a later mkdocs will not do
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    pages = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.html")}
    assert {"index.html", "reference/api.html", "reference/settings.html"} <= pages
    text = (tmp_path / "reference" / "api.html").read_text()
    assert 'id="jaxrl_llm.train"' in text and 'id="jaxrl_llm.rollout.engine.engine.Engine"' in text
    # Nothing is loaded from elsewhere.
    home = (tmp_path / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)', home)
