"""Lowers and compiles the programs of a run without weights, for devices that may be absent.

They come from the functions that the loop itself uses, with shapes and shardings instead of arrays.
All sequences have the maximum length, so the compiler's memory is the worst case of a step.
"""

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import ConfigError, OptimizerConfig, RLConfig
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.learner import batches, distillation, job_models, optimizer, predict, update
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.vision.feature_cache import MIN_FEATURES, ImageFeatureCache
from jaxrl_llm.learner.weights import LearnerState, Trainable
from jaxrl_llm.models import lora
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.models.vision import patches
from jaxrl_llm.packing import packed_batch, token_fields
from jaxrl_llm.packing.packed_batch import PackedBatch
from jaxrl_llm.planning import compile_only_devices, memory
from jaxrl_llm.planning.compiler_clock import ProgramTime, TpuRates, program_time, tpu_rates
from jaxrl_llm.planning.memory_plan import MemoryPlan
from jaxrl_llm.rollout.engine_api import PrecompiledEngine
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Minibatch


def abstract_models(config: RLConfig, shape: Architecture, devices: Sequence[Any]) -> Models:
    """The models of a run on devices that may be absent (`jax.experimental.topologies`).

    Reads no folder; the tokenizer is a stand-in. Sizes and placement of the config must be resolved
    (`planned.choose_sizes`). `shape` is that of policy, reference and critic.

    Raises:
      ConfigError: If the mesh does not fit the devices.
    """
    meshes = job_models.role_meshes(config, devices)
    models = job_models.build_models(
        config, meshes, tokenizer_lib.character_tokenizer(), shape, (0,)
    )
    if shape.vision is None:
        return models
    network = dataclasses.replace(models.policy, shape=shape)
    no_loader: Any = None  # no image is read
    gallery = ImageFeatureCache(
        network.vision_encoder, no_loader, models.mesh, dict, config.trains_vision_tower
    )
    return dataclasses.replace(models, image_feature_cache=gallery)


def abstract_state(config: RLConfig, models: Models) -> LearnerState:
    """The learner state of a run as shapes, dtypes and shardings."""
    needed_models = requirements.requirements(config.algorithm)
    scalar = _abstract_array(models, (), jnp.float32)

    def trainable(params: Params, optimizer_config: OptimizerConfig) -> Trainable:
        transformation = optimizer.make_optimizer(optimizer_config, config.num_updates)
        opt_state = weights_lib.abstract_opt_state(transformation, params, models.mesh)
        return Trainable(params, opt_state, _abstract_array(models, (), jnp.int32))

    critic = weights_lib.abstract_params(models.value, models.meshes["critic"])
    return LearnerState(
        policy=trainable(
            weights_lib.abstract_trained(models.policy, models.mesh), config.trainer.optimizer
        ),
        critic=trainable(critic if needed_models.critic else {}, config.critic.optimizer),
        cost_critic=trainable(critic if needed_models.cost_critic else {}, config.critic.optimizer),
        kl_coef=scalar,
        log_multiplier=scalar,
    )


