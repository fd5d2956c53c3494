"""Trains a policy with RL: `python launch/train.py --config=configs/grpo_tiny.py --workdir=DIR`.

Any setting can be changed: `--config.trainer.num_steps=50`. Run it again with the same
`--workdir` to resume.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from jaxrl_llm import config_bridge
from jaxrl_llm.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "File that describes the run.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, made if missing.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv):
    del argv
    try:
        config = config_bridge.from_config_dict(CONFIG.value)
        from jaxrl_llm.trainer import rl  # JAX only once the config is known to be sound

        rl.train(config, WORKDIR.value)
    except UserError as error:
        logging.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    app.run(main, flags_parser=config_bridge.parse_flags)
