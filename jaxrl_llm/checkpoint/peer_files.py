"""Files that the processes of a run keep for each other, over HTTP.

Each process serves one folder. Requests carry a secret that process 0 made for this start; they are
authenticated, not encrypted.
"""

import contextlib
import hmac
import http.client
import http.server
import os
import pathlib
import re
import shutil
import socket
import threading
from typing import Any

TIMEOUT_S = 60.0  # of a connection that moves no bytes
NAME = re.compile(r"[0-9]+\.[0-9]+-[0-9]+")  # of a file; others are not served
_BLOCK = 1 << 20


class PeerServer:
    """Serves the files of a folder to the other processes, and takes files from them."""

    def __init__(self, folder: pathlib.Path, host: str, secret: str):
        """Listens on a free port of the address `host` of this machine."""
        handler = type("Handler", (_Handler,), {"folder": folder, "secret": secret})
        self._server = http.server.ThreadingHTTPServer((host, 0), handler)
        self._server.daemon_threads = True
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    folder: pathlib.Path
    secret: str
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        if (path := self._path()) is None:
            return
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("rb"))
            except FileNotFoundError:
                self._answer(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, _BLOCK)

    def do_PUT(self) -> None:
        if (path := self._path()) is None:
            return
        left = int(self.headers.get("Content-Length", 0))
        temporary = path.with_name(f"{path.name}.received.tmp")
        try:
            with temporary.open("wb") as file:
                while left and (block := self.rfile.read(min(left, _BLOCK))):
                    file.write(block)
                    left -= len(block)
            if not left:
                temporary.replace(path)
        except OSError:  # no space
            left = max(left, 1)
        temporary.unlink(missing_ok=True)
        self.close_connection = bool(left)
        self._answer(507 if left else 200)

    def _path(self) -> pathlib.Path | None:
        """The file that the request names; None, and answered, if it may not have it."""
        name, sent = self.path.lstrip("/"), self.headers.get("Authorization", "")
        if not hmac.compare_digest(sent.encode(), self.secret.encode()) or not NAME.fullmatch(name):
            self.close_connection = True
            self._answer(403)
            return None
        return self.folder / name

    def _answer(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are the run's own."""


def send(path: pathlib.Path, address: str, secret: str) -> None:
    """Sends a file to the server at `address`, under its name; raises OSError if that fails."""
    with path.open("rb") as file, contextlib.closing(_connect(address)) as connection:
        size = {"Content-Length": str(os.fstat(file.fileno()).st_size)}
        connection.request("PUT", f"/{path.name}", file, {"Authorization": secret, **size})
        if (status := connection.getresponse().status) != 200:
            raise OSError(f"{address} did not take {path.name}: HTTP status {status}")


def fetch(name: str, address: str, secret: str, to: pathlib.Path) -> None:
    """Copies a file of the server at `address` to `to`; raises OSError if that fails."""
    with contextlib.closing(_connect(address)) as connection:
        connection.request("GET", f"/{name}", headers={"Authorization": secret})
        reply = connection.getresponse()
        if reply.status != 200:
            raise OSError(f"{address} has no {name}: HTTP status {reply.status}")
        with to.open("wb") as file:
            shutil.copyfileobj(reply, file, _BLOCK)


def _connect(address: str) -> http.client.HTTPConnection:
    host, _, port = address.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)


def own_address(towards: str) -> str:
    """The IP address of this machine on the network that leads to HOST:PORT."""
    host, _, port = towards.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host or "localhost", int(port)))
        return str(probe.getsockname()[0])
