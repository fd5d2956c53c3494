"""Changes the layout of a running job of RL between two of its steps.

`python launch/control.py --workdir=DIR mesh.fsdp=1 mesh.tensor=4`
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("control")
