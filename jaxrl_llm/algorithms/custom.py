"""The check of a user's own advantage and policy loss before a run begins."""

import os
import traceback

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import ESTIMATORS, estimate
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.lookup import FunctionError, declared, resolve
from jaxrl_llm.algorithms.losses import POLICY_LOSSES, policy_objective
from jaxrl_llm.config import AlgorithmConfig, ConfigError
from jaxrl_llm.config.algorithm import is_import_path
from jaxrl_llm.types import Minibatch

_ROWS, _WIDTH, _TERMS = 4, 3, 2
_TOKENS = jax.ShapeDtypeStruct((_ROWS, _WIDTH), jnp.float32)
_BY_TERM = jax.ShapeDtypeStruct((_TERMS, _ROWS), jnp.float32)

# What the learner hands to an estimator, by name.
_STEP = {
    "response_mask": jax.ShapeDtypeStruct((_ROWS, _WIDTH), bool),
    "rewards": _TOKENS,
    "values": _TOKENS,
    "old_log_probs": _TOKENS,
    "sum_squared_probs": _TOKENS,
    "correction_weights": _TOKENS,
    "group_ids": jax.ShapeDtypeStruct((_ROWS,), jnp.int32),
    "baselines": jax.ShapeDtypeStruct((_ROWS,), jnp.float32),
    "term_rewards": _BY_TERM,
    "term_weights": _BY_TERM,
}


def check(config: AlgorithmConfig) -> None:
    """Raises ConfigError, with all problems, if a function named by import path cannot work.

    The function is found and traced with arrays of small shapes: it must name what is available
    and return what is wanted, and the rest of the config must fit what the advantage reads.

    >>> check(AlgorithmConfig(advantage="grpo"))
    """
    problems = []
    for field, table, trace in (
        ("advantage", ESTIMATORS, _trace_advantage),
        ("policy_loss", POLICY_LOSSES, _trace_policy_loss),
    ):
        name = getattr(config, field)
        try:
            function = resolve(name, table, field.replace("_", " "))
        except Exception as error:  # whatever the user's file raises when it is imported
            # Errors of the lookup itself begin with the name; of an import, with anything.
            own = str(error).startswith(repr(name))
            said = str(error) if own else f"{name!r}: {type(error).__name__}: {error}"
            problems.append(f"config.algorithm.{field}: {said}")
            continue
        try:
            if is_import_path(name):
                trace(config)
            if field == "advantage":
                for path, said in config.advantage_rules(declared(function).names):
                    problems.append(f"config.algorithm.{path}: {said}")
        except FunctionError as error:
            problems.append(str(error))
        except Exception as error:  # what the user's function raises when it is traced
            problems.append(
                f"config.algorithm.{field}: {name!r} raises {_last_line_of(name, error)}"
                f"{type(error).__name__}: {error}"
            )
    if problems:
        raise ConfigError(problems)


def _last_line_of(name: str, error: Exception) -> str:
    """Returns the line of the user's file that raised the error, "" if it was elsewhere."""
    file = os.path.basename(name.rpartition(":")[0])
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.basename(frame.filename) == file]
    return f"in line {lines[-1]}: " if lines else ""


def _trace_advantage(config: AlgorithmConfig) -> None:
    jax.eval_shape(lambda step: estimate(config, **step), _STEP)


def _trace_policy_loss(config: AlgorithmConfig) -> None:
    def objective(minibatch: Minibatch):
        denominators = minibatch_denominators(minibatch.loss_mask, loss_scale=1.0)
        tokens = minibatch.old_log_probs
        return policy_objective(
            config, tokens, tokens, minibatch, minibatch.loss_mask, denominators
        )

    jax.eval_shape(objective, jax.eval_shape(lambda: Minibatch.zeros(_ROWS, _WIDTH)))
