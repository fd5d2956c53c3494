"""The programs of a run, lowered and compiled without weights: devices need not be present.

They are made by the functions that the loop uses, from shapes and shardings instead of arrays. All
sequences are as long as the run allows: the compiler's memory is the most that a step can need.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import ConfigError, OptimizerConfig, RLConfig
from jaxrl_llm.data import packing
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.data.packing import PackedBatch
from jaxrl_llm.learner import absent, batches, distillation, optimizer, predict, update, wide
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import sampler as sampler_lib
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.gallery import FEWEST, Gallery
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.weights import LearnerState, Trainable
from jaxrl_llm.models import lora, patches
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.planning import memory
from jaxrl_llm.planning.fit import Plan
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Minibatch


def abstract_models(config: RLConfig, shape: Shape, devices: Sequence[Any]) -> Models:
    """Returns the models of a run on devices that may be absent (`jax.experimental.topologies`).

    No folder is read and the tokenizer is not the run's. Sizes and placement of the config are
    chosen (`planned.chosen`). `shape` is of policy, reference and critic.

    Raises:
      ConfigError: If the mesh does not fit the devices.
    """
    meshes = models_lib.role_meshes(config, devices)
    models = models_lib.build(config, meshes, tokenizer_lib.character_tokenizer(), shape, (0,))
    if shape.vision is None:
        return models
    whole = dataclasses.replace(models.policy, shape=shape)
    absent_files: Any = None  # no image is read
    gallery = Gallery(whole.tower, absent_files, models.mesh, dict, config.trains_vision_tower)
    return dataclasses.replace(models, gallery=gallery)


def abstract_state(config: RLConfig, models: Models) -> LearnerState:
    """Returns the learner state of a run as shapes, dtypes and shardings."""
    needed = needs.of(config.algorithm)
    number = _array(models, (), jnp.float32)

    def trainable(params: Params, of: OptimizerConfig) -> Trainable:
        transformation = optimizer.make(of, config.num_updates)
        opt_state = weights_lib.abstract_optimizer(transformation, params, models.mesh)
        return Trainable(params, opt_state, _array(models, (), jnp.int32))

    critic = weights_lib.abstract_params(models.value, models.meshes["critic"])
    return LearnerState(
        policy=trainable(
            weights_lib.abstract_trained(models.policy, models.mesh), config.trainer.optimizer
        ),
        critic=trainable(critic if needed.critic else {}, config.critic.optimizer),
        cost_critic=trainable(critic if needed.cost_critic else {}, config.critic.optimizer),
        kl_coef=number,
        log_multiplier=number,
    )


def lowered(config: RLConfig, models: Models) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns by name the functions that lower each program of the run.

    `prefill`, `decode` (one chunk with the widest window), `score` (policy or reference),
    `score_critic` (absent without a critic), `train` (one optimizer update of all learners),
    `reshard` (the ends, the largest of its programs), `reshard_layer`, and `tower`, which reads
    images (absent for models of text).
    """
    state = abstract_state(config, models)
    base = weights_lib.abstract_params(models.policy, models.mesh) if config.lora.rank else {}
    policy = lora.joined(base, state.policy.params)
    everything = config.sequences_per_step
    of_policy, of_critic = predict.scoring_programs(config, models)
    batch = abstract_batch(config, models)
    sampler = sampler_lib.build(config, models, base)
    engine, resharder = sampler.engine, sampler.resharder
    rollout_params = resharder.abstract()

    def within_mesh(make: Callable[[], jax.stages.Lowered]) -> jax.stages.Lowered:
        with jax.set_mesh(models.mesh), absent.platforms_known():
            return make()

    def train():
        updater = update.updater(config, models, base, state)
        learners = updater.learners(state, models.mesh)
        packed = abstract_packed(config, models, config.minibatch_size)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return updater.program.lower(learners, base, batch, packed, key, train_policy=True)

    def score(program, *params: Params, **choices):
        packed = abstract_packed(config, models, everything)
        return program.lower(*params, batch.tokens, batch.lengths, packed, **choices)

    reshard = resharder.lowered(policy)
    programs: dict[str, Callable[[], jax.stages.Lowered]] = {
        "prefill": lambda: engine.jitted.lower_prefill(
            rollout_params,
            config.trainer.prompts_per_step,
            config.data.max_prompt_tokens,
            0 if models.gallery is None else models.gallery.tower.out_size,
        ),
        "decode": lambda: engine.jitted.lower_generate(rollout_params),
        "score": lambda: score(of_policy, base, state.policy.params, entropy="value"),
        "score_critic": lambda: score(of_critic, state.critic.params),
        "train": train,
        "reshard": reshard["ends"],
        "reshard_layer": list(reshard.values())[-1],  # experts, if there are any, come last
    }
    if models.gallery is not None:
        programs["tower"] = functools.partial(_read, config, models, models.gallery)
    if not state.critic.params:
        del programs["score_critic"]
    return {name: functools.partial(within_mesh, make) for name, make in programs.items()}


