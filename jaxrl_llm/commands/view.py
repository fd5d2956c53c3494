"""Shows runs: as a web page, as pictures, or in the terminal."""

import socket

from rich.console import Console

from jaxrl_llm import errors
from jaxrl_llm.commands.options import View
from jaxrl_llm.viewer import terminal
from jaxrl_llm.viewer.runs import Run


def main(options: View) -> None:
    if options.png or options.timeline:
        errors.check_package("matplotlib", "plot", "--png:" if options.png else "--timeline:")
    elif not options.text:
        errors.check_package("starlette", "view", "jaxrl_llm view")
        errors.check_package("uvicorn", "view", "jaxrl_llm view")
    runs = [Run(workdir) for workdir in options.workdir]
    if options.png:
        from jaxrl_llm.viewer import picture

        picture.save(runs, options.png)
    elif options.timeline:
        from jaxrl_llm.viewer import timeline

        timeline.save(runs[0].path, options.timeline)
    elif options.text:
        terminal.show(runs, Console())
    else:
        _serve(runs, options.host, options.port)


def _serve(runs: list[Run], host: str, port: int) -> None:
    import uvicorn

    from jaxrl_llm.viewer.app import make_app

    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        message = f"{host}:{port}: {error.strerror}; give another --port, or 0 for any"
        raise errors.UserError(f"--port: {message}") from error
    known = ["localhost", "127.0.0.1", host]
    app = make_app(runs, ["*"] if host in ("0.0.0.0", "::") else known)
    print(f"http://{host}:{listener.getsockname()[1]}  (Ctrl-C ends it)", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
