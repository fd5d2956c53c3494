"""Passes of several clients in one batch: the numbers of each, its turn, and its state on disk."""

import jax
import numpy as np
import pytest
from small_sessions import base as make_base
from small_sessions import close
from training_requests import CREATE, model_record, pass_body, step_body

from jaxrl_llm.config import RLTrainerConfig
from jaxrl_llm.serving.training_service.pass_batches import PassBatcher
from jaxrl_llm.serving.training_service.records import Records
from jaxrl_llm.serving.training_service.trained_model import PASS, TrainingOperation
from jaxrl_llm.serving.training_service.training_queue import TrainingQueue

OWNER = "owner"
MODELS = tuple(f"session:train:{i}" for i in range(3))
VOCAB = 90


def base():
    """With room for four blocks in a microbatch."""
    return make_base(trainer=RLTrainerConfig(max_tokens_per_microbatch=256, prompts_per_step=4))


@pytest.fixture
def batches(monkeypatch):
    """The models of each batch that is computed."""
    seen, run = [], PassBatcher.run

    def recorded(self, batch):
        seen.append([each.model.id for each in batch.passes])
        return run(self, batch)

    monkeypatch.setattr(PassBatcher, "run", recorded)
    return seen


def make_queue(folder, ranks=(2, 2, 2)):
    """A queue with a model of each client, which is not started."""
    queue = TrainingQueue(base(), Records(folder), 4)
    for seed, (model, rank) in enumerate(zip(MODELS, ranks, strict=True)):
        queue.create(model, model_record(OWNER, seed, rank), CREATE)
    return queue


def submit(queue, model, seq, **settings):
    body = pass_body(model, seq, vocab_size=VOCAB, **settings)
    queue.submit(OWNER, model, seq, TrainingOperation(PASS, body))


def step(queue, model, seq):
    queue.submit(OWNER, model, seq, TrainingOperation("optim_step", step_body(model, seq)))


def outcome(queue, model, seq):
    return queue.future(OWNER, f"{model}:{seq}").result(300)


def session(queue, model):
    return queue.model(OWNER, model).load_session(base())


def send_all(queue, model):
    """Two passes, an update, a pass: the data of each model are its own."""
    length = 12 + 3 * MODELS.index(model)
    for seq in (1, 2, 4):
        submit(queue, model, seq, length=length)
    step(queue, model, 3)


def arrays(queue, model):
    made = session(queue, model)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((made.state, made.gradients))]


def test_clients_in_batches_have_the_numbers_of_running_alone(tmp_path, batches):
    together, alone = make_queue(tmp_path / "together"), make_queue(tmp_path / "alone")
    for model in MODELS:  # all have come before the first is done
        send_all(together, model)
    together.start()
    for model in MODELS:
        assert outcome(together, model, 4).kind == "protobuf"
    together.close()
    assert batches == [list(MODELS)] * 3
    alone.start()
    for model in MODELS:
        send_all(alone, model)
        outcome(alone, model, 4)
    alone.close()
    assert len(batches) == 3
    for model in MODELS:
        close(arrays(together, model), arrays(alone, model), 1e-5)

    # A process that finds the records repeats the last passes in their places: bit for bit.
    restarted = TrainingQueue(base(), Records(tmp_path / "together"), 4)
    for model in MODELS:
        for mine, theirs in zip(arrays(restarted, model), arrays(together, model), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_one_client_at_fault_is_told_so_and_others_are_not(tmp_path, batches):
    queue = make_queue(tmp_path)
    first, second, third = MODELS
    submit(queue, first, 1)
    body = pass_body(second, 1, vocab_size=10**6, length=30)  # no such tokens in this model
    bad = body.replace(np.array([1], "<i4").tobytes(), np.array([10**6], "<i4").tobytes(), 1)
    queue.submit(OWNER, second, 1, TrainingOperation(PASS, bad))
    submit(queue, third, 1, weight=np.inf)
    submit(queue, first, 2)
    queue.start()
    assert outcome(queue, first, 2).kind == "protobuf"
    assert b"is not a token" in outcome(queue, second, 1).content
    assert b"not a float32" in outcome(queue, third, 1).content
    queue.close()
    assert not batches


def test_turns_of_a_batch_count(tmp_path, batches):
    """A client whose passes fit into no batch waits for one batch of the others, not for more."""
    queue = make_queue(tmp_path, ranks=(2, 2, 3))
    first, second, third = MODELS
    for seq in range(1, 5):
        submit(queue, first, seq)
        submit(queue, second, seq)
    submit(queue, third, 1)
    order, finish = [], TrainingQueue._finish

    def recorded(self, model, *args, **kwargs):
        order.append(model.id)
        finish(self, model, *args, **kwargs)

    queue._finish = recorded.__get__(queue)
    queue.start()
    for model, seq in ((first, 4), (second, 4), (third, 1)):
        assert outcome(queue, model, seq).kind == "protobuf"
    queue.close()
    assert order == [*MODELS, first, second, third, *(first, second) * 3]
    assert batches == [[first, second]] * 4
