"""Asks a running job for another layout."""

import time

from jaxrl_llm import errors
from jaxrl_llm.commands.options import Control
from jaxrl_llm.config import layout

_POLL_S = 0.2


def main(options: Control) -> None:
    before = len(layout.answers(options.workdir))
    text = "" if options.layout == ("config",) else " ".join(options.layout)
    layout.ask(options.workdir, text)
    deadline = time.monotonic() + options.wait_s
    while len(found := layout.answers(options.workdir)) == before:
        if time.monotonic() >= deadline:
            print(f"{options.workdir}: asked; the run looks at it before its next step")
            return
        time.sleep(_POLL_S)
    line = found[before]
    if line["refused"]:
        errors.refuse([("layout", line["refused"])])
    print(f"{options.workdir}: from step {line['step']} on: {line['layout'] or 'as in the config'}")
