"""Runs a training job, or only checks it."""

import os

import jax

import jaxrl_llm
from jaxrl_llm import console, program
from jaxrl_llm.commands.options import Train
from jaxrl_llm.config import JobConfig, yaml_file
from jaxrl_llm.config.bridge import to_dict
from jaxrl_llm.learner import planned
from jaxrl_llm.planning import report


def _refuse_what_cannot_fit(config: JobConfig, workdir: str) -> None:
    """Raises ConfigError if an RL run cannot fit, before the libraries of a run are loaded."""
    if not config.learns_from_samples:
        return
    run = config.require_rl()
    paths = [run.model.path, *run.scorer_paths]
    if all(not path or os.path.isdir(path) for path in paths):  # a missing one is named later
        planned.check(planned.settled(run, workdir), jax.devices())


def main(options: Train) -> None:
    if not options.dry_run:
        program.keep_compilations(options.workdir)
    _refuse_what_cannot_fit(options.config, options.workdir)
    with console.work("loading the libraries"):
        from jaxrl_llm.trainer import loops  # noqa: F401
    if options.dry_run:
        _show(jaxrl_llm.check(options.config, options.workdir, options.replay), options.workdir)
    else:
        jaxrl_llm.train(options.config, options.workdir, replay=options.replay)


def _show(config: JobConfig, workdir: str) -> None:
    """Prints the settings of a checked job as a config file, with the plan as comments."""
    plan = planned.plan(config, planned.here(jax.devices()))
    shown = "\n\n".join([
        f"Checked; nothing was allocated, nothing written to {workdir}.",
        report.headline(plan),
        report.table(plan, {}),
    ])  # fmt: skip
    print("\n".join(f"# {line}".rstrip() for line in shown.splitlines()))
    print(yaml_file.text(to_dict(config)), end="")
