"""Starts `launch/train.py` with updates of some seconds; a signal comes in the fourth.

By then the state after the third step is saved, however slow the machine is.
"""

import itertools
import os
import pathlib
import runpy
import signal
import sys
import time

from jaxrl_llm.learner import update

take, calls = update.Updater.__call__, itertools.count(1)


def long(*args, **kwargs):
    call = next(calls)
    if call == 4:
        (workdir,) = (a.partition("=")[2] for a in sys.argv if a.startswith("--workdir="))
        while not pathlib.Path(workdir, "checkpoints", "3").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(4.0 if call >= 2 else 0.0)
    return take(*args, **kwargs)


if __name__ == "__main__":
    update.Updater.__call__ = long
    sys.argv = [os.path.join(os.getcwd(), "launch", "train.py"), *sys.argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