def updates(
    learn: update.Updater, state: LearnerState, batch: Any, packed: PackedBatch, train_policy: bool
) -> list[Callable[[], jax.stages.Lowered]]:
    """Returns what lowers the program of each mesh that has learners.

    Of `state` and `batch` only shapes are read; that of the batch is placed as `Updater.spread`
    does.
    """

    def lower(mesh: Mesh, program: Any) -> jax.stages.Lowered:
        mine = learn.learners(state, mesh)
        base = learn.base if "policy" in mine else {}
        placed = lambda a: jax.ShapeDtypeStruct(  # noqa: E731
            a.shape, a.dtype, sharding=mesh_lib.replicated(mesh)
        )
        of_step = jax.tree.map(placed, batch), packed, jax.random.key(0)
        with jax.set_mesh(mesh):
            return program.lower(mine, base, *of_step, train_policy=train_policy)

    return [functools.partial(lower, *each) for each in learn.programs.items()]


def abstract_packed(config: RLConfig, models: Models, num_chosen: int) -> PackedBatch:
    """Returns the shapes of so many sequences of a step in rows, each as long as may be."""
    width, count = config.max_sequence_tokens, config.sequences_per_step
    prompt = config.data.max_prompt_tokens
    of_responses = np.tile(np.arange(width) >= prompt, (count, 1))
    packed = models_lib.packer(config, models.meshes, models.policy).pack(
        np.full(count, width),
        np.arange(num_chosen),
        width=width,
        scored=batches.EVERY_TOKEN if models.mesh.shape["sequence"] > 1 else of_responses,
        common=packing.Beginnings(
            np.arange(count) // config.algorithm.samples_per_prompt, np.full(count, prompt)
        ),
    )
    packed = jax.tree.map(lambda a: _array(models, np.shape(a), a.dtype), packed)
    widths = distillation.widths(config)
    if config.router.replay != "off":
        widths["routes"] = models.policy.num_routes
    if models.gallery is not None:
        widths |= {"parts": 3, "seen": 1}
        packed = _with_images(config, models, models.gallery, packed, num_chosen)
    return wide.abstract(packed, models.mesh, **widths)


