"""The chunked head against the dense one: values, gradients, memory, packing, meshes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models import heads
from jaxrl_llm.models.target_positions import AllTargets, SelectedTargets
from jaxrl_llm.sharding.mesh import make_mesh

B, T, D, V = 4, 24, 16, 50


def dense_statistics(hidden, weight, tokens, segment_ids, temperature):
    """The definition, with all logits at once."""
    logits = jnp.einsum("btd,vd->btv", hidden, weight) / temperature
    log_p = jax.nn.log_softmax(logits)[:, :-1]
    log_probs = jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
    found = (log_probs, -jnp.sum(jnp.exp(log_p) * log_p, -1), jnp.sum(jnp.exp(2 * log_p), -1))
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return tuple(jnp.pad(jnp.where(same, x, 0.0), ((0, 0), (1, 0))) for x in found)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Vocabularies here are small, and cut all the same."""
    monkeypatch.setattr(heads, "_MIN_ROWS", 1)


@pytest.fixture
def batch():
    keys = jax.random.split(jax.random.key(0), 5)
    segment_ids = np.zeros((B, T), np.int32)
    segment_ids[0, :] = 1
    segment_ids[1, :9], segment_ids[1, 9:10], segment_ids[1, 10:20] = 1, 2, 3
    segment_ids[2, :5] = 1
    return {
        "hidden": jax.random.normal(keys[0], (B, T, D)),
        "weight": jax.random.normal(keys[1], (V, D)),
        "tokens": jax.random.randint(keys[2], (B, T), 0, V),
        "segment_ids": jnp.array(segment_ids),
        "bars": jax.random.normal(keys[3], (2, B, T)),
    }


def everywhere(hidden, weight, tokens, segment_ids, **settings):
    places = AllTargets(segment_ids)
    return heads.token_statistics(hidden, weight, tokens, places, **settings)


def run(statistics, batch, **settings):
    """Values, and gradients of a random linear function of log-probs and entropies."""

    def loss(hidden, weight):
        found = statistics(hidden, weight, batch["tokens"], batch["segment_ids"], **settings)
        return sum((bar * x).sum() for bar, x in zip(batch["bars"], found, strict=False)), found

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (hidden_bar, weight_bar), found = jax.jit(gradient)(batch["hidden"], batch["weight"])
    return (*found[:3], hidden_bar, weight_bar)


