"""Supervised jobs expressed as RL runs with the same programs, so that planning covers both."""

import dataclasses
from typing import Literal, NamedTuple

from jaxrl_llm.config import JobConfig, RLConfig
from jaxrl_llm.config.algorithm import AlgorithmConfig
from jaxrl_llm.config.learner import CriticConfig, RLTrainerConfig


class PlannedRun(NamedTuple):
    """An RL run, and those of its roles and programs that a supervised job has."""

    config: RLConfig
    roles: tuple[str, ...]
    programs: frozenset[str]


def planned_runs(config: JobConfig) -> tuple[PlannedRun, ...]:
    """The RL runs that stand for a supervised job in planning; training comes first.

    Rows are assumed to have the maximum length. Resharding and a KV cache are planned only if the
    job generates answers to held-out prompts.
    """
    kl: Literal["loss", "none"] = "none" if config.reference_folder is None else "loss"
    scalar = config.trained_head == "scalar"
    trainer, max_tokens = config.trainer, config.max_sequence_tokens
    training = RLConfig(
        model=config.model,
        lora=config.lora,
        mesh=config.mesh,
        # Any token of a row may have a loss.
        data=dataclasses.replace(config.data, max_prompt_tokens=1),
        critic=CriticConfig(optimizer=trainer.optimizer),
        algorithm=AlgorithmConfig(
            advantage="gae" if scalar else "grpo", kl_in=kl, samples_per_prompt=1
        ),
        trainer=RLTrainerConfig(
            num_steps=trainer.num_steps,
            prompts_per_step=config.sequences_per_update,
            max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
            optimizer=trainer.optimizer,
            tower_learning_rate=trainer.tower_learning_rate,
        ),
    )
    rollout = dataclasses.replace(training.rollout, max_response_tokens=max_tokens - 1)
    training = dataclasses.replace(training, rollout=rollout)
    programs = frozenset({"train", "score_critic" if scalar else "score"})
    roles = ("critic",) if scalar else ("policy", "reference")
    runs = [PlannedRun(training, roles, programs)]
    if config.answers_prompts:
        as_rl = config.as_rl()
        sampling = dataclasses.replace(
            as_rl,
            algorithm=dataclasses.replace(as_rl.algorithm, kl_in=kl),
            trainer=dataclasses.replace(as_rl.trainer, optimizer=trainer.optimizer),
        )
        programs = frozenset({"prefill", "decode", "reshard", "reshard_layer"})
        runs.append(PlannedRun(sampling, ("policy", "reference", "rollout"), programs))
    return tuple(runs)
