"""A network small enough for every test, and its weights on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding.reshard import Resharder

SHAPE = Shape(
    family="qwen2",
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    mlp_size=48,
    qkv_bias=True,
)
NETWORK = Network(SHAPE)


def make_mesh(**sizes: int):
    """Returns a mesh of as many of the fake devices as the sizes multiply to."""
    config = MeshConfig(**{"fsdp": 1, **sizes})
    count = config.data * config.fsdp * config.sequence * config.tensor
    return mesh_lib.make_mesh(config, jax.devices()[:count])


def params(network=NETWORK, seed=0, scale=8.0):
    """Returns random weights that make some tokens much likelier than others, biases too."""
    weights = network.init(jax.random.key(seed))
    leaves, structure = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noise = [jax.random.normal(k, a.shape) * 0.02 for k, a in zip(keys, leaves, strict=True)]
    return jax.tree.map(lambda a, n: a + n * scale, weights, structure.unflatten(noise))


def sharded(weights, mesh, network=NETWORK):
    """Returns weights in the training layout."""
    shardings = mesh_lib.shardings(
        network.abstract(), network.logical_axes(), mesh, mesh_lib.TRAIN, network.units
    )
    return jax.device_put(weights, shardings)


def resharder(mesh, network=NETWORK, dtype="float32", layout="tensor"):
    return Resharder(
        network.abstract(), network.logical_axes(), network.units, mesh, dtype, layout
    )


def rollout_params(weights, mesh, network=NETWORK, **settings):
    """Returns training weights in the rollout layout."""
    mover = resharder(mesh, network, **settings)
    with jax.set_mesh(mesh):
        return mover.reshard(mover.empty(), sharded(weights, mesh, network))


def teacher_forced(sequence, temperature, weights, network=NETWORK):
    """Returns log-probs of tokens 1, 2, ... of one sequence from one pass over all of it."""
    tokens = jnp.asarray(sequence)[None]
    ones = jnp.ones_like(tokens)
    hidden = network.hidden(weights, tokens, jnp.arange(tokens.shape[1])[None], ones)
    log_p = jax.nn.log_softmax(network.logits(weights, hidden)[0] / (temperature or 1.0))
    return jnp.take_along_axis(log_p[:-1], tokens[0, 1:, None], -1)[:, 0]


def with_sizes(network=NETWORK, **sizes):
    return dataclasses.replace(network, shape=dataclasses.replace(network.shape, **sizes))
