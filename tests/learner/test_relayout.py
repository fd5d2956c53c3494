"""Weights that move to another mesh keep every bit, and the old ones are freed."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config import LoraConfig, ModelConfig, OptimizerConfig, RLConfig, RLTrainerConfig
from jaxrl_llm.learner import job_models, optimizer, relayout, weights
from jaxrl_llm.learner.weights import (
    FrozenModels,
    LearnerState,
    RewardModel,
    TeacherModel,
    Trainable,
)
from jaxrl_llm.sharding import mesh as mesh_lib

DEVICES = np.array(jax.devices())
SMALL = ModelConfig(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_size=8, mlp_size=16
)
CONFIG = RLConfig(model=SMALL, trainer=RLTrainerConfig(optimizer=OptimizerConfig()))


def sharding(first, last, spec):
    return NamedSharding(Mesh(DEVICES[first:last].reshape(2, -1), ("fsdp", "tensor")), spec)


ARRAY = np.arange(32, dtype=np.float32).reshape(8, 4)
OLD = sharding(0, 4, P("fsdp", "tensor"))


def test_an_array_that_is_in_place_is_not_copied():
    array = jax.device_put(ARRAY, OLD)
    assert relayout._move(array, sharding(0, 4, P("fsdp", "tensor"))) is array


@pytest.mark.parametrize(
    "spec", [P("tensor", "fsdp"), P(), P(("fsdp", "tensor"))], ids=["transposed", "whole", "rows"]
)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_an_array_is_resharded_and_its_old_memory_freed(spec):
    array, target = jax.device_put(ARRAY, OLD), sharding(0, 4, spec)
    moved = relayout._move(array, target)
    assert moved.sharding == target and array.is_deleted()
    np.testing.assert_array_equal(moved, ARRAY)


def test_an_array_moves_to_other_devices():
    array, target = jax.device_put(ARRAY, OLD), sharding(4, 8, P("tensor"))
    moved = relayout._move(array, target)
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, ARRAY)


def models_on(mesh, config=CONFIG, **others):
    """The job's models on one mesh, with some roles on meshes of their own."""
    meshes = dict.fromkeys(("policy", "rollout", "reference", "critic", "reward"), mesh)
    return job_models.make_models(config, meshes | others)


BEFORE, AFTER = tiny.make_mesh(fsdp=2, tensor=2), tiny.make_mesh(fsdp=4)
OTHER = Mesh(tiny.make_mesh(fsdp=8).devices.reshape(-1)[4:].reshape(AFTER.devices.shape),
             AFTER.axis_names, axis_types=AFTER.axis_types)  # fmt: skip


def numbered(abstract):
    """Arrays of different numbers, placed as their abstract values."""
    leaves, structure = jax.tree.flatten(abstract)
    arrays = [
        jax.device_put((np.arange(a.size).reshape(a.shape) + 1000 * i).astype(a.dtype), a.sharding)
        for i, a in enumerate(leaves)
    ]
    return structure.unflatten(arrays)


def values(tree):
    """Copies on the host, which outlive the arrays."""
    return jax.tree.map(lambda a: np.array(a, copy=True), tree)


def assert_moved(moved, before, network, mesh):
    """All bits are the same, and every weight has the training sharding of the mesh."""
    jax.tree.map(np.testing.assert_array_equal, moved, before)
    shardings = job_models.train_shardings(network, mesh)
    for array, expected in zip(jax.tree.leaves(moved), jax.tree.leaves(shardings), strict=True):
        assert array.sharding == expected


def learner_state(models, config=CONFIG):
    """A state in which each array, moments included, holds numbers of its own."""

    transformation = optimizer.make_optimizer(config.trainer.optimizer, config.num_updates)

    def role(abstract, mesh):
        moments = weights.abstract_opt_state(transformation, abstract, mesh)
        return Trainable(
            numbered(abstract), numbered(moments), mesh_lib.replicate_host_value(np.int32(7), mesh)
        )

    mesh, critic_mesh = models.mesh, models.meshes["critic"]
    return LearnerState(
        policy=role(weights.abstract_trained(models.policy, mesh), mesh),
        critic=role(weights.abstract_params(models.value, critic_mesh), critic_mesh),
        cost_critic=role({}, critic_mesh),
        kl_coef=mesh_lib.replicate_host_value(np.float32(0.25), mesh),
        log_multiplier=mesh_lib.replicate_host_value(np.float32(-1.5), mesh),
    )


