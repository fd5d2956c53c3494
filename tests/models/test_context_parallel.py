"""Rows split over the sequence axis are attended to as if they were whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.models import attention, context_parallel

ROWS, LENGTH, SIZE = 2, 48, 8


def inputs(num_heads, num_kv_heads, length=LENGTH, rows=ROWS):
    rng = np.random.default_rng(0)
    draw = lambda n: jnp.asarray(rng.standard_normal((rows, length, n, SIZE)), jnp.float32)  # noqa: E731
    return draw(num_heads), draw(num_kv_heads), draw(num_kv_heads)


def segments():
    """Two packed rows; no segment ends where a shard does, and one covers nearly a whole row."""
    rows = np.zeros((ROWS, LENGTH), np.int32)
    rows[0, :11], rows[0, 11:31], rows[0, 31:41] = 3, 1, 7
    rows[1, :45] = 2
    return jnp.asarray(rows)


def with_gradients(attend, q, k, v, ids):
    """Returns what tokens of segments attend to, and its gradients by q, k and v."""
    weight = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)
    weight *= (ids > 0)[..., None, None]

    def loss(q, k, v):
        out = attend(q, k, v, ids)
        return jnp.sum(out * weight), jnp.where((ids > 0)[..., None, None], out, 0.0)

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


@pytest.mark.parametrize(
    ("sizes", "form", "heads"),
    [
        ({"sequence": 4}, "all_to_all", (8, 2)),  # each key head for two devices
        pytest.param({"sequence": 2, "tensor": 2}, "all_to_all", (4, 4), marks=pytest.mark.slow),
        ({"sequence": 2, "tensor": 2, "fsdp": 2}, "ring", (4, 2)),
        pytest.param(
            *({"sequence": 4}, "ring", (3, 1)),  # heads that nothing divides
            marks=pytest.mark.slow,
        ),
        ({"sequence": 3, "tensor": 2}, "ring", (3, 3)),  # whole heads on every tensor device
        pytest.param(
            *({"sequence": 2, "tensor": 4}, "ring", (4, 2)),  # more tensor devices than key heads
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_equals_attention_of_whole_rows(sizes, form, heads, monkeypatch):
    monkeypatch.setattr(context_parallel, "_BLOCK", 3)
    arguments = *inputs(*heads), segments()
    wanted = with_gradients(attention.full_attention, *arguments)
    with jax.set_mesh(tiny.make_mesh(**sizes)):
        attend = functools.partial(
            context_parallel.context_parallel_attention,
            form=form,
            whole_rows=whole_rows,
        )
        found = with_gradients(attend, *arguments)
    for got, want in zip(found, wanted, strict=True):
        # Sums of 48 float32 terms of size one in another order.
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


def whole_rows(q, k, v, ids, sinks, index):
    assert sinks is None and index is None
    return attention.full_attention(q, k, v, ids)


def temporary_bytes(form, length, shards, layers=0):
    """Returns what one device needs beside its arguments and results, forward and backward."""
    mesh = tiny.make_mesh(sequence=shards)
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs(8, 8, length, 1)]
    ids = jnp.ones((1, length), jnp.int32)

    def loss(q, k, v):
        q, k, v = (
            context_parallel.mesh_lib.constrain(x, "batch", "length", None, None) for x in (q, k, v)
        )
        attend = context_parallel.context_parallel_attention
        return attend(q, k, v, ids, form, whole_rows).sum()

    def loss_of_layers(q, k, v):
        def layer(total, _):
            return total + loss(q + total, k + total, v + total), None

        return jax.lax.scan(jax.checkpoint(layer), 0.0, None, length=layers)[0]

    function = loss_of_layers if layers else loss
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(function, (0, 1, 2))).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_ring_memory_grows_with_local_tokens_only(monkeypatch):
    monkeypatch.setattr(context_parallel, "_BLOCK", 128)
    # Four times the tokens on four times the devices: the ids are all that grows.
    small, large = temporary_bytes("ring", 2048, 2), temporary_bytes("ring", 8192, 8)
    assert large < 1.15 * small
    # The scores of whole rows would be 8 x 8192 x 8192 numbers; over all devices an eighth each.
    assert large < 8 * 8192 * 8192 * 4 / 8 / 10


def test_layers_do_not_keep_which_keys_a_query_of_the_ring_sees(monkeypatch):
    """Nothing a loop over layers has in common is computed ahead for all pairs of blocks."""
    monkeypatch.setattr(context_parallel, "_BLOCK", 128)
    one, looped = temporary_bytes("ring", 4096, 4), temporary_bytes("ring", 4096, 4, layers=2)
    assert looped < 3 * one


def test_memory_of_the_exchange_falls_with_the_shards():
    # Scores of 4 heads each, then of 1; what sees what is of a whole row in both.
    two, eight = temporary_bytes("all_to_all", 1024, 2), temporary_bytes("all_to_all", 1024, 8)
    assert eight < two / 2


def test_heads_that_do_not_divide_are_a_problem_of_one_form():
    problem = context_parallel.sharding_problem
    assert problem("all_to_all", 8, tensor=2, sequence=4) == ""
    assert problem("ring", 7, tensor=2, sequence=4) == ""
    assert "use mesh.sequence=3 or mesh.sequence_attention='ring'" in problem(
        "all_to_all", 12, tensor=2, sequence=4
    )
    # Heads that tensor does not divide are on every tensor device.
    assert problem("all_to_all", 9, tensor=2, sequence=3) == ""


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_rows_become_as_wide_as_the_shards_need(shards):
    for width in (1, 28, 500, 4096, 9000, 32768, 100_001):
        wide = context_parallel.padded_row_width(width, shards)
        assert width <= wide < 1.05 * width + 2 * shards
        if shards > 1:
            assert wide % (2 * shards) == 0
            blocks = context_parallel._num_blocks(wide // shards)
            assert wide // shards // blocks >= min(256, wide // shards // 2)


def test_every_device_sees_as_much():
    shards, blocks, size = 4, 4, 5
    starts = np.array(
        [context_parallel._block_starts(jnp.int32(d), shards, blocks, size) for d in range(shards)]
    )
    assert sorted(starts.flat) == list(range(0, shards * blocks * size, size))
    for turn in range(1, shards):
        pairs = [(starts[d][:, None] >= starts[(d - turn) % shards]).sum() for d in range(shards)]
        assert len(set(pairs)) == 1
