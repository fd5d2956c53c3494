"""The functions that the RL loop calls in each step, compiled for a layout."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.learner import distillation, estimate, predict, update
from jaxrl_llm.learner.update import Updater
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.planning import accelerators as hardware
from jaxrl_llm.planning import compiled_memory
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine_api import PrecompiledEngine
from jaxrl_llm.sharding import device_pools, parallel_compile
from jaxrl_llm.trainer.setup import RLSetup
from jaxrl_llm.types import Estimates


class StepFunctions(NamedTuple):
    """The functions of a step, and the devices they run on."""

    add_teacher_log_probs: Any  # learner/distillation.py
    predict: Any  # learner/predict.py
    estimate: Any  # learner/estimate.py
    has_signal: Callable[[Mapping[str, float], Estimates], bool]
    update: Updater
    devices: list[Any]
    peak_flops: float  # of all devices together, per second


def make_step_functions(prepared: RLSetup, state: LearnerState) -> StepFunctions:
    """The step functions of a run; of `state` only shapes and shardings are read.

    Starts compiling the programs of the steps in the background: all steps have the same shapes.
    With several processes only the sampling programs are compiled here, one after the other.
    """
    config, models, frozen = prepared.config, prepared.models, prepared.frozen
    devices = device_pools.all_devices(models.meshes.values())
    sampler_devices = models.meshes["rollout"].devices.flat
    compile_pool, scoring_programs = (
        parallel_compile.CompilePool(),
        predict.scoring_programs(config, models),
    )
    learn = update.make_updater(config, models, frozen.base_params, state, prepared.source.on_wait)
    learn = dataclasses.replace(learn, wait_compiled=compile_pool.wait)
    sampling_compilations = _sampling_compilations(prepared)
    lowerings = _learning_lowerings(prepared, state, scoring_programs, learn)
    if jax.process_count() == 1:
        for name, make in sampling_compilations.items():
            compile_pool.submit(name, make)
        if isinstance(engine := prepared.sampler.engine, PrecompiledEngine):
            engine.wait_before_steps(functools.partial(compile_pool.wait, *sampling_compilations))
        for name, lower in lowerings.items():
            compile_pool.submit(name, functools.partial(_compile, lower))
    elif any(each.process_index == jax.process_index() for each in sampler_devices):
        # Multi-process arguments depend on what each process holds: the rest compiles when called.
        for make in sampling_compilations.values():
            make()
    return StepFunctions(
        add_teacher_log_probs=distillation.teacher_scorer(config, models, frozen),
        predict=predict.predictor(config, models, frozen, scoring_programs, compile_pool.wait),
        estimate=estimate.estimator(config, models.mesh),
        has_signal=estimate.signal_check(config),
        update=learn,
        devices=devices,
        peak_flops=hardware.peak_flops(devices),
    )


def _compile(lower: Callable[[], jax.stages.Lowered]) -> None:
    lower().compile()


def _sampling_compilations(prepared: RLSetup) -> Mapping[str, Callable[[], None]]:
    """Functions that compile each sampling program, by name; none for image prompts and replay."""
    config, sampler = prepared.config, prepared.sampler
    engine = sampler.engine
    has_images = prepared.models.image_feature_cache is not None
    if has_images or prepared.context.replay or not isinstance(engine, PrecompiledEngine):
        return {}
    sampling_params = episodes.sampling_params(config.rollout, prepared.models.eos_tokens)
    filters = sorted({sampling_params.is_filtered} | prepared.evaluate.filter_variants)
    continues = sampler.world is not None
    if support_tokens := sampling_params.support_tokens:  # the programs of evaluations come later
        filters = [sampling_params.is_filtered]
        return engine.programs_to_compile(
            sampler.abstract(), filters, continues, support_tokens=support_tokens
        )
    return engine.programs_to_compile(sampler.abstract(), filters, continues)


def _learning_lowerings(
    prepared: RLSetup,
    state: LearnerState,
    scoring_programs: predict.ScoringPrograms,
    learn: Updater,
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Functions that lower each scoring and update program, by name, if shapes are known."""
    config, models, width = prepared.config, prepared.models, prepared.width
    prompts = prepared.context.training_set
    longest = min(max(prompts.max_prompt_tokens, 1), width - 1)
    mean_prompt = round(np.mean([len(prompt.tokens) for prompt in prompts.prompts] or [longest]))
    row_layouts = models.packer.fix_shapes(
        (config.sequences_per_step, config.minibatch_size),
        samples=config.algorithm.samples_per_prompt,
        prompt=longest,
        usual=min(max(mean_prompt, 1), longest),
        width=width,
    )
    has_token_fields = (
        config.router.replay != "off"
        or config.distillation.teachers
        or config.rollout.support_tokens
        or models.image_feature_cache
    )
    if not row_layouts or has_token_fields:
        return {}
    step_layout, minibatch_layout = row_layouts
    count = len(step_layout.is_member)
    tokens, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    frozen = prepared.frozen
    score_lowerings = predict.scoring_lowerings(
        models, scoring_programs, frozen.base_params, state, frozen.reference
    )
    # Programs that a step does not call, or with parameters whose memory space changes.
    skipped = set() if predict.scores_policy(config) else {"log-probs"}
    skipped |= {"reference"} if "reference" in config.mesh.on_host else set()
    lowerings: dict[str, Callable[[], jax.stages.Lowered]] = {
        name: functools.partial(lower, tokens, lengths, step_layout)
        for name, lower in score_lowerings.items()
        if name not in skipped
    }
    if "optimizer" in config.mesh.on_host:
        return lowerings  # its memory space changes from call to call
    batch = compiled_memory.abstract_batch(config, models, width)
    warmup_steps = config.algorithm.critic_warmup_steps
    for train_policy in dict.fromkeys((not warmup_steps, config.trainer.num_steps > warmup_steps)):
        update_lowerings = compiled_memory.update_lowerings(
            learn, state, batch, minibatch_layout, train_policy
        )
        for number, lower in enumerate(update_lowerings):
            name = "update" if train_policy else "update of critics"
            lowerings[f"{name} {number + 1}" if len(update_lowerings) > 1 else name] = lower
    return lowerings