def assert_close(got, want, relative=1e-5):
    for name, a, b in zip(
        ("log_probs", "entropies", "sum_squared_probs", "hidden_bar", "weight_bar"),
        got,
        want,
        strict=True,
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= relative * np.abs(b).max(), name


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
def test_chunked_log_probs_equal_dense_ones(batch, chunk):
    want = run(dense_statistics, batch, temperature=0.7)
    got = run(everywhere, batch, temperature=0.7, chunk=chunk)
    assert_close(got, want)


def supports(batch, size):
    """Random sets of tokens with each token's own, from 1 to `size` of them; some places none."""
    random = np.random.default_rng(3)
    support = np.full((B, T, size), -1, np.int32)
    for row, column in np.ndindex(B, T):
        token, count = int(batch["tokens"][row, column]), random.integers(1, size + 1)
        others = random.permutation(np.setdiff1d(np.arange(V), [token]))[: count - 1]
        support[row, column, :count] = random.permutation([token, *others])
    support[:, ::5] = -1
    return support


@pytest.mark.parametrize("chunk", [7, 1000])
def test_statistics_over_a_support(batch, chunk):
    support = supports(batch, 9)
    allowed = np.zeros((B, T, V + 1), bool)
    np.put_along_axis(allowed, np.where(support < 0, V, support), True, -1)
    allowed = allowed[..., :V] | (support < 0).all(-1, keepdims=True)

    def dense(hidden, weight, tokens, segment_ids, temperature):
        logits = jnp.einsum("btd,vd->btv", hidden, weight) / temperature
        logits = jnp.where(allowed[:, 1:], logits[:, :-1], -1e30)
        log_p = jax.nn.log_softmax(logits)
        log_probs = jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
        entropies = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        found = (log_probs, entropies, jnp.sum(jnp.exp(2 * log_p), -1))
        same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
        return tuple(jnp.pad(jnp.where(same, x, 0.0), ((0, 0), (1, 0))) for x in found)

    found = run(everywhere, batch, temperature=0.7, chunk=chunk, support=support)
    assert_close(found, run(dense, batch, temperature=0.7))
    # Rows of the weight of tokens that are in no support have exactly no gradient.
    support = np.where(support >= 0, support % 20, support)
    support[:, ::5] = 0
    batch = {**batch, "tokens": batch["tokens"] % 20}
    support[..., 0] = batch["tokens"]
    weight_bar = np.asarray(run(everywhere, batch, chunk=chunk, support=support)[-1])
    assert np.abs(weight_bar[:20]).max() > 0.1 and (weight_bar[20:] == 0).all()
    # The whole vocabulary is no other distribution.
    whole = np.broadcast_to(np.arange(V, dtype=np.int32), (B, T, V))
    for a, b in zip(
        run(everywhere, batch, chunk=chunk, support=whole),
        run(everywhere, batch, chunk=chunk),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_chosen_positions_equal_all_positions(batch, entropy):
    """Of a mask's positions the same values and the same gradients, of the others nothing."""
    first = batch["segment_ids"] != jnp.pad(batch["segment_ids"][:, :-1], ((0, 0), (1, 0)))
    mask = (jax.random.uniform(jax.random.key(9), (B, T)) < 0.4) & ~first
    mask &= batch["segment_ids"] > 0
    places = jnp.sort(jnp.where(mask, jnp.arange(T), T), axis=1)[:, : int(mask.sum(1).max()) + 1]
    before = jnp.maximum(places - 1, 0)

    def masked(*arguments, **settings):
        found = everywhere(*arguments, **settings)
        return tuple(jnp.where(mask, x, 0.0) for x in found[:3])

    def chosen(hidden, weight, tokens, _, **settings):
        chosen = SelectedTargets(places, before, T)
        return heads.token_statistics(hidden, weight, tokens, chosen, **settings)

    settings = {"temperature": 0.7, "chunk": 5, "entropy": entropy}
    for got, want in zip(
        run(chosen, batch, **settings), run(masked, batch, **settings), strict=True
    ):
        # Sums in another order: what cancels keeps an error of the largest.
        largest = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * largest)


def test_entropy_without_its_gradient(batch):
    settings = {"temperature": 0.7, "chunk": 5}
    full = run(everywhere, batch, **settings)
    value = run(everywhere, batch, entropy="value", **settings)
    for got, want in zip(value[:3], full[:3], strict=True):
        np.testing.assert_array_equal(got, want)
    alone = {**batch, "bars": batch["bars"].at[1].set(0.0)}
    without = run(everywhere, alone, **settings)
    for got, want in zip(value[3:], without[3:], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_log_probs_by_hand():
    # logits (0, log 3) / 1: probabilities 1/4 and 3/4; entropy log 4 - 3/4 log 3; 1/16 + 9/16.
    hidden, weight = jnp.ones((1, 3, 1)), jnp.log(jnp.array([[1.0], [3.0]]))
    log_probs, entropies, squares, _ = everywhere(
        hidden, weight, jnp.array([[1, 0, 1]]), jnp.ones((1, 3), jnp.int32), chunk=2
    )
    np.testing.assert_allclose(log_probs, [[0, np.log(0.25), np.log(0.75)]], rtol=1e-6)
    np.testing.assert_allclose(entropies, [[0, *[np.log(4) - 0.75 * np.log(3)] * 2]], rtol=1e-6)
    np.testing.assert_allclose(squares, [[0, 0.625, 0.625]], rtol=1e-6)


def test_first_tokens_and_padding_are_zero(batch):
    found = run(everywhere, batch)[:3]
    for x in map(np.asarray, found):
        assert (x[:, 0] == 0).all() and (x[1, [9, 10, 20]] == 0).all()
        assert (x[2, 5:] == 0).all() and (x[3] == 0).all()
        assert (x[0, 1:] != 0).all() and (x[1, 11:20] != 0).all()


def test_without_entropy_log_probs_stay(batch):
    both = run(everywhere, {**batch, "bars": batch["bars"][:1]}, chunk=8)
    one = run(everywhere, {**batch, "bars": batch["bars"][:1]}, chunk=8, entropy="none")
    np.testing.assert_array_equal(one[0], both[0])
    np.testing.assert_allclose(one[4], both[4], rtol=1e-6, atol=1e-6)
    assert not one[1].any() and not one[2].any()


def test_sum_of_squares_has_no_gradient(batch):
    def total(hidden):
        return everywhere(hidden, batch["weight"], batch["tokens"], batch["segment_ids"])[2].sum()

    assert not jax.grad(total)(batch["hidden"]).any()


def test_traced_temperature_takes_no_gradient(batch):
    def total(temperature):
        found = everywhere(
            batch["hidden"],
            batch["weight"],
            batch["tokens"],
            batch["segment_ids"],
            temperature=temperature,
        )
        return found[0].sum(), found[0]

    gradient, log_probs = jax.jit(jax.grad(total, has_aux=True))(0.7)
    assert gradient == 0
    want = run(dense_statistics, batch, temperature=0.7)[0]
    np.testing.assert_allclose(log_probs, want, rtol=1e-5, atol=1e-5)


def test_padding_may_hold_anything(batch):
    padding = batch["segment_ids"] == 0
    last = batch["segment_ids"] != jnp.pad(batch["segment_ids"][:, 1:], ((0, 0), (0, 1)))
    garbage = {
        **batch,
        "tokens": jnp.where(padding, -(2**30), batch["tokens"]),
        "hidden": jnp.where((padding | last)[..., None], jnp.nan, batch["hidden"]),
    }
    for a, b in zip(
        run(everywhere, garbage, chunk=16),
        run(everywhere, batch, chunk=16),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_packed_equals_unpacked(batch):
    starts, ends = (0, 9, 10), (9, 10, 20)
    settings = {"temperature": 1.3, "chunk": 11}
    packed = [np.asarray(x)[1] for x in run(everywhere, batch, **settings)[:4]]

    def alone(x):
        """Row 1's sequences, each at the start of a row of its own."""
        rows = [jnp.pad(x[1, s:e], ((0, T - e + s),) + ((0, 0),) * (x.ndim - 2)) for s, e in
                zip(starts, ends, strict=True)]  # fmt: skip
        return jnp.stack(rows)

    unpacked = {name: alone(batch[name]) for name in ("hidden", "tokens", "segment_ids")}
    unpacked |= {"weight": batch["weight"], "bars": jnp.stack([alone(b) for b in batch["bars"]])}
    found = run(everywhere, unpacked, **settings)[:4]
    for one, rows in zip(packed, found, strict=True):
        for row, (s, e) in enumerate(zip(starts, ends, strict=True)):
            np.testing.assert_allclose(rows[row, : e - s], one[s:e], rtol=1e-5, atol=1e-6)


def test_low_precision_accumulates_in_float32(batch):
    low = {**batch, "hidden": batch["hidden"].astype(jnp.bfloat16)}
    low["weight"] = batch["weight"].astype(jnp.bfloat16)
    exact = {name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
             for name, x in low.items()}  # fmt: skip
    got = run(everywhere, low, chunk=16)
    want = run(dense_statistics, exact, temperature=1.0)
    assert [x.dtype for x in got] == [jnp.float32] * 3 + [jnp.bfloat16] * 2
    # Values differ by float32 rounding alone; gradients by bfloat16's half unit, 2**-9 twice.
    assert_close(got[:3] + want[3:], want)
    assert_close(want[:3] + got[3:], want, relative=2**-7)


def test_peak_memory_is_far_below_dense():
    shape, vocab, width = (8, 128), 32_000, 32
    arguments = (
        jax.ShapeDtypeStruct((*shape, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.int32),
    )

    def temporary_bytes(statistics, **settings):
        def loss(hidden, weight, tokens, segment_ids):
            log_probs, entropies, *_ = statistics(hidden, weight, tokens, segment_ids, **settings)
            return (log_probs + entropies).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    dense = temporary_bytes(dense_statistics, temperature=1.0)
    chunked = temporary_bytes(everywhere, chunk=64)
    assert chunked * 4 < dense, (chunked, dense)


@pytest.mark.parametrize("sequence", [1, 2])
def test_partitions_without_gathering_logits(sequence):
    rows, length, width, vocab, chunk = 8, 64, 4, 256, 16
    keys = jax.random.split(jax.random.key(1), 3)
    batch = {
        "hidden": jax.random.normal(keys[0], (rows, length, width)),
        "weight": jax.random.normal(keys[1], (vocab, width)),
        "tokens": jax.random.randint(keys[2], (rows, length), 0, vocab),
        "segment_ids": jnp.ones((rows, length), jnp.int32).at[:, 40:].set(2).at[5:, 50:].set(0),
    }

    def loss(hidden, weight, tokens, segment_ids):
        found = everywhere(hidden, weight, tokens, segment_ids, chunk=chunk)
        return (found[0] + 0.1 * found[1]).sum(), found[:3]

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, want), want_bars = jax.jit(gradient)(*batch.values())

    mesh = make_mesh(MeshConfig(fsdp=4 // sequence, sequence=sequence, tensor=2))
    specs = (
        PartitionSpec("fsdp", "sequence"),
        PartitionSpec(("tensor", "fsdp")),
        PartitionSpec("fsdp", "sequence"),
        PartitionSpec("fsdp", "sequence"),
    )
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(batch.values(), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient).lower(*arguments).compile()
        (_, got), got_bars = compiled(*arguments)
    assert_close((*got, *got_bars), (*want, *want_bars))

    # A piece's logits on one device are the smallest part of logits there is: nothing of that
    # size may travel. Inside the loops only pieces of the weight and of its gradient do, the
    # whole of neither is ever on one device.
    whole, looped = collective_sizes(compiled.as_text())
    assert whole and looped, "no collective found: the pattern does not fit the compiler's text"
    assert max(whole) < chunk * vocab // 2 // 2
    num_pieces = rows * length // 4 // chunk
    assert max(looped) <= width * vocab // 2 // num_pieces


def collective_sizes(text):
    """Elements that each collective of a compiled program returns: of all, and of loop bodies."""
    bodies = set(re.findall(r"body=(%[\w.-]+)", text))
    computation, whole, looped = "", [], []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").split(" ")[0]
        found = re.search(r"= (.*?) (all-\w+|collective-permute|reduce-scatter)(-start)?\(", line)
        if found:
            dims = re.findall(r"\w+\[([\d,]*)\]", found[1])
            size = max(int(np.prod([int(n) for n in d.split(",") if n])) for d in dims)
            whole.append(size)
            if computation in bodies:
                looped.append(size)
    return whole, looped


def test_results_are_placed_without_a_collective():
    """Of rows that devices share, each has all that its own need, scored tokens as well.

    More than bytes are at stake: XLA may begin a collective while one before it, in a loop, is not
    done; on CPUs of several processes the two then take each other's messages, or wait for ever.
    """
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    rng = np.random.default_rng(0)
    positions = np.stack([rng.permutation(T + 3)[:7] for _ in range(B)])  # some are no token
    for width in ((), (3,)):
        x = rng.normal(size=(B, 7, *width)).astype(np.float32)
        want = np.zeros((B, T, *width), np.float32)
        for row, column in np.argwhere(positions < T):
            want[row, positions[row, column]] = x[row, column]
        with jax.set_mesh(mesh):
            arguments = jax.device_put((np.minimum(positions, T), x), split)
            put = jax.jit(lambda at, x: SelectedTargets(at, at, T).scatter(x))
            compiled = put.lower(*arguments).compile()
            np.testing.assert_array_equal(compiled(*arguments), want)
        assert collective_sizes(compiled.as_text()) == ([], [])


def test_values_and_scores_by_hand():
    hidden = jnp.arange(8.0).reshape(1, 4, 2)
    weight = jnp.array([[1.0, 10.0]])  # scores 10, 32, 54, 76
    segment_ids = jnp.array([[1, 1, 2, 2]])
    np.testing.assert_array_equal(
        heads.token_values(hidden, weight, AllTargets(segment_ids)), [[0.0, 10.0, 0.0, 54.0]]
    )
    np.testing.assert_array_equal(
        heads.token_values(hidden, weight, AllTargets(jnp.array([[1, 1, 1, 0]]))),
        [[0.0, 10.0, 32.0, 0.0]],
    )
    np.testing.assert_array_equal(
        heads.sequence_scores(jnp.repeat(hidden, 2, 0), weight, jnp.array([3, 1])), [76.0, 32.0]
    )


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_suppressed_tokens_are_as_if_they_were_not_in_the_vocabulary(batch, cap):
    """Values and gradients equal those of the other rows alone; the rows themselves get none."""
    suppressed = ((7, 9), (40, V))
    kept = np.array([token for token in range(V) if not (7 <= token < 9 or token >= 40)])
    tokens = jnp.asarray(kept)[batch["tokens"] % len(kept)]
    settings = {"temperature": 0.7, "cap": cap}
    batch = {**batch, "tokens": tokens}
    fewer = {**batch, "weight": batch["weight"][kept], "tokens": jnp.searchsorted(kept, tokens)}
    want = run(everywhere, fewer, chunk=1000, **settings)
    for chunk in (5, 1000):  # also pieces of suppressed tokens alone
        got = run(everywhere, batch, chunk=chunk, suppressed=suppressed, **settings)
        assert_close((*got[:4], got[4][kept]), want)
        assert not np.delete(np.asarray(got[4]), kept, axis=0).any()


def test_no_suppressed_tokens_change_no_bit(batch):
    got, want = run(everywhere, batch, suppressed=()), run(everywhere, batch)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_suppressed_token_in_a_prompt_has_no_log_prob(batch):
    """An image in a prompt: nothing is said of it, and nothing is not a number."""
    token = int(batch["tokens"][0, 3])
    found = run(everywhere, batch, suppressed=((token, token + 1),))
    assert found[0][0, 3] == 0 and all(np.isfinite(x).all() for x in found)
