"""Servers of buckets on this machine: S3 by moto, GCS by gcp-storage-emulator.

Run as a program, it serves in a process of its own until its standard input is closed:
python tests/bucket_servers.py s3
"""

import contextlib
import http.client
import http.server
import os
import pathlib
import random
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

BUCKET = "runs"


def _serve_s3() -> str:
    import logging

    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    s3fs.S3FileSystem(endpoint_url=endpoint).mkdir(BUCKET)
    return endpoint


def _serve_gcs() -> str:
    from gcp_storage_emulator import server as emulator

    emulator.HANDLERS = tuple(
        (path, {method: _completed(handler) for method, handler in handlers.items()})
        for path, handlers in emulator.HANDLERS
    )
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    return f"http://127.0.0.1:{server._api._httpd.server_port}"


def _completed(handler: Any) -> Any:
    """A handler of the emulator with what it leaves out: generations in replies, conditions."""
    from gcp_storage_emulator.exceptions import NotFound

    def completed(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
        params = request.params or {}
        is_upload = handler.__name__ == "insert"
        name = params.get("object_id") or request.query.get("name", [""])[0]
        if is_upload and not name and isinstance(request.data, dict):
            name = request.data.get("meta", request.data).get("name", "")
        try:
            found = storage.get_file_obj(params.get("bucket_name"), name)["generation"]
        except (NotFound, KeyError):
            found = "0"
        expected = request.query.get("ifGenerationMatch", [found])[0]
        if name and expected != found:
            response.status = http.HTTPStatus.PRECONDITION_FAILED
            return None
        if found != "0" and not is_upload:
            response["x-goog-generation"] = found
        return handler(request, response, storage, *args, **kwargs)

    return completed


# Of the server's process and of its clients.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",  # of TensorStore
}


def client_environment(kind: str, endpoint: str) -> dict[str, str]:
    """The variables by which all client libraries find a server."""
    if kind == "s3":
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
    return {
        **CREDENTIALS,
        "STORAGE_EMULATOR_HOST": endpoint,
        "TENSORSTORE_GCS_HTTP_URL": endpoint,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextlib.contextmanager
def running_server(kind: str) -> Iterator[str]:
    """Runs a server of kind "s3" or "gs" in a process; yields its endpoint."""
    process = subprocess.Popen(
        [sys.executable, pathlib.Path(__file__), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **CREDENTIALS},
    )
    try:
        line = ""
        while not line.startswith("http"):
            line = process.stdout.readline()
            assert line, f"the server ended: {process.wait()}"
        yield line.strip()
    finally:
        process.stdin.close()
        process.terminate()
        process.wait()


class FaultyProxy(http.server.ThreadingHTTPServer):
    """A proxy in front of a server that fails a share of all requests, by a seeded generator.

    Of the failures a quarter each are: 503 with the request not executed, 503 with the request
    executed, a connection that is closed before and one that is closed after it is executed.
    """

    daemon_threads = True

    def __init__(self, endpoint: str, share: float, seed: int = 0):
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.upstream = urllib.parse.urlsplit(endpoint).netloc
        self.share, self.random = share, random.Random(seed)
        self.num_requests = self.num_failures = 0
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fault(self) -> str:
        with self.lock:
            self.num_requests += 1
            if self.random.random() >= self.share:
                return ""
            self.num_failures += 1
            return self.random.choice(("503", "executed 503", "closed", "executed closed"))

    def handle_error(self, request: Any, address: Any) -> None:
        pass  # clients that close a connection


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self._body()
        fault = self.server.fault()
        reply, content = None, b""
        if not fault or fault.startswith("executed"):
            connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
            skipped = ("transfer-encoding", "connection", "expect", "content-length")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in skipped}
            if body or self.command in ("PUT", "POST"):
                headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
            connection.close()
        if fault.endswith("closed"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault:
            reply, content = None, b""
        self.send_response(reply.status if reply else 503)
        for name, value in reply.getheaders() if reply else ():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = str(len(content))
        if reply and self.command == "HEAD":
            length = reply.getheader("Content-Length", "0")
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = _answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    print({"s3": _serve_s3, "gs": _serve_gcs}[sys.argv[1]](), flush=True)
    sys.stdin.read()
    os._exit(0)
