"""Requests another layout from a running job and waits for its answer."""

import time

from jaxrl_llm import errors
from jaxrl_llm.checkpoint import lock
from jaxrl_llm.commands.options import ControlOptions
from jaxrl_llm.config import layout_requests
from jaxrl_llm.config.workdir import load_config, newest_step
from jaxrl_llm.storage import files

_POLL_S = 0.2


def main(options: ControlOptions) -> None:
    workdir = options.workdir
    layout_text = "" if options.layout == ("config",) else " ".join(options.layout)
    layout_requests.check_layout(workdir, layout_text)
    if not lock.is_held(files.run_path(workdir)):
        errors.raise_flag_problems([("workdir", _not_running_message(workdir))])
    num_answers = len(layout_requests.read_answers(workdir))
    layout_requests.request_layout(workdir, layout_text)
    deadline = time.monotonic() + options.wait_s
    while True:
        # Checked before the answers: a run may answer and end at once, and its answer counts.
        is_running = lock.is_held(files.run_path(workdir))
        if len(answers := layout_requests.read_answers(workdir)) > num_answers:
            break
        if not is_running:
            layout_requests.withdraw_request(workdir)
            message = f"{_not_running_message(workdir)}; it ended before it answered"
            errors.raise_flag_problems([("workdir", message)])
        if time.monotonic() >= deadline:
            print(f"{workdir}: asked; the run looks at it before its next step")
            return
        time.sleep(_POLL_S)
    answer = answers[num_answers]
    if refused := answer.get("refused"):
        errors.raise_flag_problems([("layout", refused)])
    print(f"{workdir}: from step {answer['step']} on: {answer.get('layout') or 'as in the config'}")


def _not_running_message(workdir: str) -> str:
    num_steps, last_step = load_config(workdir).trainer.num_steps, newest_step(workdir)
    if last_step >= num_steps:
        return f"{workdir}: this run has ended, all {num_steps} steps are done"
    problem = f"no process is at work on this run, which has saved {last_step} of {num_steps} steps"
    return f"{workdir}: {problem}; start it, then ask again"
