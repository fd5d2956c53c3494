"""What the processes of a run must have in common, at its start and in every step.

A host loop that runs on several hosts is right only while all of them hold the same; each
function here compares what has just come to be, before anything follows from it.
"""

from collections.abc import Sequence

import jax

from jaxrl_llm.config import JobConfig
from jaxrl_llm.config.bridge import to_dict
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.sharding import agreement
from jaxrl_llm.sharding.agreement import Copies
from jaxrl_llm.types import PromptBatch, Rewards, Rollouts


def check_start(config: JobConfig, datasets: Sequence[Dataset]) -> None:
    """Compares versions, settings and data, before anything is allocated.

    Raises:
      DivergenceError: If a host has others.
    """
    agreement.check(
        "start",
        {
            "the version of jax": jax.__version__,
            "the number of devices": jax.local_device_count(),
            **{f"config.{group}": value for group, value in to_dict(config).items()},
            **{f"dataset {i}": dataset.prompts for i, dataset in enumerate(datasets)},
        },
    )


def check_prompts(prompts: PromptBatch, key: jax.Array) -> None:
    """Compares what is about to be sampled.

    Raises:
      DivergenceError: If a process is about to sample something else.
    """
    agreement.check(
        "sampling",
        {
            "the prompts": prompts.prompts,
            "the random key": jax.device_get(jax.random.key_data(key)),
        },
    )


def check_sampled(rollouts: Rollouts, rewards: Rewards) -> None:
    """Compares what was sampled and what it is worth.

    Raises:
      DivergenceError: If a process holds another token or reward.
    """
    agreement.check(
        "sampled",
        {
            "the tokens": rollouts.tokens,
            "the response mask": rollouts.response_mask,
            "the rollout log-probs": rollouts.rollout_log_probs,
            "the responses": rollouts.responses,
            "the rewards": rewards,
        },
    )


def check_learned(step: int, state: LearnerState) -> None:
    """Compares copies of parameters and optimizer state after the updates of a step.

    Raises:
      DivergenceError: If two copies differ.
    """
    agreement.check(f"step {step}", {"the learner state": Copies(state)})