@pytest.mark.parametrize("critic_mesh", [AFTER, OTHER], ids=["together", "critic elsewhere"])
def test_the_learner_state_moves_with_its_moments(critic_mesh):
    state, models = learner_state(models_on(BEFORE)), models_on(AFTER, critic=critic_mesh)
    before = values(state)
    moved = relayout.relayout_state(CONFIG, models, state)
    jax.tree.map(np.testing.assert_array_equal, moved, before)
    assert_moved(moved.policy.params, before.policy.params, models.policy, AFTER)
    assert_moved(moved.critic.params, before.critic.params, models.value, critic_mesh)
    assert moved.cost_critic.params == {}  # a role without a model stays one
    for role, mesh in ((moved.policy, AFTER), (moved.critic, critic_mesh)):
        on_mesh = {
            array.sharding.mesh == mesh
            for array in jax.tree.leaves((role.opt_state, role.num_updates))
        }
        assert on_mesh == {True}
    # The moments of a weight are split as the weight.
    splits = {array.sharding.spec for array in jax.tree.leaves(moved.policy.opt_state)}
    assert splits >= {array.sharding.spec for array in jax.tree.leaves(moved.policy.params)}


def test_only_adapters_are_state_with_lora():
    config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2))
    state = learner_state(models_on(BEFORE, config), config)
    before = values(state)
    moved = relayout.relayout_state(config, models_on(AFTER, config), state)
    jax.tree.map(np.testing.assert_array_equal, moved, before)
    assert {array.sharding.mesh for array in jax.tree.leaves(moved.policy.params)} == {AFTER}


def frozen_models(models, *, shared):
    base = numbered(weights.abstract_params(models.policy, models.mesh))
    reference = base if shared else numbered(
        weights.abstract_params(models.policy, models.meshes["reference"])
    )  # fmt: skip
    score = numbered(weights.abstract_params(models.value, models.meshes["reward"]))
    teacher = numbered(weights.abstract_params(models.policy, models.meshes["reward"]))
    return FrozenModels(
        reference,
        base if shared else {},
        {"helpful": RewardModel(models.value, score)},
        {"large": TeacherModel(models.policy, teacher)},
    )


def test_frozen_models_move_to_the_meshes_of_their_roles():
    frozen = frozen_models(models_on(BEFORE), shared=False)
    before = values(
        (frozen.reference, frozen.scorers["helpful"].params, frozen.teachers["large"].params)
    )
    models = models_on(AFTER, reward=OTHER)
    moved = relayout.relayout_frozen(CONFIG, models, frozen)
    assert moved.base_params == {}
    assert_moved(moved.reference, before[0], models.policy, AFTER)
    scorer, teacher = moved.scorers["helpful"], moved.teachers["large"]
    assert_moved(scorer.params, before[1], models.value, OTHER)
    assert_moved(teacher.params, before[2], models.policy, OTHER)
    assert isinstance(scorer, RewardModel) and isinstance(teacher, TeacherModel)


@pytest.mark.parametrize("reference_mesh", [AFTER, OTHER], ids=["together", "reference elsewhere"])
def test_a_shared_reference_stays_shared_where_it_can(reference_mesh):
    """With LoRA the reference is the base: one copy on one mesh, two on two meshes."""
    config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2))
    frozen = frozen_models(models_on(BEFORE, config), shared=True)
    before = values(frozen.base_params)
    models = models_on(AFTER, config, reference=reference_mesh)
    moved = relayout.relayout_frozen(config, models, frozen)
    assert (moved.reference is moved.base_params) == (reference_mesh is AFTER)
    assert_moved(moved.base_params, before, models.policy, AFTER)
    assert_moved(moved.reference, before, models.policy, reference_mesh)
