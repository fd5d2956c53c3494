"""Runs the instructions of a Dockerfile in folders and virtual environments of this machine."""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess


@dataclasses.dataclass
class Stage:
    """One stage of an image: instructions in order."""

    name: str
    base: str
    instructions: list[tuple[str, str]]


def parse(text):
    """Returns the ARGs before the first stage, and the stages."""
    lines = re.sub(r"\\\n", "", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines()
    arguments, stages = {}, []
    for line in filter(str.strip, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name, base, []))
        elif stages:
            stages[-1].instructions.append((word, rest))
        else:
            assert word == "ARG", line
            arguments |= [rest.split("=")]
    return arguments, stages


def build(text, context, root, python, **build_arguments):
    """Runs all stages; each has a folder of `root` as its file system, with an environment `venv`.

    Returns the last stage's folder and the words of its ENTRYPOINT; raises CalledProcessError.
    """
    _, stages = parse(text)
    folders = {}
    for number, stage in enumerate(stages):
        folder = root / (stage.name or str(number))
        folders[stage.name] = folder
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        place, entrypoint, environment = folder, [], _environment(folder)
        for word, rest in stage.instructions:
            if word == "ARG":
                name, _, default = rest.partition("=")
                environment[name] = build_arguments.get(name, default)
            elif word == "WORKDIR":
                place = folder / rest.lstrip("/")
                place.mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                _copy(shlex.split(rest), context, folders, place)
            elif word == "RUN":
                subprocess.run(
                    ["/bin/sh", "-e", "-c", rest],
                    cwd=place, env=environment, check=True, capture_output=True, text=True,
                )  # fmt: skip
            elif word == "ENTRYPOINT":
                entrypoint = re.findall(r'"([^"]*)"', rest)
            else:
                assert word == "CMD", word
    return folder, entrypoint


def _environment(folder):
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "HTTP", "http", "SSL_", "LANG", "TMP"))
    }
    return kept | {"PATH": f"{folder / 'venv' / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}


def _copy(words, context, folders, place):
    source_root = context
    if words[0].startswith("--from="):
        source_root = folders[words.pop(0).removeprefix("--from=")]
    *sources, target = words
    for source in sources:
        found = pathlib.Path(source_root) / source.lstrip("/")
        if found.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(found, place / target, dirs_exist_ok=True, ignore=ignore)
        else:
            shutil.copy(found, place / target)
