"""A worker process without vLLM: the real program and protocol around a made-up sampler.

A token follows from the seed of its request and its place in the sequence; its log-prob is minus
the sum of the weights, so that it says which weights drew it. `llm_args` make it misbehave.
"""

import array
import importlib.util
import math
import os
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = ROOT / "jaxrl_llm" / "rollout" / "vllm_engine" / "worker.py"
FIRST = 3  # tokens below are special


def program():
    """The worker's program, which makes the package importable."""
    spec = importlib.util.spec_from_file_location("worker_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class StandIn:
    """Samples without a model."""

    def __init__(self, message):
        self.args, self.tensors = message["llm_args"], message["tensors"]
        self.path, self.samples, self.steps = message["memory"], {}, 0
        self.total, self.weights = 0.0, b""
        if self.args.get("has_child") and not os.fork():
            time.sleep(600)
            os._exit(0)
        if self.args.get("no_start"):
            raise ValueError("no kernel image for this device")

    def describe(self):
        return {"version": "none", "device": f"process {os.getpid()}"}

    def add(self, sample, settings, version):
        self.samples[sample] = [settings, 0]

    def abort(self, samples):
        for sample in samples:
            self.samples.pop(sample, None)

    def has_unfinished(self):
        return bool(self.samples)

    def step(self):
        from jaxrl_llm.rollout.vllm_engine.worker_loop import SampledTokens

        self.steps += 1
        if self.steps == self.args.get("die_at") and not os.environ.get("STAND_IN_LIVES"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.args.get("fail_at"):
            raise RuntimeError("out of blocks")
        if self.steps == self.args.get("hang_at"):
            time.sleep(600)
        time.sleep(self.args.get("step_s", 0.0))
        sampled = []
        for sample, entry in list(self.samples.items()):
            settings, count = entry
            entry[1] = count + 1
            place = len(settings["tokens"]) + count
            token = FIRST + (settings["seed"] % 9973 + 29 * place) % (self.args["most"] - FIRST)
            reason = "length" if count + 1 == settings["max_tokens"] else ""
            reason = "stop" if token in settings["stop_tokens"] else reason
            if reason:
                del self.samples[sample]
            top = [[(token, -0.5)]] if settings["num_top_log_probs"] else []
            sampled.append(SampledTokens(sample, [token], [-abs(self.total)], top, reason))
        return sampled

    def update_weights(self):
        self.weights = pathlib.Path(self.path).read_bytes()
        self.total = 0.0
        for tensor in self.tensors:
            assert tensor["dtype"] == "float32"
            end = tensor["offset"] + 4 * math.prod(tensor["shape"])
            self.total += sum(array.array("f", self.weights[tensor["offset"] : end]))

    def compare_weights(self):
        same = pathlib.Path(self.path).read_bytes() == self.weights
        differing = {} if same and not self.args.get("other_weights") else {"embed": 1.0}
        return {"num_compared": len(self.tensors), "differing": differing, "skipped": []}

    def sleep(self):
        assert not self.samples

    def wake_up(self):
        pass


def main():
    worker = program()
    if sys.argv[1].startswith("--listen="):
        worker.__file__ = __file__  # what it starts for each run
        worker.listen(sys.argv[1].removeprefix("--listen="))
    from multiprocessing.connection import Connection

    from jaxrl_llm.rollout.vllm_engine import worker_loop

    # As in vLLM's interpreter, which need not have any package of the run.
    assert not {"jax", "numpy", "transformers"} & set(sys.modules)
    with Connection(int(sys.argv[1].removeprefix("--fd="))) as connection:
        worker_loop.WorkerLoop(connection, StandIn).serve()


if __name__ == "__main__":
    main()
