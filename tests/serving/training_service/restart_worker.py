"""A process that trains a model of the service and may end, as by SIGKILL, at a given point.

    python restart_worker.py MODEL STATE POINT SEQ

It submits the same requests as every other start, as a client does that asks again, and prints a
digest of the model's state and of all results.
"""

import hashlib
import json
import os
import pathlib
import sys

import jax
import numpy as np

from jaxrl_llm import saved_policy
from jaxrl_llm.serving.training_service import protobuf, service, trained_model
from jaxrl_llm.serving.training_service.operations import ModelOperations
from jaxrl_llm.serving.training_service.records import Records
from jaxrl_llm.serving.training_service.trained_model import PASS, TrainedModel, TrainingOperation
from jaxrl_llm.serving.training_service.training_queue import TrainingQueue

MODEL, OWNER = "session:train:0", "owner"
RECORD = {
    "owner": OWNER,
    "session_id": "session",
    "base_model": "base",
    "lora": {"rank": 2, "alpha": 32.0, "targets": ["q", "v", "up"]},
    "seed": 3,
    "created": "",
    "user_metadata": None,
}


def pass_body(seq):
    """A pass over two sequences, in Tinker's protobuf."""
    data = []
    for start in (seq, 2 * seq):
        tokens = (np.arange(12) * 7 + start) % 250
        inputs = protobuf.encode((1, protobuf.encode((1, tokens[:-1].astype("<i4").tobytes()))))
        target = protobuf.encode((1, tokens[1:].astype("<i8").tobytes()), (3, 2))
        weights = protobuf.encode((1, np.ones(11, "<f4").tobytes()), (3, 1))
        entries = (("target_tokens", target), ("weights", weights))
        maps = ((2, protobuf.encode((1, name), (2, tensor))) for name, tensor in entries)
        data.append((3, protobuf.encode((1, inputs), *maps)))
    return protobuf.encode((1, MODEL), (2, seq), *data, (4, "cross_entropy"))


def step_body(seq):
    adam = {"learning_rate": 0.01}
    return json.dumps({"model_id": MODEL, "seq_id": seq, "adam_params": adam}).encode()


OPERATIONS = {
    **{seq: TrainingOperation(PASS, pass_body(seq)) for seq in (1, 2, 4, 5)},
    **{seq: TrainingOperation("optim_step", step_body(seq)) for seq in (3, 6)},
}


def end_at(point, seq):
    """Ends the process when it comes to a point of a request."""

    def wrapped(owner, name, is_there):
        original = getattr(owner, name)

        def replacement(*args, **kwargs):
            if is_there(*args, **kwargs):
                os._exit(9)
            return original(*args, **kwargs)

        setattr(owner, name, replacement)

    if point == "before":
        wrapped(ModelOperations, "run", lambda self, model, operation, n: n == seq)
    elif point == "computed":
        wrapped(TrainedModel, "write_outcome", lambda self, n, *_, **__: n == seq)
    elif point == "state_written":
        is_current = lambda path, text: json.loads(text).get("next_seq") == seq + 1  # noqa: E731
        wrapped(trained_model.files, "replace_text", is_current)
    elif point == "done":
        wrapped(TrainedModel, "finish", lambda self, n, outcome: n == seq)


def main(model, state, point, seq):
    end_at(point, int(seq))
    source = saved_policy.policy_from_model(saved_policy.sampling_config(model))
    base = service.load_training_base(source, 64)
    queue = TrainingQueue(base, Records(pathlib.Path(state)), 2)
    queue.start()
    body = {"session_id": "session", "model_seq_id": 0, "base_model": "base"}
    queue.create(MODEL, RECORD, TrainingOperation("create_model", json.dumps(body).encode()))
    for number, operation in OPERATIONS.items():
        queue.submit(OWNER, MODEL, number, operation)
    digest = hashlib.sha256()
    for number in range(7):
        future = queue.future(OWNER, f"{MODEL}:{number}")
        outcome = future.result(300)
        assert outcome.kind != "failed", outcome.content
        digest.update(outcome.content)
    queue.close()
    session = queue.model(OWNER, MODEL).load_session(base)
    for leaf in jax.tree.leaves(session.state):
        digest.update(np.asarray(leaf).tobytes())
    assert session.num_updates == 2
    print("digest", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
