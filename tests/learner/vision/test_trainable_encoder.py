"""A tower that learns: its vectors, its gradient, its rate, its adapters, on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pictured import CONFIG, ONE_DEVICE, on, sampled

from jaxrl_llm.config import LoraConfig, MeshConfig
from jaxrl_llm.config.learner import OptimizerConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.learner import job_models, predict, update
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.vision import trainable_encoder
from jaxrl_llm.models import lora
from jaxrl_llm.packing import token_fields
from jaxrl_llm.sampling import policy_sampler

# Adam divides by the gradient's size: with the usual eps one that is rounding alone would count.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-3)
LEARNS = dataclasses.replace(
    CONFIG, trainer=dataclasses.replace(CONFIG.trainer, tower_learning_rate=3e-2)
)


def batch(models, rollouts):
    """Returns sampled sequences as an update of the policy gets them, in several microbatches."""
    packed = models.packer.pack_rollouts(rollouts)
    assert packed.microbatches.rows.shape[0] > 1 or models.mesh.size > 1
    packed = token_fields.with_fields(
        packed, models.mesh, **models.image_feature_cache.rollout_token_fields(rollouts)
    )
    return models.image_feature_cache.with_rollout_images(packed, rollouts)


def loss_of(config, models, rollouts, base=None):
    """Returns the negative log-likelihood of sampled tokens in a microbatch."""

    def loss(params, microbatch):
        whole, tokens = lora.combine_params(base or {}, params), jnp.asarray(rollouts.tokens)
        outputs = predict.ForwardSpec(models.policy, tokens).run(whole, microbatch)
        settings = {"temperature": 1.0, "chunk": config.model.vocab_chunk}
        found = outputs.token_statistics(entropy="none", **settings)
        width = rollouts.tokens.shape[1]
        unpacked = microbatch.to_sequences(found.log_probs, jnp.asarray(rollouts.lengths), width)
        own = microbatch.take(jnp.asarray(rollouts.response_mask))
        return -jnp.where(own, unpacked, 0.0).sum() / 100, {}

    return loss


@functools.cache
def updated(mesh=ONE_DEVICE, rank=0):
    """Returns the models, weights before and after an update, its metrics, and the batch."""
    config = dataclasses.replace(LEARNS, lora=LoraConfig(rank=rank))
    config, models, params = on(mesh, config)
    models.image_feature_cache.update_params(params["vision"])
    _, rollouts = sampled()
    packed = batch(models, rollouts)
    trained, base = weights_lib.split_trainable(config, models.policy, models.mesh, params)
    state = weights_lib.make_trainable(trained, OPTIMIZER, 1, models.mesh)
    before = jax.device_get(trained)
    reader = predict.ForwardSpec(
        models.policy,
        jnp.asarray(rollouts.tokens),
        vision_encoder=trainable_encoder.make_vision_encoder(config, models.policy),
    )
    with jax.set_mesh(models.mesh):
        after, found = jax.jit(
            lambda state, base, packed: update.optimizer_step(
                state, OPTIMIZER, 1, packed, reader, loss_of(config, models, rollouts, base),
                "float32", "x", merge_params=functools.partial(lora.combine_params, base),
            )
        )(state, base, packed)  # fmt: skip
    return config, models, before, (after, base), found, packed


@pytest.mark.slow
def test_the_learner_sees_what_the_engine_sees_and_its_gradient_is_that_of_the_whole():
    config, models, before, _, found, packed = updated()
    _, rollouts = sampled()
    sees, loss = (
        trainable_encoder.make_vision_encoder(config, models.policy),
        loss_of(config, models, rollouts),
    )
    vectors = sees.with_image_features(before, packed).image_features
    # Rows of other widths: rounding alone.
    np.testing.assert_allclose(vectors, packed.image_features, atol=1e-5)
    assert np.abs(vectors).max() > 1e-3 and packed.images.pixels.shape[2] == 256

    one = jax.jit(
        jax.grad(lambda p, packed, i: loss(p, sees.with_image_features(p, packed).microbatch(i))[0])
    )
    parts = [one(before, packed, i) for i in range(int(packed.count))]
    total = jax.tree.map(lambda *gradients: sum(gradients), *parts)
    norm = lambda tree: np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(tree)))  # noqa: E731
    assert norm(total["vision"]) > 1e-4
    assert float(found["x/grad_norm/vision"]) == pytest.approx(norm(total["vision"]), rel=1e-4)
    assert float(found["x/grad_norm"]) == pytest.approx(norm(total), rel=1e-4)


@pytest.mark.slow
def test_the_tower_moves_at_its_own_rate_and_a_frozen_one_has_no_state():
    _, models, before, (after, _), _, _ = updated()
    # AdamW's first step is at most the rate, for numbers whose gradient is far above eps nearly it.
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after.params, before)
    assert 1e-3 < max(jax.tree.leaves(moved["layers"])) < 1.1e-2
    assert 1.1e-2 < max(jax.tree.leaves(moved["vision"])) < 3.3e-2
    _, models, params = on(ONE_DEVICE)
    assert "vision" not in params and "vision" not in models.value.abstract_params()
    state = weights_lib.make_trainable(params, OPTIMIZER, 1, models.mesh)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(
        weights_lib.make_trainable(
            {k: v for k, v in after.params.items() if k != "vision"}, OPTIMIZER, 1, models.mesh
        ).opt_state
    )


@pytest.mark.slow
def test_eight_devices_take_the_update_of_one():
    wanted, metrics = updated()[3][0], updated()[4]
    _, _, _, (after, _), found, _ = updated(MeshConfig(data=2, fsdp=2, tensor=2))
    assert float(found["x/grad_norm"]) == pytest.approx(float(metrics["x/grad_norm"]), abs=1e-5)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=2e-5)


@pytest.mark.nightly
def test_adapters_of_decoder_and_tower():
    config, models, before, (after, base), _, packed = updated(rank=2)
    layers = before["vision"]["layers"]
    assert set(layers["q"]) == {"lora_a", "lora_b"} and set(layers["mlp"]) == {"gate", "up", "down"}
    assert set(before["vision"]) == {"layers"} and set(before) == {"layers", "vision"}
    for tree in (
        after.params["vision"]["layers"]["q"],
        after.params["layers"]["0"]["attention"]["q"],
    ):
        assert np.abs(tree["lora_b"]).max() > 1e-4
    # The engine's tower has the adapters too.
    sampler = policy_sampler.make_sampler(config, models, base)
    assert "vision" not in sampler.weights(after.params)
    _, rollouts = sampled()
    vectors = models.image_feature_cache.rollout_token_fields(rollouts)["image_features"]
    assert np.abs(vectors - packed.image_features).max() > 1e-4
    whole = lora.combine_params(base, after.params)
    seen = (
        trainable_encoder.make_vision_encoder(config, models.policy)
        .with_image_features(whole, packed)
        .image_features
    )
    np.testing.assert_allclose(seen, vectors, atol=1e-5)
    merged = jax.jit(job_models.adapter_merger(config.lora))(whole)
    seen = (
        trainable_encoder.make_vision_encoder(config, models.policy)
        .with_image_features(merged, packed)
        .image_features
    )
    np.testing.assert_allclose(seen, vectors, atol=1e-5)


def test_a_model_of_text_has_no_tower_to_train():
    text = dataclasses.replace(LEARNS.model, family="qwen2")
    with pytest.raises(
        ConfigError, match=r"tower_learning_rate: 0.03, but the model reads no images"
    ):
        job_models.make_models(dataclasses.replace(LEARNS, model=text))
