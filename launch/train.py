"""Runs a training job: `python launch/train.py --config=configs/grpo_tiny.py --workdir=DIR`.

The config names the job in `job`: `rl`, `sft` or `reward_model`. You can change every setting, for
example `--config.trainer.num_steps=50`. To resume, start it again with the same `--workdir`.
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("train")