def _with_images(
    config: RLConfig, models: Models, gallery: Gallery, packed: PackedBatch, num_chosen: int
) -> PackedBatch:
    """Returns the shapes of a batch whose prompts are images alone, one each."""
    tower, dims = gallery.tower, config.data.max_prompt_tokens
    size = packing.bucket(config.trainer.prompts_per_step * dims, smallest=FEWEST)
    vectors = _array(models, (size, tower.out_size), jnp.dtype(tower.compute_dtype))
    packed = dataclasses.replace(packed, vectors=vectors)
    if not gallery.learns:
        return packed
    width = patches.width(dims * tower.vision.merge_size**2)
    rows, most = mesh_lib.row_shards(models.mesh)[0], max(1, patches.TOGETHER // width)
    images = max(1, num_chosen // config.algorithm.samples_per_prompt)
    rows *= packing.bucket(min(-(-images // rows), most), largest=most)
    shape = packing.bucket(-(-images // rows)), rows, width

    def split(last: tuple[int, ...], dtype: Any) -> Any:
        sizes = shape + last
        names = (None, "batch", *[None] * (len(sizes) - 2))
        return jax.ShapeDtypeStruct(
            sizes, dtype, sharding=mesh_lib.sharding_of(sizes, names, models.mesh)
        )

    shown = packing.Shown(
        split((tower.vision.patch_dims,), jnp.float32),
        split((2,), jnp.int32),
        split((), jnp.int32),
        _array(models, (size,), jnp.int32),
    )
    return dataclasses.replace(packed, shown=shown)


def _read(config: RLConfig, models: Models, gallery: Gallery) -> jax.stages.Lowered:
    """Returns the program that reads the largest images of a run, for the engine."""
    vision, mesh = gallery.tower.vision, models.mesh
    width = max(patches.MOST, patches.width(config.data.max_prompt_tokens * vision.merge_size**2))
    shape = mesh_lib.row_shards(mesh)[0], width
    params = weights_lib.abstract_tower(gallery.tower, models.policy, mesh)
    pixels = _array(models, (*shape, vision.patch_dims), jnp.float32)
    places, images = (_array(models, shape + last, jnp.int32) for last in ((2,), ()))
    return gallery.read.lower(params, pixels, places, images)


def abstract_batch(config: RLConfig, models: Models, width: int = 0) -> Minibatch:
    """Returns the shapes of all sequences of a step as the update reads them.

    `width` is their T; 0: the most tokens that a sequence may have.
    """
    table = config.sequences_per_step, width or config.max_sequence_tokens
    shapes = jax.eval_shape(lambda: Minibatch.zeros(*table))
    return jax.tree.map(lambda a: _array(models, a.shape, a.dtype), shapes)


def _array(models: Models, shape: tuple[int, ...], dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.replicated(models.mesh))


@dataclasses.dataclass(frozen=True)
class Report:
    """What one program needs as the compiler says, in bytes on each device."""

    arguments: int
    outputs: int
    aliased: int  # of the outputs: they reuse the memory of donated arguments
    temporary: int
    host: int  # arguments, outputs and temporaries in host memory
    lower_s: float
    compile_s: float

    @property
    def total(self) -> int:
        """Bytes of device memory that the program needs while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporary


class Refused(Exception):
    """The compiler says that a program cannot fit; the first line of its message."""


def compile_report(lower: Any) -> Report:
    """Returns what one of the programs of `lowered` needs; raises Refused if it cannot fit."""
    start = time.perf_counter()
    program = lower()
    middle = time.perf_counter()
    try:
        stats = program.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        raise Refused(str(error).splitlines()[0]) from error
    return Report(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
        lower_s=middle - start,
        compile_s=time.perf_counter() - middle,
    )


def compiled_bytes(plan: Plan, devices: Sequence[Any] | str) -> dict[str, float | str]:
    """Returns the bytes on a device while each program runs, or why the compiler refuses it.

    The program's own are the compiler's, what lies beside it is as in the analytic plan. Raises
    ConfigError if the devices are only named, not known to a compiler, or form several pools.
    """
    if len(plan.pools) > 1:
        raise ConfigError(
            "--compile: programs of several pools are not compiled; use placement.choice=colocate"
        )
    if isinstance(devices, str):
        devices = absent.named(devices, plan.num_devices)
    setting = plan.setting
    models = abstract_models(setting.config, setting.policy, list(devices))
    own = memory.programs(setting)
    found: dict[str, float | str] = {}
    for name, lower in lowered(setting.config, models).items():
        logging.info("compiling %s", name)
        beside = plan.programs[name].total - own[name].total
        try:
            found[name] = compile_report(lower).total + beside
        except Refused as error:
            found[name] = str(error)
    return found
