"""Asks a running job for another layout."""

import pathlib
import time

from jaxrl_llm import errors
from jaxrl_llm.checkpoint import lock
from jaxrl_llm.commands.options import Control
from jaxrl_llm.config import layout
from jaxrl_llm.config.folder import load_config, newest_step

_POLL_S = 0.2


def main(options: Control) -> None:
    workdir = options.workdir
    text = "" if options.layout == ("config",) else " ".join(options.layout)
    layout.check(workdir, text)
    if not lock.is_held(pathlib.Path(workdir)):
        errors.refuse([("workdir", _not_running(workdir))])
    before = len(layout.answers(workdir))
    layout.ask(workdir, text)
    deadline = time.monotonic() + options.wait_s
    while True:
        # In this order: a run may answer and end at once, and its answer counts.
        is_running = lock.is_held(pathlib.Path(workdir))
        if len(answers := layout.answers(workdir)) > before:
            break
        if not is_running:
            layout.withdraw(workdir)
            message = f"{_not_running(workdir)}; it ended before it answered"
            errors.refuse([("workdir", message)])
        if time.monotonic() >= deadline:
            print(f"{workdir}: asked; the run looks at it before its next step")
            return
        time.sleep(_POLL_S)
    line = answers[before]
    if refused := line.get("refused"):
        errors.refuse([("layout", refused)])
    print(f"{workdir}: from step {line['step']} on: {line.get('layout') or 'as in the config'}")


def _not_running(workdir: str) -> str:
    total, done = load_config(workdir).trainer.num_steps, newest_step(workdir)
    if done >= total:
        return f"{workdir}: this run has ended, all {total} steps are done"
    state = f"no process is at work on this run, which has saved {done} of {total} steps"
    return f"{workdir}: {state}; start it, then ask again"
