"""Writes what a run learned as a Hugging Face folder, with merged LoRA adapters or only these.

A policy becomes a causal language model, a reward model a sequence classifier with one label.

`python launch/export.py --workdir=DIR --out=DIR`
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("export")
