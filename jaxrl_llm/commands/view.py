"""Shows runs: on a web page, as image files, or in the terminal."""

import socket

from rich.console import Console

from jaxrl_llm import errors
from jaxrl_llm.commands.options import ViewOptions
from jaxrl_llm.viewer import terminal
from jaxrl_llm.viewer.runs import RecordedRun


def main(options: ViewOptions) -> None:
    if options.png or options.timeline:
        errors.check_package("matplotlib", "plot", "--png:" if options.png else "--timeline:")
    elif not options.text:
        errors.check_package("starlette", "view", "jaxrl_llm view")
        errors.check_package("uvicorn", "view", "jaxrl_llm view")
    runs = [RecordedRun(workdir) for workdir in options.workdir]
    if options.png:
        from jaxrl_llm.viewer import curve_plot

        curve_plot.save_curves(runs, options.png)
    elif options.timeline:
        from jaxrl_llm.viewer import timeline

        timeline.save_timeline(runs[0].path, options.timeline)
    elif options.text:
        terminal.print_runs(runs, Console())
    else:
        _serve(runs, options.host, options.port)


def _serve(runs: list[RecordedRun], host: str, port: int) -> None:
    import uvicorn

    from jaxrl_llm.viewer.app import make_app

    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        message = f"{host}:{port}: {error.strerror}; give another --port, or 0 for any"
        raise errors.UserError(f"--port: {message}") from error
    allowed_hosts = ["localhost", "127.0.0.1", host]
    app = make_app(runs, ["*"] if host in ("0.0.0.0", "::") else allowed_hosts)
    print(f"http://{host}:{listener.getsockname()[1]}  (Ctrl-C ends it)", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
