"""Passes of several sessions in one program: each has the numbers of running alone."""

import dataclasses

import jax
import numpy as np
import pytest
from small_sessions import base, close, data, session

from jaxrl_llm.training_api import adapter_batch
from jaxrl_llm.training_api.adapter_batch import BlockPlace, BlockShape, SessionPass
from jaxrl_llm.training_api.loss_functions import resolve_loss
from jaxrl_llm.training_api.training_data import Datum, TrainingDataError


def passes(loss, counts=(3, 1, 4), settings=({}, {}, {})):
    """A pass of each of some sessions, the first of which has a gradient already."""
    made = []
    for seed, (count, each) in enumerate(zip(counts, settings, strict=True)):
        own = session(seed)
        if seed == 0:
            own.forward_backward(data(2, 9), loss)
        resolved = resolve_loss(loss, own.config.algorithm)
        made.append(SessionPass(own, data(count, seed), resolved, each))
    return made


def leaves(session):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(session.gradients)]


@pytest.mark.parametrize("loss", ["ppo", pytest.param("algorithm", marks=pytest.mark.slow)])
def test_each_session_has_the_numbers_of_running_alone(loss):
    settings = [{}] * 3
    if loss == "ppo":
        settings = [{"clip_high_threshold": high} for high in (1.1, 1.5, 2.0)]
    alone, together = passes(loss, settings=settings), passes(loss, settings=settings)
    packer = base().models.packer
    shapes = [adapter_batch.block_shape(each.data, packer) for each in together]
    shape = BlockShape(*map(max, *shapes))
    results = adapter_batch.forward_backward(together, shape)
    for one, other, result in zip(alone, together, results, strict=True):
        expected = one.session.forward_backward(one.data, loss, one.settings)
        close([result.loss], [expected.loss], 1e-5)
        assert result.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert result.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        close(result.log_probs, expected.log_probs, 1e-5)
        close(other.session.gradients, one.session.gradients, 1e-5)

    # In the same place alone: the same, bit for bit, whatever the others are.
    (again,) = passes(loss, counts=(3,), settings=settings[:1])
    repeated = adapter_batch.forward_backward_at(again, BlockPlace(4, 0, shape))
    for mine, theirs in zip(leaves(again.session), leaves(together[0].session), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(
        np.concatenate(repeated.log_probs), np.concatenate(results[0].log_probs)
    )
    assert repeated.loss == results[0].loss


def test_a_batch_holds_what_fits_and_wastes_little():
    packer = dataclasses.replace(base().models.packer, max_tokens=256, num_shards=1)
    small, large = BlockShape(1, 1, 32), BlockShape(2, 2, 64)
    assert adapter_batch.common_shape([small] * 9, 8, packer) == (8, small)
    assert adapter_batch.common_shape([small] * 9, 4, packer) == (4, small)
    # Its padding would be three quarters.
    assert adapter_batch.common_shape([small, large, small], 8, packer) == (1, small)
    # A third would make four blocks of 128 tokens.
    assert adapter_batch.common_shape([large] * 3, 8, packer) == (2, large)
    # Nothing is known of a pass that needs several microbatches.
    assert adapter_batch.common_shape([BlockShape(8, 8, 64)] * 2, 8, packer)[0] == 0
    three = [Datum(tokens) for tokens in (range(9), range(20), range(33))]
    assert adapter_batch.block_shape(three, packer) == BlockShape(4, 1, 64)
    place = BlockPlace(4, 1, large)
    assert BlockPlace.from_json(place.to_json()) == place


def test_bad_data_of_one_session_leave_all_gradients():
    good, bad = passes("cross_entropy", counts=(1, 1), settings=({}, {}))
    before = leaves(good.session)
    bad = dataclasses.replace(bad, data=[dataclasses.replace(bad.data[0], tokens=[1, 2])])
    with pytest.raises(TrainingDataError, match=r"data\[0\]"):
        adapter_batch.forward_backward([good, bad], BlockShape(1, 1, 32))
    assert bad.session.gradients is None
    for mine, old in zip(leaves(good.session), before, strict=True):
        np.testing.assert_array_equal(mine, old)
