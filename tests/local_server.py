"""An HTTP server on this machine, for tests of what posts JSON to other people's servers."""

import contextlib
import http.server
import json
import threading


class JsonHandler(http.server.BaseHTTPRequestHandler):
    """A handler of JSON that logs nothing."""

    def read_json(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, status, answer, headers=()):
        """Sends an object as JSON; `headers` are pairs."""
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(handler):
    """The address of a server with this handler, `http://127.0.0.1:PORT`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
