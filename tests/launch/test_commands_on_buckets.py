"""Every command takes a run in a bucket as it takes a run on disk, while it runs and afterwards."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

import fsspec
import pytest
from bucket_servers import BUCKET, client_environment, running_server

from jaxrl_llm.commands import command_line

LAUNCH = f"from {command_line.__name__} import main; main()"
TIMEOUT_S = 600
SETTINGS = (
    "--config.warm_start.num_steps=2",
    "--config.evaluation.num_prompts=4",
    "--config.evaluation.every=0",
    "--config.trainer.prompts_per_step=4",
    "--config.trainer.minibatch_size=0",
    "--config.checkpoint.every=2",
    "--config.metrics.rollout_tokens=True",
)


class Commands:
    """Starts commands in processes of their own that find the server of a bucket."""

    def __init__(self, kind: str, endpoint: str, folder: pathlib.Path):
        self.folder = folder
        self._environment = {
            **os.environ,
            **client_environment(kind, endpoint),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "HF_HOME": str(folder / "hf"),
        }

    def start(self, name: str, *words: str) -> subprocess.Popen[str]:
        log = (self.folder / f"{name}.log").open("a")
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCH, name, *words],
            cwd=self.folder, env=self._environment, text=True,
            stdout=log if name == "train" else subprocess.PIPE, stderr=log,
        )  # fmt: skip

    def run(self, name: str, *words: str, status: int = 0) -> str:
        process = self.start(name, *words)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        log = (self.folder / f"{name}.log").read_text()
        assert process.returncode == status and "Traceback" not in log, f"{out}{log[-4000:]}"
        return out or ""


@contextlib.contextmanager
def started(process: subprocess.Popen[str]):
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_commands_take_a_run_in_a_bucket(kind, tmp_path):
    pytest.importorskip({"s3": "moto", "gs": "gcp_storage_emulator"}[kind])
    with running_server(kind) as endpoint:
        commands = Commands(kind, endpoint, tmp_path)
        options = {
            "s3": {"endpoint_url": endpoint, "key": "test", "secret": "test"},
            "gs": {"endpoint_url": endpoint, "token": "anon"},
        }
        files = fsspec.filesystem(kind, **options[kind], use_listings_cache=False)
        run = f"{kind}://{BUCKET}/team/run"

        # A live run takes a layout, and is seen while it runs.
        endless = ("--config.trainer.num_steps=100000", "--config.mesh.data=2")
        train = ("--config=grpo_tiny", f"--workdir={run}", *SETTINGS)
        with started(commands.start("train", *train, *endless)) as process:
            log = tmp_path / "train.log"
            wait_until(lambda: process.poll() is not None or "step 2" in log.read_text())
            assert process.poll() is None, log.read_text()[-3000:]
            reply = commands.run(
                "control", f"--workdir={run}", "mesh.data=1", "mesh.fsdp=2", "--wait_s=120"
            )
            assert "mesh.data=1 mesh.fsdp=2" in reply
            # Metrics reach the bucket at least every 30 s.
            view = ("view", f"--workdir={run}", "--text")
            wait_until(lambda: "response length" in commands.run(*view))
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 75

        # Resumed to its end, and learned from again by its dumps.
        steps = 2 + max(
            int(path.rpartition("/")[2].removesuffix(".jsonl"))
            for path in files.find(f"{BUCKET}/team/run/rollouts")
            if path.endswith(".jsonl")
        )
        commands.run("train", *train, "--config.mesh.data=2", f"--config.trainer.num_steps={steps}")

        dump = f"{run}/rollouts/1.jsonl"
        replayed = (f"--workdir={run}-replayed", "--config.trainer.num_steps=1", "--replay", dump)
        commands.run("train", "--config=grpo_tiny", *replayed, *SETTINGS)

        # What becomes of it.
        scores = json.loads(commands.run("evaluate", f"--workdir={run}", "--num_prompts=4"))
        assert "val-core/arithmetic/mean@1" in scores["data"]
        greedy = ("--prompt=3+4=", "--temperature=0", "--max_tokens=8")
        answer = json.loads(commands.run("generate", f"--workdir={run}", *greedy))
        commands.run("export", f"--workdir={run}", f"--to={kind}://{BUCKET}/models/sums")
        names = {path.rpartition("/")[2] for path in files.find(f"{BUCKET}/models/sums")}
        assert {"config.json", "model.safetensors", "README.md"} <= names
        commands.run("export", f"--workdir={run}", f"--out={tmp_path / 'folder'}")
        weights = (tmp_path / "folder" / "model.safetensors").read_bytes()
        assert files.cat_file(f"{BUCKET}/models/sums/model.safetensors") == weights
        # Its chat template is used there; the run's prompts are plain.
        uploaded = commands.run("generate", f"--model={kind}://{BUCKET}/models/sums", *greedy)
        assert "3+4=" in json.loads(uploaded)["prompt"]
        planned = commands.run("plan", f"--config={run}/config.json", "--json")
        assert json.loads(planned)["fits"]
        with started(commands.start("serve", f"--workdir={run}", "--port=0")) as server:
            log = tmp_path / "serve.log"
            wait_until(lambda: server.poll() is not None or "serving on" in log.read_text())
            assert server.poll() is None, log.read_text()[-3000:]
            address = log.read_text().partition("serving on ")[2].split()[0]
            body = {"model": "run", "prompt": "3+4=", "temperature": 0, "max_tokens": 8}
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), headers
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                text = json.load(reply)["choices"][0]["text"]
            assert text == answer["output"]
            server.send_signal(signal.SIGTERM)
            assert server.wait(TIMEOUT_S) == 0
