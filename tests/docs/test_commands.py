"""Every command of the README and the docs is run as written, or listed here with the reason."""

import dataclasses
import pathlib
import re
import shlex
import sys

import commands
import hub_server
import pytest
import runs
import serving_model

from jaxrl_llm.commands.options import COMMANDS as COMMANDS_OF
from jaxrl_llm.commands.options import LAUNCH_ONLY_COMMANDS
from jaxrl_llm.config import RLConfig
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.serving import server
from jaxrl_llm.trainer import rl

ROOT = pathlib.Path(__file__).parents[2]
# The log tells what was run on its day.
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS.remove(ROOT / "docs" / "log.md")
PROGRAMS = "jaxrl_llm|python|pip|pytest|pre-commit|sbatch|kubectl|mpirun|hf"
BEGINS = rf"(?:(?:{PROGRAMS}) |launch/tpu_pod|\.ci/run)"
# What only an extra brings, of what the commands here could want.
PACKAGES = {
    "math": ["math_verify"],
    "plot": ["matplotlib"],
    "serve": ["fastapi", "uvicorn", "prometheus_client"],
}
NOT_RUN = {
    r"pip install|pre-commit install": "makes the environment of .ci/run",
    r"hf auth login": "asks for a token",
    r"pytest|\.ci/run": "this is it",
    r"sbatch|kubectl|launch/tpu_pod\.sh": "needs a cluster; see tests/launch/test_cluster_files.py",
    r"mpirun|python .*--process_id=": "several processes; see tests/e2e/test_multihost.py",
    r"python launch/serve_jetstream\.py": "see tests/serving/test_jetstream.py",
    r"python launch/plan\.py --compile": "compiles for minutes, with the compiler of TPUs",
    r"python -c ": "shows the devices of this machine",
    r"pip wheel": "see the short run of .ci/run",
    r".*(?:--config=FILE|--workdir=DIR)": "a pattern, with places of the reader's",
    r"python docs/learn/check\.py": "see tests/docs/test_exercises.py",
    r"python docs/site/figures\.py": "draws from runs of minutes",
    r"python benchmarks/": "measures for minutes; its file and flags are looked up here",
    r".* --help$": "shows the flags",
    r"jaxrl_llm view": "see tests/viewer/",
    r"jaxrl_llm control": "needs a run at work; see tests/e2e/test_layouts.py",
    r"jaxrl_llm (?:configs|new)\b": "see tests/commands/test_starters.py",
    r"jaxrl_llm run\b": "see tests/faults/test_supervised_runs.py",
    r"jaxrl_llm envs": "see tests/commands/test_envs.py",
    r"jaxrl_llm export .*--to=": "needs a hub; see tests/launch/test_export_upload.py",
    r"jaxrl_llm export .*--format=gguf": "see tests/launch/test_export_folder.py",
    r".* --workdir=(?:gs|s3)://": "needs a bucket; see tests/faults/test_bucket_runs.py",
    r".*rollout\.engine=vllm": "needs vLLM; see tests/rollout/vllm_engine/test_vllm_live.py",
    r".* --tasks=": "needs lm-eval; see tests/launch/test_lm_eval.py",
    r".* --replay ": "see tests/sampling/test_dump_source.py",
    r".* --dry_run$": "see tests/commands/test_command_line.py",
}
# A run in seconds: sizes and numbers of steps are settings as all others.
FEWER = {**runs.TINY, "trainer.num_steps": 1, "warm_start.num_steps": 2}
SETTINGS = {
    "reward_model": {"preference.num_steps": 2, "preference.batch_size": 16},
    "dapo": {"algorithm.dynamic_sampling": False},  # nothing is learned yet: all groups are equal
    "sums": {"warm_start.num_steps": 0},
    "qwen3": {"warm_start.num_steps": 0},
    "agent_course": {"data.max_prompt_tokens": 40, "rollout.max_response_tokens": 112},
    "shapes": {"data.max_prompt_tokens": 40},
}


def found():
    """Yields each command once, with the extras that its section says to install."""
    seen = set()
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", document.read_text().replace("\\\n", " "), flags=re.DOTALL)
        for section in re.split(r"^## ", text, flags=re.MULTILINE):
            extras = set(",".join(re.findall(r"\.\[([\w,]+)\]", section)).split(","))
            lines = re.findall(rf"^ +({BEGINS}.*)|`({BEGINS}[^`\n]*)`", section, re.MULTILINE)
            for line in (a or b for a, b in lines):
                for command in line.partition("  #")[0].split(" && "):
                    command = " ".join(command.removesuffix(" &").split())
                    if command not in seen:
                        seen.add(command)
                        yield command, frozenset(extras)


COMMANDS = dict(found())
RUN = {c: e for c, e in COMMANDS.items() if not any(re.match(known, c) for known in NOT_RUN)}
OF_A_RUN = [c for c in RUN if "--workdir=" in c]


