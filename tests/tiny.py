"""A network small enough for every test, and its weights on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models import mixed_precision
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.cpu_kernels import matmuls as cpu_kernels
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding.reshard import Resharder

SHAPE = Architecture(
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
    count = (
        config.stage * config.data * config.fsdp * config.expert * config.sequence * config.tensor
    )
    return mesh_lib.make_mesh(config, jax.devices()[:count])


@functools.cache
def params(network=NETWORK, seed=0, scale=8.0):
    """Returns random weights that make some tokens much likelier than others, biases too."""
    weights = jax.jit(network.init)(jax.random.key(seed))
    leaves, structure = jax.tree.flatten(weights)
    random = np.random.default_rng(seed)
    noise = [random.standard_normal(a.shape, np.float32) * 0.02 * scale for a in leaves]
    return structure.unflatten([np.asarray(a) + n for a, n in zip(leaves, noise, strict=True)])


def sharded(weights, mesh, network=NETWORK):
    """Returns weights in the training layout."""
    shardings = mesh_lib.shardings(
        network.abstract_params(),
        network.logical_axes(),
        mesh,
        mesh_lib.TRAIN,
        network.sharding_units,
    )
    # A copy: what is donated later must not be the caller's.
    return jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=shardings)(weights)


def resharder(mesh, network=NETWORK, dtype="float32", layout="tensor", rollout=None):
    """Args: rollout: The network that decodes, if not `network`."""
    rollout = rollout or network
    stacks = network.shape.layer_stacks
    return Resharder(
        network.abstract_params(),
        network.logical_axes(),
        network.sharding_units,
        mesh,
        functools.partial(mixed_precision.cast_dtypes, dtype=dtype),
        layout,
        {name: stack.layer_indices for name, stack in stacks.items()},
        lambda name, layer: rollout.to_stored_layout(layer, stacks[name].layer),
        rollout.logical_axes(),
    )


def rollout_params(weights, mesh, network=NETWORK, **settings):
    """Returns training weights in the rollout layout."""
    mover = resharder(mesh, network, **settings)
    with jax.set_mesh(mesh):
        return mover.reshard(mover.zeros(), sharded(weights, mesh, network))


@functools.cache
def hidden_states(network):
    """Returns the function that `forward` is without router outputs."""
    return lambda *args, **named: network.forward(*args, **named)[0]


@functools.partial(jax.jit, static_argnums=2)
def teacher_forced(tokens, temperature, network, weights):
    """Returns [B, T] log-probs of right-padded rows from one pass over each; column 0 is 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = hidden_states(network)(weights, tokens, positions, jnp.ones_like(tokens))
    logits = network.logits(weights, hidden) / temperature[:, None, None]
    log_p = jax.nn.log_softmax(logits)[:, :-1]
    return jnp.pad(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0], ((0, 0), (1, 0)))


def with_sizes(network=NETWORK, **sizes):
    return dataclasses.replace(network, shape=dataclasses.replace(network.shape, **sizes))


# Wide enough for kernels by outputs, and as it decodes then.
WIDE = with_sizes(hidden_size=256, num_kv_heads=4, head_size=64, mlp_size=320)
WIDE_FIRST = dataclasses.replace(WIDE, matmuls=cpu_kernels.WEIGHT_FIRST)


@dataclasses.dataclass(frozen=True)
class HostDevice:
    """A device of a host that is not there."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def hosts(num_hosts, num_devices):
    """The devices of several hosts, host by host, for meshes on which nothing runs."""
    return [HostDevice(i, i // num_devices) for i in range(num_hosts * num_devices)]
