"""Layers of checkpoints for other pipeline stages: layer n holds the number n, before and after."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.learner import layer_restacking
from jaxrl_llm.models.architecture import Experts, LayerType

MESH = tiny.make_mesh(stage=2, fsdp=2)
DENSE = dataclasses.replace(tiny.SHAPE, num_layers=7)
WINDOWS = dataclasses.replace(
    tiny.SHAPE, num_layers=10, layers=(LayerType(window=4), LayerType()) * 5
)  # two stacks, in a pattern of two layers
MIXED = dataclasses.replace(
    tiny.SHAPE,
    num_layers=6,
    layers=(LayerType(), *(LayerType(experts=True),) * 5),
    experts=Experts(4, 2, 16),
)
SHAPES = {"dense": DENSE, "windows": WINDOWS, "mixed": MIXED}
LAYOUTS = [(1, 1), (2, 1), (2, 2)]  # stages, rounds


def network_arrays(layer_numbers, make):
    """Stacks [L, 4] and [L, 4, 2] of `make(layer layers_by_stack, shape of a layer)`, and no
    layers.
    """
    return {
        "embed": {"weight": make([90], (4,))},
        "layers": {
            name: {"norm": make(numbers, (4,)), "mlp": {"kernel": make(numbers, (4, 2))}}
            for name, numbers in layer_numbers.items()
        },
    }


def abstract(layer_numbers):
    def array(numbers, shape):
        spec = P("stage" if len(numbers) % 2 == 0 else None, "fsdp")
        sharding = NamedSharding(MESH, spec)
        return jax.ShapeDtypeStruct((len(numbers), *shape), jnp.float32, sharding=sharding)

    return network_arrays(layer_numbers, array)


def numbered(layer_numbers):
    def array(numbers, shape):
        stacked = np.asarray(numbers, np.float32).reshape(-1, *(1 for _ in shape))
        return np.broadcast_to(stacked, (len(numbers), *shape))

    return network_arrays(layer_numbers, array)


def checkpoint(extra, saved_numbers):
    """`read` of a checkpoint with a policy, its moments, and a step, each array of layer numbers.

    Fails if an array is asked for in another shape than it was saved in.
    """
    arrays = {
        "policy": numbered(saved_numbers),
        "moments": (numbered(saved_numbers),),
        "step": np.int32(3),
    }

    def read(make_abstract):
        asked = make_abstract(extra)
        assert jax.tree.structure(asked) == jax.tree.structure(arrays)

        def restored(like, array):
            assert like.shape == array.shape
            return jax.device_put(array, like.sharding)

        return jax.tree.map(restored, asked, arrays), extra, 12, "more"

    return read


def target(shape):
    numbers = layer_restacking.layers_by_stack(shape)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(MESH, P()))
    return {"policy": abstract(numbers), "moments": (abstract(numbers),), "step": step}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("current", LAYOUTS)
def test_every_layer_is_restored_to_its_place(name, saved, current):
    saved_numbers = layer_restacking.layers_by_stack(SHAPES[name].with_stages(*saved))
    shape = SHAPES[name].with_stages(*current)
    wanted = target(shape)
    read = checkpoint({layer_restacking.LAYERS_KEY: saved_numbers}, saved_numbers)
    tree, extra, *rest = layer_restacking.restore_restacked(read, wanted, shape)
    assert rest == [12, "more"] and extra == {layer_restacking.LAYERS_KEY: saved_numbers}
    for network in (tree["policy"], *tree["moments"]):
        jax.tree.map(
            np.testing.assert_array_equal,
            network,
            numbered(layer_restacking.layers_by_stack(shape)),
        )
    assert int(tree["step"]) == 3
    # Arrays come in the layout of this run, whatever they were read in.
    for array, like in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
        assert array.sharding.is_equivalent_to(like.sharding, array.ndim)


def test_checkpoints_without_recorded_layers_have_no_stages():
    shape = DENSE.with_stages(2, 2)
    tree, *_ = layer_restacking.restore_restacked(
        checkpoint({}, {"0": list(range(7))}), target(shape), shape
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        tree["policy"],
        numbered(layer_restacking.layers_by_stack(shape)),
    )


def test_numbers_by_hand():
    # Rounds x stages: layers 0 and 2 are of stage 0, 1 and 3 of stage 1; three layers are over.
    numbers = layer_restacking.layers_by_stack(DENSE.with_stages(2, 2))
    assert numbers == {"0": [0, 2, 1, 3], "1": [4, 5, 6]}
    assert layer_restacking.layers_by_stack(DENSE) == {"0": list(range(7))}


def test_the_saved_dtype_and_memory_stay_those_of_the_run():
    """Layers rest where this run's rest; only their split over stages differs from the target."""
    shape, saved = DENSE.with_stages(2, 1), layer_restacking.layers_by_stack(DENSE)
    host = abstract(layer_restacking.layers_by_stack(shape))
    host = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, jnp.bfloat16, sharding=a.sharding.with_memory_kind("unpinned_host")
        ),
        host,
    )
    asked = layer_restacking._abstract_as_saved(
        saved, layer_restacking.layers_by_stack(shape), host["layers"]
    )
    kernel = asked["0"]["mlp"]["kernel"]
    assert kernel.shape == (7, 4, 2) and kernel.dtype == jnp.bfloat16
    assert kernel.sharding.memory_kind == "unpinned_host"
    assert kernel.sharding.spec == P(None, "fsdp")
