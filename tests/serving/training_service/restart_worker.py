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
from training_requests import CREATE, model_record, pass_body, step_body

from jaxrl_llm import saved_policy
from jaxrl_llm.serving.training_service import service, trained_model
from jaxrl_llm.serving.training_service.operations import ModelOperations
from jaxrl_llm.serving.training_service.records import Records
from jaxrl_llm.serving.training_service.trained_model import PASS, TrainedModel, TrainingOperation
from jaxrl_llm.serving.training_service.training_queue import TrainingQueue

MODEL, OWNER = "session:train:0", "owner"
RECORD = model_record(OWNER, seed=3)
OPERATIONS = {
    **{seq: TrainingOperation(PASS, pass_body(MODEL, seq)) for seq in (1, 2, 4, 5)},
    **{seq: TrainingOperation("optim_step", step_body(MODEL, seq)) for seq in (3, 6)},
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
    queue.create(MODEL, RECORD, CREATE)
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
