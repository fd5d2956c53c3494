"""Evaluates a run's policy on its held-out prompts: `python launch/evaluate.py --workdir=DIR`.

Or evaluates a Hugging Face folder on the prompts of a config: `--model=FOLDER --config=FILE`.
Prints one JSON object with mean@k, pass@k and maj@k of each data source.
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("evaluate")
