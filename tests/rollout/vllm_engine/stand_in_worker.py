"""A worker process without vLLM: the real program and protocol around a made-up sampler.

A token follows from the seed of its request and its place after the prompt; its log-prob is minus
the sum of the weights, so that it says which weights drew it. `llm_args` make it misbehave.
"""

import importlib.util
import os
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = ROOT / "jaxrl_llm" / "rollout" / "vllm_engine" / "worker.py"
VOCABULARY = 90


def program():
    """The worker's program, which makes the package importable."""
    spec = importlib.util.spec_from_file_location("worker_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class StandIn:
    """Samples without a model."""

    def __init__(self, message):
        self.args, self.suppressed = message["llm_args"], message["suppressed_tokens"]
        self.tensors, self.samples, self.steps, self.total = message["tensors"], {}, 0, 0.0
        if self.args.get("grandchild"):
            if not os.fork():
                time.sleep(600)
                os._exit(0)
        if self.args.get("no_start"):
            raise ValueError("no kernel image for this device")

    def describe(self):
        return {"version": "none", "device": f"process {os.getpid()}"}

    def add(self, sample, settings, version):
        self.samples[sample] = [settings, 0, version]

    def abort(self, samples):
        for sample in samples:
            self.samples.pop(sample, None)

    def has_unfinished(self):
        return bool(self.samples)

    def step(self):
        from jaxrl_llm.rollout.vllm_engine.worker_loop import SampledTokens

        self.steps += 1
        if self.steps == self.args.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.args.get("fail_at"):
            raise RuntimeError("out of blocks")
        if self.steps == self.args.get("hang_at"):
            time.sleep(600)
        time.sleep(self.args.get("step_s", 0.0))
        sampled = []
        for sample, entry in list(self.samples.items()):
            settings, count, _ = entry
            token = (settings["seed"] // 7 + 31 * count) % VOCABULARY + 3
            entry[1] = count + 1
            reason = ""
            if token in settings["stop_tokens"]:
                reason = "stop"
            elif count + 1 == settings["max_tokens"]:
                reason = "length"
            if reason:
                del self.samples[sample]
            top = [[(token, -0.5)]] if settings["num_top_log_probs"] else []
            sampled.append(SampledTokens(sample, [token], [-abs(self.total)], top, reason))
        return sampled

    def values(self, memory):
        """All float32 numbers of the tensors, in the order of the table."""
        import array

        for tensor in self.tensors:
            assert tensor["dtype"] == "float32"
            count = 1
            for size in tensor["shape"]:
                count *= size
            start = tensor["offset"]
            yield array.array("f", bytes(memory[start : start + 4 * count]))

    def update_weights(self, memory):
        self.total = sum(sum(values) for values in self.values(memory))
        self.weights = bytes(memory)

    def compare_weights(self, memory):
        same = bytes(memory) == self.weights
        return {"num_tensors": len(self.tensors), "max_difference": 0.0 if same else 1.0}

    def sleep(self):
        self.samples.clear()
        if self.args.get("no_sleep"):
            raise ValueError("this build cannot sleep")

    def wake_up(self):
        pass


def main():
    worker = program()
    worker.vllm_backend_class = None
    if sys.argv[1].startswith("--listen="):
        worker.__file__ = __file__
        worker.listen.__globals__["__file__"] = __file__
        worker.listen(sys.argv[1].removeprefix("--listen="))
    from multiprocessing.connection import Connection

    from jaxrl_llm.rollout.vllm_engine import worker_loop

    assert "jax" not in sys.modules and "numpy" not in sys.modules
    with Connection(int(sys.argv[1].removeprefix("--fd="))) as connection:
        worker_loop.WorkerLoop(connection, StandIn).serve()


if __name__ == "__main__":
    main()
