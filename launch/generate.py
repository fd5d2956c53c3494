"""Answers prompts with a run's policy: `python launch/generate.py --workdir=DIR --prompt="3+4+2="`.

Or with the model of a Hugging Face folder: `--model=FOLDER`. Prompts come from `--prompt` (may be
repeated) or from the lines of standard input. Prints one JSON object per sample: `prompt`,
`output`, `log_prob`.
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("generate")
