"""Runs a training job, or checks it only (`--dry_run`)."""

import jaxrl_llm
from jaxrl_llm import console, program
from jaxrl_llm.commands.options import TrainOptions
from jaxrl_llm.config import JobConfig, yaml_file
from jaxrl_llm.config.bridge import to_dict
from jaxrl_llm.planning import plan_report, resolve_sizes
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.storage import model_folder


def _check_fits(config: JobConfig, workdir: str) -> None:
    """Raises ConfigError if an RL run does not fit, before the training libraries are imported."""
    if not config.learns_from_samples:
        return
    run = config.require_rl()
    paths = [path for path in (run.model.path, *run.scorer_paths) if path]
    if all(model_folder.may_exist(path) for path in paths):  # a missing one is reported later
        resolve_sizes.check_memory(resolve_sizes.resolve(run, workdir), mesh_lib.run_devices())


def main(options: TrainOptions) -> None:
    if not options.dry_run:
        program.enable_compilation_cache(options.workdir)
    _check_fits(options.config, options.workdir)
    with console.show_progress("loading the libraries"):
        from jaxrl_llm.trainer import loops  # noqa: F401
    if options.dry_run:
        _print_plan_and_settings(
            jaxrl_llm.check(options.config, options.workdir, options.replay), options.workdir
        )
    else:
        jaxrl_llm.train(options.config, options.workdir, replay=options.replay)


def _print_plan_and_settings(config: JobConfig, workdir: str) -> None:
    """Prints the settings of a checked job as a config file, with the plan as comments."""
    plan = resolve_sizes.make_plan(config, resolve_sizes.local_target(mesh_lib.run_devices()))
    header = "\n\n".join([
        f"Checked; nothing was allocated, nothing written to {workdir}.",
        plan_report.headline(plan),
        plan_report.memory_table(plan, {}),
    ])  # fmt: skip
    print("\n".join(f"# {line}".rstrip() for line in header.splitlines()))
    print(yaml_file.text(to_dict(config)), end="")
