"""Plans a run before it starts: `python launch/plan.py --config=FILE --topology=v5p:2x2x4`.

Or `--devices=8 --device=h100`; without both, it plans for the devices of this process. Prints the
bytes per device by program and part, whether they fit, the nearest change that fits, and the time
of a step. `--compile` also asks the compiler, without a TPU.
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("plan")
