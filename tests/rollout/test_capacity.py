"""Slots follow from the work and the memory."""

import types

import numpy as np
import pytest
import tiny

from jaxrl_llm.rollout import capacity

# 2 layers, keys and values, 2 heads of 8 numbers of 4 bytes: 256 bytes a token.
TOKEN = 256


def test_cache_bytes_by_hand():
    one = tiny.make_mesh()
    assert capacity.cache_bytes(tiny.NETWORK, one, 8, 100) == 8 * 100 * TOKEN
    split = tiny.make_mesh(fsdp=2, tensor=2)
    assert capacity.cache_bytes(tiny.NETWORK, split, 8, 100) == 8 * 100 * TOKEN // 4


def test_logits_bytes_by_hand():
    vocab = tiny.NETWORK.shape.vocab_size
    assert capacity.logits_bytes(tiny.NETWORK, tiny.make_mesh(), 8) == 8 * vocab * 4
    split = tiny.make_mesh(fsdp=2, tensor=2)
    assert capacity.logits_bytes(tiny.NETWORK, split, 8) == 8 * vocab * 4 // 4


def test_every_guess_has_logits_of_its_own():
    mesh = tiny.make_mesh()
    network = tiny.with_sizes(vocab_size=1 << 20)  # three times 4 MiB a place and slot
    found = [capacity.num_slots(network, mesh, 100, 64, guesses) for guesses in (0, 1, 4)]
    assert found == [64, 32, 16]


def test_a_cpu_decodes_up_to_64_within_a_gigabyte():
    mesh = tiny.make_mesh()
    assert capacity.num_slots(tiny.NETWORK, mesh, 100, 48) == 48
    assert capacity.num_slots(tiny.NETWORK, mesh, 100, 1000) == 64
    room = (1 << 30) // TOKEN
    assert capacity.num_slots(tiny.NETWORK, mesh, room // 24, 64) == 16
    assert capacity.num_slots(tiny.NETWORK, mesh, 10 * room, 64) == 1


@pytest.mark.parametrize(
    ("stats", "slots"),
    [
        ({"bytes_limit": 4 * 32 * 100 * TOKEN, "bytes_in_use": 0}, 32),
        ({"bytes_limit": 4 * 32 * 100 * TOKEN, "bytes_in_use": 1}, 16),
        (None, 256),
    ],
    ids=str,
)
def test_a_device_that_tells_sets_the_limit(stats, slots, monkeypatch):
    device = types.SimpleNamespace(platform="tpu", memory_stats=lambda: stats)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    monkeypatch.setattr(capacity, "cache_bytes", lambda network, mesh, s, t: s * t * TOKEN)
    monkeypatch.setattr(capacity, "logits_bytes", lambda network, mesh, rows: 0)
    assert capacity.num_slots(tiny.NETWORK, mesh, 100, 1000) == slots
