"""What the loop of RL calls in each step, compiled for a layout."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.learner import distillation, estimate, lowering, predict, update
from jaxrl_llm.learner.update import Updater
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.planning import devices as hardware
from jaxrl_llm.rollout import episodes, lowered
from jaxrl_llm.sharding import compiling, pools
from jaxrl_llm.trainer.prepare import Prepared
from jaxrl_llm.types import Estimates


class Phases(NamedTuple):
    """The functions of a step, and the devices that they use."""

    lessons_of: Any  # learner/distillation.py
    predictions_of: Any  # learner/predict.py
    estimates_of: Any  # learner/estimate.py
    has_signal: Callable[[Mapping[str, float], Estimates], bool]
    learn: Updater
    devices: list[Any]
    peak_flops: float  # of all devices together, in a second


def of(prepared: Prepared, state: LearnerState) -> Phases:
    """Returns the phases of a run; of `state` only shapes and shardings are read.

    Begins to compile what the steps will call: all have the same shapes. With several processes
    only what samples is compiled here, one program after the other.
    """
    config, models, frozen = prepared.config, prepared.models, prepared.frozen
    devices = pools.devices(models.meshes.values())
    sampler_devices = models.meshes["rollout"].devices.flat
    ahead, programs = compiling.Ahead(), predict.scoring_programs(config, models)
    learn = update.updater(config, models, frozen.base, state, prepared.source.meanwhile)
    learn = dataclasses.replace(learn, ready=ahead.wait)
    sampling, others = _sampling(prepared), _programs(prepared, state, programs, learn)
    if jax.process_count() == 1:
        for name, make in sampling.items():
            ahead.begin(name, make)
        prepared.sampler.engine.jitted.ready = functools.partial(ahead.wait, *sampling)
        for name, lower in others.items():
            ahead.begin(name, functools.partial(_compile, lower))
    elif any(each.process_index == jax.process_index() for each in sampler_devices):
        # Arguments of several processes follow from what each holds: others compile in their call.
        for make in sampling.values():
            make()
    return Phases(
        lessons_of=distillation.teaching(config, models, frozen),
        predictions_of=predict.predictor(config, models, frozen, programs, ahead.wait),
        estimates_of=estimate.estimator(config, models.mesh),
        has_signal=estimate.signal_check(config),
        learn=learn,
        devices=devices,
        peak_flops=hardware.peak_flops(devices),
    )


def _compile(lower: Callable[[], jax.stages.Lowered]) -> None:
    lower().compile()


def _sampling(prepared: Prepared) -> dict[str, Callable[[], None]]:
    """Returns by name what compiles each program that samples; nothing for rows with images."""
    config, sampler = prepared.config, prepared.sampler
    if prepared.models.gallery is not None or prepared.parts.replay:
        return {}
    trained = episodes.sampling_params(config.rollout, prepared.models.eos_tokens)
    filters = sorted({trained.is_filtered} | prepared.evaluate.filters)
    continues = sampler.world is not None
    return lowered.ahead(sampler.engine, sampler.abstract(), filters, continues)


def _programs(
    prepared: Prepared, state: LearnerState, asking: predict.Programs, learn: Updater
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns by name what lowers each program that learns or predicts, if shapes are known."""
    config, models, width = prepared.config, prepared.models, prepared.width
    prompts = prepared.parts.training_set
    longest = min(max(prompts.longest, 1), width - 1)
    usual = round(np.mean([len(prompt.tokens) for prompt in prompts.prompts] or [longest]))
    settled = models.packer.settle(
        (config.sequences_per_step, config.minibatch_size),
        samples=config.algorithm.samples_per_prompt,
        prompt=longest,
        usual=min(max(usual, 1), longest),
        width=width,
    )
    carries = config.router.replay != "off" or config.distillation.teachers or models.gallery
    if not settled or carries:
        return {}
    whole, part = settled
    count = len(whole.chosen)
    about = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    questions = predict.questions(config, models, prepared.frozen, state, asking)
    found: dict[str, Callable[[], jax.stages.Lowered]] = {
        name: functools.partial(ask, *about, whole) for name, ask in questions.items()
    }
    if "optimizer" in config.mesh.on_host:
        return found  # its place changes with each call
    batch = lowering.abstract_batch(config, models, width)
    warms_up = config.algorithm.critic_warmup_steps
    for train_policy in dict.fromkeys((not warms_up, config.trainer.num_steps > warms_up)):
        lowers = lowering.updates(learn, state, batch, part, train_policy)
        for number, lower in enumerate(lowers):
            name = "update" if train_policy else "update of critics"
            found[f"{name} {number + 1}" if len(lowers) > 1 else name] = lower
    return found
