"""Digests tell values apart, and the first item that differs is named with its holders."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.sharding import agreement
from jaxrl_llm.sharding.agreement import Copies, DivergenceError, compare, digest


@dataclasses.dataclass
class Row:
    tokens: np.ndarray
    text: str


def test_a_digest_sees_every_kind_of_change():
    values = [
        Row(np.arange(3), "a"),
        Row(np.arange(3), "b"),
        Row(np.arange(3).astype(np.int32), "a"),
        Row(np.arange(3)[None], "a"),
        Row(np.array([0, 2, 1]), "a"),
        [1, "2"],
        ["1", 2],
        ["ab", "c"],
        ["a", "bc"],
        [["a"], "b"],
        [["a", "b"]],
        {"a": 1},
        {"a": True},
        {"b": 1},
        0.0,
        -0.0,
        "\ud800",  # half of a surrogate pair, as a tokenizer may give
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(Row(np.arange(3), "a")) == digest(Row(np.arange(3), "a"))


def test_the_first_item_that_differs_is_named_with_who_holds_what():
    same = {"config": "0", "tokens": "1", "rewards": "2"}
    compare("step 1", [same, same, same])
    other = {**same, "rewards": "9", "tokens": "8"}
    text = r"step 2: .* first about tokens \(processes 0, 2: 1; process 1: 8\); look for a host"
    with pytest.raises(DivergenceError, match=text):
        compare("step 2", [same, other, same])


def test_what_only_some_hold_is_compared_among_them():
    compare("x", [{"a[0:1]": "1"}, {"a[1:2]": "2"}])
    with pytest.raises(DivergenceError, match=r"a\[0:1\] \(process 0: 1; process 2: 3\)"):
        compare("x", [{"a[0:1]": "1"}, {"a[1:2]": "2"}, {"a[0:1]": "3"}])


@pytest.fixture(scope="module")
def mesh():
    return tiny.make_mesh(data=2, fsdp=2, tensor=2)


def test_every_part_has_one_digest_however_often_it_is_held(mesh):
    array = jax.device_put(
        np.arange(24.0).reshape(4, 6), NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    scalar = jax.device_put(np.int32(3), NamedSharding(mesh, PartitionSpec()))
    found = dict(Copies({"w": array, "n": scalar}).digests())
    assert list(found) == ["['n'][]", "['w'][0:2,0:6]", "['w'][2:4,0:6]"]
    assert found["['n'][]"] == "00000003"
    assert len(set(found.values())) == 3


def test_a_copy_that_differs_within_a_process_is_found(mesh):
    sharding = NamedSharding(mesh, PartitionSpec())
    good = np.ones((2, 2), np.float32)
    pieces = [
        jax.device_put(good + (i == 5) * 1e-7, device) for i, device in enumerate(mesh.devices.flat)
    ]
    array = jax.make_array_from_single_device_arrays((2, 2), sharding, pieces)
    (item,) = Copies({"w": array}).digests()
    with pytest.raises(DivergenceError, match=r"about \['w'\]\[0:2,0:2\] \(process 0: unequal cop"):
        compare("step 1", [dict([item])])


@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8"])
def test_one_changed_element_changes_an_arrays_digest(dtype, place):
    numbers = np.arange(12) % 2
    array = jnp.asarray(numbers, dtype)
    changed = jnp.asarray(np.where(np.arange(12) == place, 1 - numbers, numbers), dtype)
    assert agreement._array_digest(array) != agreement._array_digest(changed)


def test_two_elements_that_change_places_change_it_too():
    a = jnp.array([1.0, 2.0, 3.0])
    assert agreement._array_digest(a) != agreement._array_digest(a[jnp.array([1, 0, 2])])