def program_lowerings(
    config: RLConfig, models: Models
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Functions that lower each program of the run, by name.

    `prefill`, `decode` (one chunk with the widest window), `score` (policy or reference),
    `score_critic` (absent without a critic), `train` (one optimizer update of all learners),
    `reshard` (embedding and head, its largest program), `reshard_layer`, and `vision_encoder`, the
    vision encoder (absent for text models).
    """
    state = abstract_state(config, models)
    base = weights_lib.abstract_params(models.policy, models.mesh) if config.lora.rank else {}
    policy = lora.combine_params(base, state.policy.params)
    batch = abstract_batch(config, models)
    sampler = policy_sampler.make_sampler(config, models, base)
    engine, resharder = sampler.engine, sampler.resharder
    sampling: Mapping[str, Callable[[], jax.stages.Lowered]] = {}
    if isinstance(engine, PrecompiledEngine):
        sampling = engine.lowered_programs(
            resharder.abstract(),
            config.trainer.prompts_per_step,
            config.data.max_prompt_tokens,
            0
            if models.image_feature_cache is None
            else models.image_feature_cache.tower.feature_size,
        )

    def lower_in_mesh(lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Lowered:
        with jax.set_mesh(models.mesh), compile_only_devices.gpu_as_cuda():
            return lower()

    def train() -> jax.stages.Lowered:
        updater = update.make_updater(config, models, base, state)
        packed = abstract_packed(config, models, config.minibatch_size)
        return update_lowerings(updater, state, batch, packed, train_policy=True)[0]()

    score_lowerings = predict.scoring_lowerings(
        models, predict.scoring_programs(config, models), base, state, reference={}
    )

    def score(name: str) -> jax.stages.Lowered:
        packed = abstract_packed(config, models, config.sequences_per_step)
        return score_lowerings[name](batch.tokens, batch.lengths, packed)

    reshard = resharder.lowerings(policy)
    programs: dict[str, Callable[[], jax.stages.Lowered]] = {
        **sampling,
        "score": functools.partial(score, "log-probs"),
        "score_critic": functools.partial(score, "values"),
        "train": train,
        "reshard": reshard["ends"],
        "reshard_layer": list(reshard.values())[-1],  # experts, if there are any, come last
    }
    if models.image_feature_cache is not None:
        programs["tower"] = functools.partial(
            _lower_vision_encoder, config, models, models.image_feature_cache
        )
    if not state.critic.params:
        del programs["score_critic"]
    return {name: functools.partial(lower_in_mesh, lower) for name, lower in programs.items()}


def update_lowerings(
    updater: update.Updater,
    state: LearnerState,
    batch: Any,
    packed: PackedBatch,
    train_policy: bool,
) -> list[Callable[[], jax.stages.Lowered]]:
    """Functions that lower the update program of each mesh that has learners.

    Of `state` and `batch` only the shapes are read; the batch is placed as by
    `Updater.replicate_batch`.
    """

    def lower(mesh: Mesh, program: Any) -> jax.stages.Lowered:
        learners = updater.learners(state, mesh)
        base = updater.base_params if "policy" in learners else {}
        replicated_shape = lambda a: jax.ShapeDtypeStruct(  # noqa: E731
            a.shape, a.dtype, sharding=mesh_lib.replicated(mesh)
        )
        shapes = jax.tree.map(replicated_shape, batch)
        # Not computed: the devices may be those of a compiler alone.
        key = jax.eval_shape(lambda: jax.random.key(0))
        with jax.set_mesh(mesh):
            return program.lower(learners, base, shapes, packed, key, train_policy=train_policy)

    return [functools.partial(lower, *each) for each in updater.programs.items()]


def abstract_packed(config: RLConfig, models: Models, num_chosen: int) -> PackedBatch:
    """Shapes of `num_chosen` sequences of a step, packed, each of the maximum length."""
    width, count = config.max_sequence_tokens, config.sequences_per_step
    num_prompt_tokens = config.data.max_prompt_tokens
    response_tokens = np.tile(np.arange(width) >= num_prompt_tokens, (count, 1))
    packed = job_models.make_packer(config, models.meshes, models.policy).pack(
        np.full(count, width),
        np.arange(num_chosen),
        width=width,
        scored=batches.EVERY_TOKEN if models.mesh.shape["sequence"] > 1 else response_tokens,
        common=packed_batch.SharedPrefixes(
            np.arange(count) // config.algorithm.samples_per_prompt,
            np.full(count, num_prompt_tokens),
        ),
    )
    packed = jax.tree.map(lambda a: _abstract_array(models, np.shape(a), a.dtype), packed)
    field_widths = distillation.token_field_widths(config)
    if config.rollout.support_tokens:
        field_widths["support"] = config.rollout.support_tokens
    if config.router.replay != "off":
        field_widths["routes"] = models.policy.num_routes
    if models.image_feature_cache is not None:
        field_widths |= {"mrope_positions": 3, "image_index": 1}
        packed = _with_images(config, models, models.image_feature_cache, packed, num_chosen)
    return token_fields.abstract_fields(packed, models.mesh, **field_widths)


def _with_images(
    config: RLConfig,
    models: Models,
    gallery: ImageFeatureCache,
    packed: PackedBatch,
    num_chosen: int,
) -> PackedBatch:
    """Shapes of a packed batch whose prompts are one maximum-size image each."""
    tower, max_features = gallery.tower, config.data.max_prompt_tokens
    size = packed_batch.bucket(
        config.trainer.prompts_per_step * max_features, smallest=MIN_FEATURES
    )
    vectors = _abstract_array(models, (size, tower.feature_size), jnp.dtype(tower.compute_dtype))
    packed = dataclasses.replace(packed, image_features=vectors)
    if not gallery.is_trainable:
        return packed
    width = patches.row_width(max_features * tower.vision.merge_size**2)
    rows, max_images = (
        mesh_lib.num_row_shards(models.mesh)[0],
        max(1, patches.MAX_TRAINED_PATCHES // width),
    )
    images = max(1, num_chosen // config.algorithm.samples_per_prompt)
    rows *= packed_batch.bucket(min(-(-images // rows), max_images), largest=max_images)
    shape = packed_batch.bucket(-(-images // rows)), rows, width

    def sharded_shape(trailing: tuple[int, ...], dtype: Any) -> Any:
        sizes = shape + trailing
        names = (None, "batch", *[None] * (len(sizes) - 2))
        return jax.ShapeDtypeStruct(
            sizes, dtype, sharding=mesh_lib.activation_sharding(sizes, names, models.mesh)
        )

    shown = packed_batch.ImageBatch(
        sharded_shape((tower.vision.patch_dims,), jnp.float32),
        sharded_shape((patches.NUM_COORDINATES,), jnp.int32),
        sharded_shape((), jnp.int32),
        _abstract_array(models, (size,), jnp.int32),
    )
    return dataclasses.replace(packed, images=shown)


def _lower_vision_encoder(
    config: RLConfig, models: Models, gallery: ImageFeatureCache
) -> jax.stages.Lowered:
    """Lowers the vision encoder on the largest images of a run, for the engine."""
    vision, mesh = gallery.tower.vision, models.mesh
    width = max(
        patches.MAX_SHARED_ROW_PATCHES,
        patches.row_width(config.data.max_prompt_tokens * vision.merge_size**2),
    )
    shape = mesh_lib.num_row_shards(mesh)[0], width
    params = weights_lib.abstract_tower(gallery.tower, models.policy, mesh)
    pixels = _abstract_array(models, (*shape, vision.patch_dims), jnp.float32)
    places, images = (
        _abstract_array(models, shape + trailing, jnp.int32)
        for trailing in ((patches.NUM_COORDINATES,), ())
    )
    return gallery.encode.lower(params, pixels, places, images)


def abstract_batch(config: RLConfig, models: Models, width: int = 0) -> Minibatch:
    """Shapes of all sequences of a step as the update reads them.

    `row_width` is their T; 0: the maximum sequence length.
    """
    table = config.sequences_per_step, width or config.max_sequence_tokens
    shapes = jax.eval_shape(lambda: Minibatch.zeros(*table))
    return jax.tree.map(lambda a: _abstract_array(models, a.shape, a.dtype), shapes)


def _abstract_array(models: Models, shape: tuple[int, ...], dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.replicated(models.mesh))


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Memory of one program as the compiler reports it, in bytes on each device."""

    argument_bytes: int
    output_bytes: int
    aliased_bytes: int  # outputs that reuse the memory of donated arguments
    temp_bytes: int
    host_bytes: int  # arguments, outputs and temporaries in host memory
    lower_s: float
    compile_s: float
    time: ProgramTime | None = None  # of a call, where the compiler writes its estimates

    @property
    def total_bytes(self) -> int:
        """Bytes of device memory that the program needs while it runs."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temp_bytes


class CompilerOutOfMemory(Exception):
    """The compiler found that a program cannot fit; holds the first line of its message."""


def compiled_memory(
    lower: Any, rates: TpuRates | None = None, open_trips: int = 1
) -> CompiledMemory:
    """Compiles a program of `program_lowerings` and reports its memory; raises if it cannot
    fit.

    With the rates of a TPU also its time, see `compiler_clock.program_time`.
    """
    start = time.perf_counter()
    program = lower()
    middle = time.perf_counter()
    try:
        if rates is None:
            stats, program_text = program.compile().memory_analysis(), ""
        else:
            stats, program_text = _compile_with_text(program)
    except jax.errors.JaxRuntimeError as error:
        raise CompilerOutOfMemory(str(error).splitlines()[0]) from error
    return CompiledMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        host_bytes=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
        lower_s=middle - start,
        compile_s=time.perf_counter() - middle,
        time=None if rates is None else program_time(program_text, rates, open_trips),
    )


def _compile_with_text(program: jax.stages.Lowered) -> tuple[Any, str]:
    """Compiles for a TPU: the compiler's memory statistics, and the scheduled program.

    The text comes from the compiler's own dump. jaxlib may be older than libtpu, and then cannot
    read some of its programs (`Compiled.as_text`).
    """
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
        options: Any = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = program.compile(compiler_options=options)
        dumps = sorted(pathlib.Path(folder).glob("*.after_codegen.txt"))
        texts = [dump.read_text() for dump in dumps] or [compiled.as_text() or ""]
    return compiled.memory_analysis(), max(texts, key=len)


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """The compiler's figures of one program of a plan."""

    total_bytes: float = 0.0  # on a device while it runs; 0: it cannot fit
    problem: str = ""  # the compiler's message, if it cannot fit
    time: ProgramTime | None = None  # of one call; None: the compiler writes no cycles


def compiled_programs(plan: MemoryPlan, devices: Sequence[Any] | str) -> dict[str, CompiledProgram]:
    """Bytes on a device while each program runs, and on TPUs the time of a call of it.

    A program's own memory comes from the compiler, other resident arrays from the analytic plan.
    Raises ConfigError for devices that no compiler knows, and for several pools.
    """
    if len(plan.pools) > 1:
        raise ConfigError(
            "--compile: programs of several pools are not compiled; use placement.choice=colocate"
        )
    if isinstance(devices, str):
        devices = compile_only_devices.devices_by_name(devices, plan.num_devices)
    setting = plan.setting
    models = abstract_models(setting.config, setting.policy, list(devices))
    program_memory = memory.program_parts(setting)
    programs: dict[str, CompiledProgram] = {}
    rates = tpu_rates(plan.device)
    # How many microbatches and decode steps there are is an input of the programs.
    microbatches = {
        name: setting.rows(count).num_microbatches
        for name, count in (
            ("train", setting.config.minibatch_size),
            ("score", setting.config.sequences_per_step),
            ("score_critic", setting.config.sequences_per_step),
        )
    }
    open_trips = {**microbatches, "decode": setting.config.rollout.chunk_steps}
    for name, lower in program_lowerings(setting.config, models).items():
        logging.info("compiling %s", name)
        resident = plan.programs[name].total - program_memory[name].total
        try:
            compiled = compiled_memory(lower, rates, open_trips.get(name, 1))
            total_bytes = compiled.total_bytes + resident
            programs[name] = CompiledProgram(total_bytes, time=compiled.time)
        except CompilerOutOfMemory as error:
            programs[name] = CompiledProgram(problem=str(error))
    return programs
