"""Broadcasts through the key-value store of the coordination service."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.sharding import kv_store_broadcast

SHARDING = NamedSharding(Mesh(np.array(jax.devices()[2:6]), ("x",)), PartitionSpec("x"))


class Store:
    """A key-value store as the coordination service has it, which records the keys it was asked."""

    def __init__(self):
        self.values: dict[str, bytes | str] = {}
        self.barriers: list[str] = []

    def key_value_set(self, key: str, value: str) -> None:
        assert key not in self.values
        self.values[key] = value

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        assert key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        value = self.values[key]
        assert isinstance(value, str)
        return value

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        value = self.values[key]
        assert isinstance(value, bytes)
        return value

    def key_value_delete(self, folder: str) -> None:
        self.values = {k: v for k, v in self.values.items() if not k.startswith(folder)}

    def wait_at_barrier(self, barrier: str, timeout_ms: int) -> None:
        assert barrier not in self.barriers  # the service refuses a barrier that was passed
        self.barriers.append(barrier)


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(distributed.global_state, "client", store)
    return store


@pytest.fixture
def as_process(monkeypatch):
    """`as_process(index, next_id)`: what follows runs as this process of a run of two."""

    def become(index: int, next_id: int = 1) -> None:
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(kv_store_broadcast, "_message_ids", itertools.count(next_id))

    return become


def no_content() -> bytes:
    raise AssertionError("only the source makes the content")


MIB = 1 << 20


@pytest.mark.parametrize(
    "data, num_chunks",
    [(b"", 0), (b"a", 1), (bytes(range(256)) * (MIB // 256), 1), (b"x" * (2 * MIB) + b"end", 3)],
    ids=["empty", "one byte", "one full chunk", "three chunks"],
)
def test_receivers_read_the_bytes_of_the_source(store, as_process, data, num_chunks):
    as_process(0)
    assert kv_store_broadcast.broadcast(0, lambda: data) == data
    chunks = [value for value in store.values.values() if isinstance(value, bytes)]
    assert len(chunks) == num_chunks and all(len(chunk) <= MIB for chunk in chunks)
    as_process(1)
    assert kv_store_broadcast.broadcast(0, no_content) == data


def test_messages_are_read_in_the_order_of_sending(store, as_process):
    as_process(1)
    kv_store_broadcast.broadcast(1, lambda: b"first")
    kv_store_broadcast.broadcast(1, lambda: b"second")
    as_process(0)
    assert [kv_store_broadcast.broadcast(1, no_content) for _ in range(2)] == [b"first", b"second"]


def test_old_messages_are_deleted_by_one_process(store, as_process):
    """Between two barriers: before it all have read the old ones, after it a new one may come."""
    interval = kv_store_broadcast._CLEANUP_INTERVAL
    as_process(0, next_id=interval - 1)
    kv_store_broadcast.broadcast(0, lambda: b"old")
    assert store.barriers == []
    as_process(1, next_id=interval)
    with pytest.raises(KeyError):
        kv_store_broadcast.broadcast(
            0, no_content
        )  # nothing of this number yet; process 1 deletes nothing
    assert b"old" in store.values.values()
    store.barriers.clear()
    as_process(0, next_id=interval)
    kv_store_broadcast.broadcast(0, lambda: b"new")
    assert b"old" not in store.values.values() and b"new" in store.values.values()
    assert len(store.barriers) == 2


def test_one_process_fetches_without_the_store():
    tree = {"a": jax.device_put(np.arange(8), SHARDING), "b": [2.5, np.ones(2)]}
    fetched = kv_store_broadcast.device_get(tree)
    assert isinstance(fetched["a"], np.ndarray)
    np.testing.assert_array_equal(fetched["a"], np.arange(8))
    np.testing.assert_array_equal(fetched["b"][1], np.ones(2))
    assert fetched["b"][0] == 2.5


def test_arrays_of_a_pool_come_from_its_first_host(store, as_process):
    """All devices here are of process 0, so that for two processes the arrays are a pool's."""
    sent = {
        "big": jax.device_put(np.arange(8, dtype=np.float32).reshape(4, 2) / 3, SHARDING),
        "host": np.arange(3),
        "half": jax.device_put(jnp.arange(4).astype(jnp.bfloat16), SHARDING),
        "step": jax.device_put(np.int32(7), jax.devices()[2]),
    }
    as_process(0)
    kv_store_broadcast.device_get(sent)
    # One message for all arrays of the pool; the array of the host is every process's own.
    (message,) = (value for value in store.values.values() if isinstance(value, bytes))
    assert len(message) == 4 * 2 * 4 + 4 * 2 + 4
    # The receiver has no part of the arrays: here they hold other numbers of the same shape.
    as_process(1)
    blank = jax.tree.map(lambda a: a * 0 if isinstance(a, jax.Array) else a, sent)
    assert all(blank[name].committed for name in ("big", "half", "step"))
    fetched = kv_store_broadcast.device_get(blank)
    for name, array in sent.items():
        assert fetched[name].dtype == array.dtype and fetched[name].shape == array.shape
        np.testing.assert_array_equal(fetched[name], array)


def test_hosts_of_a_sharding_are_process_indices():
    assert kv_store_broadcast.hosts_of(SHARDING) == {0}
