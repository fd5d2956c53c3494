"""A small random model in a folder, and a server process that serves it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import quick_compiler
import tiny
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.models.hf import checkpoint

ROOT = pathlib.Path(__file__).parents[1]
HANGS_S = 600  # what takes longer will not end; a first start compiles for a minute and more
CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "Übung macht den Meister; 你好，世界; déjà vu; 😀 Ω≈ç",
    "In the beginning the beginners began to begin.",
)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}assistant:"
)


def byte_tokenizer(template=TEMPLATE):
    """Returns a byte-level tokenizer with a few merges, so that characters are cut in two."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<eos>", "<|endoftext|>"],  # Qwen2's class wants the last
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def network(tokenizer):
    return tiny.with_sizes(vocab_size=len(tokenizer), num_layers=1, max_positions=256)


def make_folder(folder):
    """Writes the model's folder, as transformers would."""
    tokenizer = byte_tokenizer()
    net = network(tokenizer)
    checkpoint.save(folder, net, tiny.params(net, scale=5.0), tokenizer)


class Server:
    """A `launch/serve.py` or other command that tells its address in its log."""

    def __init__(self, *command, devices=1):
        environment = dict(os.environ)
        environment["PYTHONPATH"] = str(ROOT)
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = quick_compiler.flags(devices)
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        self.log.extend(iter(self.process.stderr.readline, ""))

    def address(self, mark, timeout_s=HANGS_S):
        """Waits for the log line with `mark`; returns what follows it there."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            for line in list(self.log):
                if mark in line:
                    return line.partition(mark)[2].strip()
            time.sleep(0.02)
        raise AssertionError("no address:\n" + "".join(self.log))

    def wait_ready(self, url, timeout_s=HANGS_S):
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/health").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError("not ready:\n" + "".join(self.log))

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s=HANGS_S):
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()

    def rss_bytes(self):
        """Resident memory of the process."""
        pages = pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(folder, *flags):
    """Serves a folder; gives the server and its URL."""
    server = Server("launch/serve.py", f"--model={folder}", "--port=0", *flags)
    try:
        url = server.address("serving on ")
        server.wait_ready(url)
        yield server, url
    finally:
        server.kill()


def raw_keys(*seeds):
    return np.array(seeds, np.uint32).reshape(-1, 2)


def metric(url, name):
    """Returns a metric's value, all labels summed."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"jaxrl_llm_{name}")]
    assert found, name
    return sum(float(line.rpartition(" ")[2]) for line in found)


def wait_idle(url, counts=("active_slots", "queue_samples")):
    """Waits until these metrics are 0: no sample stands in a slot or waits for one."""
    end = time.monotonic() + HANGS_S
    while any(metric(url, name) for name in counts):
        assert time.monotonic() < end
        time.sleep(0.05)
