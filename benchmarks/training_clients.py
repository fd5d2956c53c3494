"""Throughput of a training service: small passes of several clients, batched and one by one.

    python benchmarks/training_clients.py --clients=8 --rounds=5

Each round measures both in turns, with the same clients: all send a pass at once, so that passes
share batches; then each sends its pass when the one before it has its result. With --updates each
pass is followed by an update, whose state is written to the disk.
"""

import json
import pathlib
import tempfile
import time

import numpy as np
from absl import app, flags

from jaxrl_llm.config import DataConfig, ModelConfig, RLConfig, RLTrainerConfig, RolloutConfig
from jaxrl_llm.config.learner import PROJECTIONS
from jaxrl_llm.serving.training_service import protobuf
from jaxrl_llm.serving.training_service.records import Records
from jaxrl_llm.serving.training_service.trained_model import PASS, TrainingOperation
from jaxrl_llm.serving.training_service.training_queue import TrainingQueue
from jaxrl_llm.training_api import policy_base

_CLIENTS = flags.DEFINE_integer("clients", 8, "Clients, each with adapters of its own.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds, each with both orders.")
_PASSES = flags.DEFINE_integer("passes", 10, "Passes of each client in a measurement.")
_SEQUENCES = flags.DEFINE_integer("sequences", 2, "Sequences of a pass.")
_TOKENS = flags.DEFINE_integer("tokens", 32, "Tokens of a sequence.")
_HIDDEN = flags.DEFINE_integer("hidden", 256, "Hidden size of the model.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers of the model.")
_RANK = flags.DEFINE_integer("rank", 8, "Of the adapters.")
_UPDATES = flags.DEFINE_bool("updates", False, "Whether an update follows each pass.")

OWNER = "owner"


def make_config() -> RLConfig:
    """A model of some million parameters, in float32."""
    hidden = _HIDDEN.value
    model = ModelConfig(
        hidden_size=hidden,
        num_layers=_LAYERS.value,
        num_heads=hidden // 32,
        num_kv_heads=hidden // 32,
        head_size=32,
        mlp_size=3 * hidden,
        remat="none",
        compute_dtype="float32",
    )
    return RLConfig(
        model=model,
        data=DataConfig(max_prompt_tokens=_TOKENS.value),
        trainer=RLTrainerConfig(max_tokens_per_microbatch=4096, prompts_per_step=1),
        rollout=RolloutConfig(max_response_tokens=1, suppress_unused_tokens=False),
    )


def pass_body(model_id: str, seq: int) -> bytes:
    """A pass over random sequences."""
    random, data = np.random.default_rng(seq), []
    for _ in range(_SEQUENCES.value):
        tokens = random.integers(0, 100, _TOKENS.value)
        chunk = protobuf.encode((1, protobuf.encode((1, tokens[:-1].astype("<i4").tobytes()))))
        targets = protobuf.encode((1, tokens[1:].astype("<i8").tobytes()), (3, 2))
        weights = protobuf.encode((1, np.ones(len(tokens) - 1, "<f4").tobytes()), (3, 1))
        entries = (("target_tokens", targets), ("weights", weights))
        maps = ((2, protobuf.encode((1, name), (2, tensor))) for name, tensor in entries)
        data.append((3, protobuf.encode((1, chunk), *maps)))
    return protobuf.encode((1, model_id), (2, seq), *data, (4, "cross_entropy"))


class Client:
    """A client that sends passes, and updates if asked for."""

    def __init__(self, queue: TrainingQueue, number: int):
        self._queue, self._seq = queue, 0
        self._id = f"session:train:{number}"
        lora = {"rank": _RANK.value, "alpha": 32.0, "targets": list(PROJECTIONS)}
        record = {"owner": OWNER, "session_id": "session", "base_model": "base", "lora": lora}
        record |= {"seed": number, "created": "", "user_metadata": None}
        body = {"session_id": "session", "model_seq_id": number, "base_model": "base"}
        operation = TrainingOperation("create_model", json.dumps(body).encode())
        queue.create(self._id, record, operation)
        self.wait()

    def send(self) -> None:
        """Queues a pass, and perhaps an update."""
        self._submit(PASS, pass_body(self._id, self._seq + 1))
        if _UPDATES.value:
            body = {"model_id": self._id, "seq_id": self._seq + 1}
            body["adam_params"] = {"learning_rate": 1e-4}
            self._submit("optim_step", json.dumps(body).encode())

    def _submit(self, kind: str, body: bytes) -> None:
        self._seq += 1
        self._queue.submit(OWNER, self._id, self._seq, TrainingOperation(kind, body))

    def wait(self) -> None:
        """Waits for the result of the last request."""
        future = self._queue.future(OWNER, f"{self._id}:{self._seq}")
        assert future is not None
        outcome = future.result(600)
        assert outcome.kind != "failed", outcome.content


def run_at_once(clients: list[Client]) -> None:
    for client in clients:
        client.send()
    for client in clients:
        client.wait()


def run_one_by_one(clients: list[Client]) -> None:
    for client in clients:
        client.send()
        client.wait()


def passes_per_second(run, clients: list[Client]) -> np.ndarray:
    """Passes of all clients in a second, and in a second of the process's CPU time.

    The second is what other work on the machine disturbs less.
    """
    start = np.array([time.perf_counter(), time.process_time()])
    for _ in range(_PASSES.value):
        run(clients)
    seconds = np.array([time.perf_counter(), time.process_time()]) - start
    return _PASSES.value * len(clients) / seconds


def main(argv) -> None:
    base = policy_base.load_base(make_config())
    with tempfile.TemporaryDirectory() as folder:
        queue = TrainingQueue(base, Records(pathlib.Path(folder)), _CLIENTS.value)
        queue.start()
        clients = [Client(queue, i) for i in range(_CLIENTS.value)]
        # Compiles: which of its clients a batch has is a matter of timing.
        for count in (*range(1, len(clients) + 1), len(clients)):
            run_at_once(clients[:count])
            run_one_by_one(clients[:count])
        ratios = []
        for number in range(_ROUNDS.value):
            batched = passes_per_second(run_at_once, clients)
            single = passes_per_second(run_one_by_one, clients)
            ratios.append(batched / single)
            (wall, cpu), (single_wall, single_cpu) = batched, single
            print(
                f"round {number}: passes/s {wall:.1f} at once, {single_wall:.1f} one by one;"
                f" of CPU time {cpu:.1f}, {single_cpu:.1f}"
            )
        wall, cpu = np.median(ratios, axis=0)
        print(f"at once / one by one, medians: {wall:.2f}, of CPU time {cpu:.2f}")
        queue.close()


if __name__ == "__main__":
    app.run(main)
