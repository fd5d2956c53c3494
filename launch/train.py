"""Runs a training job: `python launch/train.py --config=configs/grpo_tiny.py --workdir=DIR`.

The config names the job in `job`: `rl`, `sft` or `reward_model`. You can change every setting, for
example `--config.trainer.num_steps=50`. To resume, start it again with the same `--workdir`.
"""

import os

import jax
from absl import flags
from ml_collections import config_flags

import jaxrl_llm
from jaxrl_llm import console, program
from jaxrl_llm.config import JobConfig, RLConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.learner import planned

CONFIG = config_flags.DEFINE_config_file("config", None, "File that describes the job.")
flags.mark_flag_as_required("config")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the job, made if missing.", required=True)


def _refuse_what_cannot_fit(config: JobConfig) -> None:
    """Raises ConfigError if an RL run cannot fit, before the libraries of a run are loaded."""
    if not isinstance(config, RLConfig):
        return
    paths = [config.model.path, *config.scorer_paths]
    if all(not path or os.path.isdir(path) for path in paths):  # a missing one is named later
        planned.check(planned.settled(config, WORKDIR.value), jax.devices())


def main():
    config = from_config_dict(CONFIG.value)
    program.keep_compilations(WORKDIR.value)
    _refuse_what_cannot_fit(config)
    with console.work("loading the libraries"):
        from jaxrl_llm.trainer import rl, supervised  # noqa: F401
    jaxrl_llm.train(config, WORKDIR.value)


if __name__ == "__main__":
    program.run(main)
