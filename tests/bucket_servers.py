"""Servers of buckets on this machine: S3 by moto, GCS by gcp-storage-emulator.

Run as a program, it serves in a process of its own until its standard input is closed:
python tests/bucket_servers.py s3
"""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

BUCKET = "runs"


def _serve_s3() -> str:
    import logging

    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
    return endpoint


def _serve_gcs() -> str:
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    return f"http://127.0.0.1:{server._api._httpd.server_port}"


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


if __name__ == "__main__":
    print({"s3": _serve_s3, "gs": _serve_gcs}[sys.argv[1]](), flush=True)
    sys.stdin.read()
    os._exit(0)
