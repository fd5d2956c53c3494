"""Trains a policy with RL: `python launch/train.py --config=configs/grpo_tiny.py --workdir=DIR`.

Any setting can be changed: `--config.trainer.num_steps=50`. Run it again with the same
`--workdir` to resume.
"""

from absl import flags
from ml_collections import config_flags

from jaxrl_llm import program
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.console import screen

CONFIG = config_flags.DEFINE_config_file("config", None, "File that describes the run.")
flags.mark_flag_as_required("config")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, made if missing.", required=True)


def main():
    config = from_config_dict(CONFIG.value)
    program.keep_compilations(WORKDIR.value)
    with screen.work("loading the libraries"):
        from jaxrl_llm.trainer import jobs
    jobs.train(config, WORKDIR.value)


if __name__ == "__main__":
    program.run(main)