def test_each_is_run_or_has_a_reason():
    assert len(COMMANDS) > 20
    assert not [c for c in RUN if not re.match(r"python launch/(\w+)\.py |jaxrl_llm (\w+) ", c)]
    assert not [known for known in NOT_RUN if not any(re.match(known, c) for c in COMMANDS)]


def test_files_and_flags_of_those_that_are_not_run_exist():
    source = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    for command in COMMANDS.keys() - RUN.keys():
        words = shlex.split(command)
        files = [w for w in words if re.match(r"(?:launch|benchmarks|tests|configs|docs)/", w)]
        assert not [name for name in files if not (ROOT / name).exists()], command
        if files and files[0].startswith("benchmarks/"):
            flags = [w.partition("=")[0] for w in words if w.startswith("--")]
            assert not [flag for flag in flags if f'"{flag}"' not in source], command


def test_flags_that_the_text_names_exist():
    named = [
        found
        for document in DOCUMENTS
        for found in re.findall(r"`launch/(\w+)\.py --(\w+)`", document.read_text())
    ]
    assert len(named) > 2
    assert not [
        (name, flag)
        for name, flag in named
        if flag
        not in {f.name for f in dataclasses.fields({**COMMANDS_OF, **LAUNCH_ONLY_COMMANDS}[name])}
    ]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the repository's; a model stands in FOLDER, and on the hub by its name."""
    for name in ("configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    serving_model.make_folder(tmp_path / "FOLDER")
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    with hub_server.HubServer() as hub:
        hub_server.use_hub(monkeypatch, hub, tmp_path / "hf")
        hub.add("Qwen/Qwen3-0.6B", tmp_path / "FOLDER")
        yield tmp_path


def python_of(document):
    """Returns the blocks of Python in a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / document).read_text(), re.DOTALL)


def name_of(command):
    """Returns the name of a command, written as `python launch/NAME.py` or as `jaxrl_llm NAME`."""
    return pathlib.Path(command.split()[1]).stem


def call(capsys, command, *more):
    """Runs a command with the packages of its own extras alone; returns what it printed."""
    arguments = shlex.split(command)[2:]
    with pytest.MonkeyPatch.context() as patch:
        for extra, packages in PACKAGES.items():
            for package in packages if extra not in RUN[command] else ():
                patch.setitem(sys.modules, package, None)
        name = name_of(command)
        code, out, log = commands.call(capsys, name, *arguments, *more)
    assert code == 0, log
    return out


@pytest.mark.parametrize(
    "command",
    [
        # It looks for the nearest run that fits, which takes seconds.
        pytest.param(c, marks=pytest.mark.slow if "_70b" in c else ())
        for c in RUN
        if c not in OF_A_RUN
    ],
)
def test_a_command_without_a_run(command, capsys, place, monkeypatch):
    served = []
    monkeypatch.setattr(server, "run", lambda *given, **_: served.append(given))
    more = {
        "serve": ["--port=0"],
        "generate": ["--max_tokens=4"],
        "evaluate": ["--num_prompts=2", "--config.rollout.max_response_tokens=8"],
    }
    name = name_of(command)
    out = call(capsys, command, *more.get(name, ()))
    assert out or served
    if "--chart=" in command:
        assert (place / "plan.png").exists()


@pytest.mark.parametrize("command", [c for c in OF_A_RUN if name_of(c) == "train"])
def test_a_run_is_described_rightly(command, capsys, place, monkeypatch):
    """Read and validated as written; the slow test below takes a step."""
    given = []
    (place / "my_algorithm.py").write_text(python_of("custom_algorithm.md")[0])
    monkeypatch.setattr(rl, "train", lambda config, workdir: given.append(config))
    monkeypatch.setattr(resolve_sizes, "resolve", lambda config, workdir: config)
    monkeypatch.setattr(resolve_sizes, "check_memory", lambda config, devices: 0.0)
    call(capsys, command)
    (config,) = given
    assert isinstance(config, RLConfig) and not list(config.warnings())


@pytest.mark.slow
def test_the_commands_of_runs(capsys, place, one_device, monkeypatch):
    """In the order of the documents, in one folder; later ones use what earlier ones made."""
    monkeypatch.setattr(server, "run", lambda *_, **__: None)
    monkeypatch.chdir(place)
    (place / "my_algorithm.py").write_text(python_of("custom_algorithm.md")[0])
    (place / "my_engine.py").write_text(python_of("custom_engine.md")[0])
    exec(python_of("data.md")[1], {})
    for command in sorted(OF_A_RUN, key=lambda c: name_of(c) != "train"):
        run = re.search(r"--workdir=runs/(\w+)", command)[1]
        if name_of(command) == "train":
            fewer = {**FEWER, **SETTINGS.get(run, {})}
            more = [f"--config.{name}={value}" for name, value in fewer.items()]
        else:
            few = {"serve": ["--port=0"], "generate": ["--max_tokens=4"]}
            more = few.get(name_of(command), [])
        call(capsys, command, *more)
        assert (place / "runs" / run / "metrics.jsonl").exists()
