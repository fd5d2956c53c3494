"""Loss and gradient of a batch by hand: each microbatch is one sequence, with one number in it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.learner import gradients
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.predict import ForwardSpec
from jaxrl_llm.learner.vision.trainable_encoder import TrainableVisionEncoder
from jaxrl_llm.models import mixed_precision
from jaxrl_llm.models.moe.router import RouterOutputs
from jaxrl_llm.models.pipeline import schedule
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.models.vision.encoder import VisionEncoder
from jaxrl_llm.packing.packed_batch import ImageBatch, PackedBatch

WIDTH = 8
# Token sums 256, 1 and 2: their total of 259 is no number of bfloat16, which has 8 bits.
TOKENS = np.zeros((3, WIDTH), np.int32)
TOKENS[:, 1:4] = [[95, 95, 66], [0, 1, 0], [1, 0, 1]]
LENGTHS = np.full(3, WIDTH, np.int32)
PARAMS = {
    "layers": {"0": {"kernel": jnp.full((1, 2, 2), 0.5)}},
    "scale": jnp.full(3, 2.0),
}


def packed(sequences=(0, 1, 2), max_tokens=WIDTH) -> PackedBatch:
    return Packer(max_tokens, 1).pack(LENGTHS, np.array(sequences), width=WIDTH)


def loss(params, microbatch):
    """sum(tokens) * (sum(kernel) + sum(scale)), with the kernel in the compute dtype."""
    layer = jax.tree.map(lambda a: a[0], params["layers"]["0"])
    kernel = mixed_precision.cast_layer(layer, jnp.int32(0), "bfloat16")["kernel"]
    tokens = microbatch.to_rows(jnp.asarray(TOKENS)).sum()
    value = tokens * (kernel.sum().astype(jnp.float32) + params["scale"].sum())
    return value, {"tokens": tokens, "microbatches": jnp.int32(1)}


def of_batch(
    batch,
    loss=loss,
    params=PARAMS,
    network=tiny.NETWORK,
    eyes=None,
    merge_params=lambda params: params,
    compute_dtype="bfloat16",
):
    forward = ForwardSpec(network, jnp.asarray(TOKENS), vision_encoder=eyes)

    @jax.jit
    def program(params, batch):
        return gradients.loss_and_gradients(
            forward, merge_params, params, batch, loss, compute_dtype
        )

    return program(params, batch)


def test_losses_and_gradients_are_summed_over_microbatches():
    batch = packed()
    assert batch.count == 3
    (value, metrics), gradient = of_batch(batch)
    assert float(value) == 259 * (4 * 0.5 + 3 * 2.0)
    assert float(metrics["tokens"]) == 259 and float(metrics["microbatches"]) == 3
    assert jax.tree.structure(gradient) == jax.tree.structure(PARAMS)
    # In bfloat16 the sum of the microbatches' gradients would be 258 or 260.
    for leaf in jax.tree.leaves(gradient):
        assert leaf.dtype == jnp.float32
        assert set(np.asarray(leaf).flat) == {259.0}


def test_microbatches_without_tokens_are_not_run():
    """Shapes stay those of a fuller batch, and a loss of nothing may be 0/0."""

    def mean_loss(params, microbatch):
        tokens = microbatch.to_rows(jnp.asarray(TOKENS)).sum()
        return params["scale"].sum() * tokens / tokens, {}

    batch = packed()
    padded = dataclasses.replace(
        batch,
        count=jnp.int32(2),
        microbatches=dataclasses.replace(
            batch.microbatches,
            segment_ids=jnp.asarray(batch.microbatches.segment_ids).at[2].set(0),
        ),
    )
    (value, _), gradient = of_batch(padded, mean_loss)
    assert float(value) == 2 * 6.0
    assert gradient["scale"].tolist() == [2.0, 2.0, 2.0]
    assert not gradient["layers"]["0"]["kernel"].any()


@pytest.mark.parametrize("max_tokens", [WIDTH, 2 * WIDTH, 4 * WIDTH])
def test_the_split_into_microbatches_does_not_matter(max_tokens):
    batch = packed(max_tokens=max_tokens)
    (value, metrics), gradient = of_batch(batch)
    assert float(value) == 259 * 8.0
    assert float(metrics["microbatches"]) == int(batch.count)
    assert set(np.asarray(gradient["scale"]).flat) == {259.0}


def test_sums_are_float32_for_one_microbatch_too():
    (value, metrics), gradient = of_batch(packed([1]))
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((value, metrics, gradient))}
    assert dtypes == {jnp.dtype(jnp.float32)}


def test_values_of_the_frozen_weights_count():
    """The proxies of cast weights are zeros; the forward pass reads the weights themselves."""
    wide, narrow = (of_batch(packed(), compute_dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert float(wide[0][0]) == float(narrow[0][0]) == 259 * 8.0


@dataclasses.dataclass(frozen=True)
class Encoder(TrainableVisionEncoder):
    """An encoder whose features are the mean pixel of each image times one trained gain."""

    def encode(self, params, images):
        return (images.pixels.mean((1, 2)) * params["gain"]).astype(jnp.bfloat16)


IMAGES = ImageBatch(
    pixels=jnp.array([3.0, 5.0]).reshape(2, 1, 1, 1),
    patch_positions=jnp.zeros((2, 1, 1, 2), jnp.int32),
    image_ids=jnp.ones((2, 1, 1), jnp.int32),
    feature_order=jnp.arange(2),
)
VISION_PARAMS = {**PARAMS, "vision": {"gain": jnp.float32(2.0), "unused": jnp.float32(1.0)}}


def vision_loss(params, microbatch):
    """sum(tokens) * (feature 0 + 10 * feature 1 + scale 0)"""
    tokens = microbatch.to_rows(jnp.asarray(TOKENS)).sum()
    features = microbatch.image_features[:, 0].astype(jnp.float32)
    return tokens * (features[0] + 10 * features[1] + params["scale"][0]), {"tokens": tokens}


NO_TOWER = VisionEncoder.__new__(VisionEncoder)  # `see` below never reads it


def test_the_vision_encoder_learns_from_all_microbatches():
    batch = dataclasses.replace(packed([1, 2]), images=IMAGES)  # tokens sum to 3
    (value, metrics), gradient = of_batch(
        batch,
        vision_loss,
        VISION_PARAMS,
        eyes=Encoder(NO_TOWER, learning_rate=1e-3),
        compute_dtype="float32",
    )
    assert float(value) == 3 * (3 * 2 + 10 * 5 * 2 + 2.0)
    assert float(metrics["tokens"]) == 3
    # d/d gain = tokens * (3 + 10 * 5)
    assert float(gradient["vision"]["gain"]) == 3 * 53.0
    assert gradient["vision"]["gain"].dtype == jnp.float32
    assert float(gradient["vision"]["unused"]) == 0.0
    assert gradient["scale"].tolist() == [3.0, 0.0, 0.0]
    assert jax.tree.structure(gradient) == jax.tree.structure(VISION_PARAMS)


def test_frozen_weights_of_the_encoder_are_merged_in():
    """Only the gain is trained; `merge_params` brings the weight that the encoder reads beside."""

    @dataclasses.dataclass(frozen=True)
    class WithFrozen(Encoder):
        def encode(self, params, images):
            return images.pixels.mean((1, 2)) * params["gain"] * params["frozen"]

    def merged(params):
        return {**params, "vision": {**params["vision"], "frozen": jnp.float32(4.0)}}

    batch = dataclasses.replace(packed([1, 2]), images=IMAGES)
    params = {**PARAMS, "vision": {"gain": jnp.float32(2.0)}}
    _, gradient = of_batch(
        batch,
        vision_loss,
        params,
        eyes=WithFrozen(NO_TOWER, learning_rate=1e-3),
        merge_params=merged,
        compute_dtype="float32",
    )
    assert {name: float(g) for name, g in gradient["vision"].items()} == {"gain": 3 * 53 * 4.0}


def test_gradients_of_both_passes_are_added():
    total = {"embed": 1.0, "layers": {"0": {"k": 2.0}, "1": {"k": 3.0}}}
    part = {"embed": 10.0, "layers": {"1": {"k": 20.0}}}  # layer stack 0 has no late gradient
    expected = {"embed": 11.0, "layers": {"0": {"k": 2.0}, "1": {"k": 23.0}}}
    assert gradients._tree_sum(total, part) == expected


@dataclasses.dataclass(frozen=True)
class Staged(ForwardSpec):
    """A forward pass in which stages output tokens * embed * sum(kernel of stack 0)."""

    def stage_outputs(self, params, staged, count):
        packed = jax.vmap(jax.vmap(lambda microbatch: microbatch.to_rows(self.tokens)))
        tokens = packed(staged.microbatches)
        hidden = tokens[..., None] * params["embed"] * params["layers"]["0"]["kernel"].sum()
        return schedule.StageOutputs(hidden, {"0": RouterOutputs(tokens[:, :, None, ..., None])})


def test_gradients_of_pipeline_stages_by_hand():
    """Of staged layers, of a layer after them, and of an embedding that both passes read."""
    shape = dataclasses.replace(tiny.SHAPE, num_layers=3).with_stages(2, 1)  # the last one is over
    params = {
        "layers": {
            "0": {"kernel": jnp.array([1.0, 2.0]).reshape(2, 1, 1)},
            "1": {"kernel": jnp.full((1, 1, 1), 5.0)},
        },
        "embed": jnp.float32(2.0),
        "head": jnp.float32(7.0),
    }

    def loss(params, microbatch):
        """sum(hidden) * kernel of stack 1 * head + sum(routes) * embed"""
        hidden, routed = microbatch.stage_outputs
        routes = routed["0"].chosen.sum()  # integers: no gradient goes through them
        value = hidden.sum() * params["layers"]["1"]["kernel"].sum() * params["head"]
        return value + routes * params["embed"], {"tokens": routes}

    # Three microbatches and, to fill the second turn of two stages, one without tokens.
    batch = Packer(WIDTH, 1, stages=2).pack(LENGTHS, np.arange(3), width=WIDTH)
    assert batch.microbatches.rows.shape[0] == 4 and batch.count == 3
    forward = Staged(Network(shape), jnp.asarray(TOKENS))
    with jax.set_mesh(tiny.make_mesh(stage=2)):
        (value, metrics), gradient = jax.jit(
            lambda params, batch: gradients.loss_and_gradients(
                forward, lambda p: p, params, batch, loss, "float32"
            )
        )(params, batch)
    tokens, embed, first, second, head = 259, 2, 3, 5, 7
    assert float(value) == tokens * (embed * first * second * head + embed)
    assert float(metrics["tokens"]) == tokens
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    staged, late = gradient["layers"]["0"]["kernel"], gradient["layers"]["1"]["kernel"]
    assert staged.ravel().tolist() == [tokens * embed * second * head] * 2
    assert late.ravel().tolist() == [tokens * embed * first * head]
    assert float(gradient["head"]) == tokens * embed * first * second
    assert float(gradient["embed"]) == tokens * (first * second * head + 1)
