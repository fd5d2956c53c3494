"""Requests of clients of a training service, as its SDK sends them."""

import json

import numpy as np

from jaxrl_llm.serving.training_service import protobuf
from jaxrl_llm.serving.training_service.trained_model import TrainingOperation

CREATE = TrainingOperation(
    "create_model",
    json.dumps({"session_id": "session", "model_seq_id": 0, "base_model": "base"}).encode(),
)


def model_record(owner, seed, rank=2):
    """The record of a model."""
    return {
        "owner": owner,
        "session_id": "session",
        "base_model": "base",
        "lora": {"rank": rank, "alpha": 32.0, "targets": ["q", "v", "up"]},
        "seed": seed,
        "created": "",
        "user_metadata": None,
    }


def pass_body(model, seq, length=12, vocab_size=250, weight=1.0):
    """A pass over two sequences, in Tinker's protobuf."""
    data = []
    for start in (seq, 2 * seq):
        tokens = (np.arange(length) * 7 + start) % vocab_size
        inputs = protobuf.encode((1, protobuf.encode((1, tokens[:-1].astype("<i4").tobytes()))))
        target = protobuf.encode((1, tokens[1:].astype("<i8").tobytes()), (3, 2))
        values = np.full(length - 1, weight, "<f4")
        weights = protobuf.encode((1, values.tobytes()), (3, 1))
        entries = (("target_tokens", target), ("weights", weights))
        maps = ((2, protobuf.encode((1, name), (2, tensor))) for name, tensor in entries)
        data.append((3, protobuf.encode((1, inputs), *maps)))
    return protobuf.encode((1, model), (2, seq), *data, (4, "cross_entropy"))


def step_body(model, seq):
    """An update."""
    adam = {"learning_rate": 0.01}
    return json.dumps({"model_id": model, "seq_id": seq, "adam_params": adam}).encode()
