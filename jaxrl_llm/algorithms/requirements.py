"""The models and passes that a run needs for its algorithm, and the check of user functions.

Functions declare their inputs by parameter name. These names decide which models a run has,
whether each prompt gets a greedy sample, and whether the policy computes log-probs before the
update.
"""

import dataclasses
import functools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import ESTIMATORS, estimate
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.lookup import (
    FunctionError,
    Hyperparameter,
    hyperparameters,
    parameters_of,
    resolve,
)
from jaxrl_llm.algorithms.losses import POLICY_LOSS_INPUTS, policy_objective
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.algorithms.preference_losses import LABEL_LOSSES, PAIR_LOSSES
from jaxrl_llm.algorithms.preference_objectives import AnswerCounts, AnswerSums, pair_objective
from jaxrl_llm.algorithms.selection import SELECTIONS
from jaxrl_llm.config import AlgorithmConfig, ConfigError, RLConfig
from jaxrl_llm.config.algorithm import PreferenceLossConfig, is_import_path
from jaxrl_llm.config.bridge import suggestion
from jaxrl_llm.types import Minibatch

# Outputs of the policy's forward pass over the step before the update.
_POLICY_OUTPUTS = frozenset({"old_log_probs", "sum_squared_probs", "entropies"})

_ROWS, _WIDTH, _TERMS = 4, 3, 2  # the shapes of a trace
_PER_TOKEN = (
    "rewards", "values", "old_log_probs", "ref_log_probs", "sum_squared_probs",
    "correction_weights",
)  # fmt: skip
# Inputs that the learner offers to an estimator, by name.
_STEP = {
    **{name: jax.ShapeDtypeStruct((_ROWS, _WIDTH), jnp.float32) for name in _PER_TOKEN},
    "response_mask": jax.ShapeDtypeStruct((_ROWS, _WIDTH), bool),
    "group_ids": jax.ShapeDtypeStruct((_ROWS,), jnp.int32),
    "baselines": jax.ShapeDtypeStruct((_ROWS,), jnp.float32),
    "term_rewards": jax.ShapeDtypeStruct((_TERMS, _ROWS), jnp.float32),
    "term_weights": jax.ShapeDtypeStruct((_TERMS, _ROWS), jnp.float32),
}


@dataclasses.dataclass(frozen=True)
class Requirements:
    """Models and passes of a run that a function of its algorithm requires."""

    critic: bool
    cost_critic: bool
    reference: bool
    greedy_baseline: bool  # a greedy sample of each prompt; its score is the others' baseline
    old_log_probs: bool  # computed before the update, even if a step is one update

    @property
    def num_critics(self) -> int:
        return self.critic + self.cost_critic


@functools.lru_cache(maxsize=64)
def requirements(config: AlgorithmConfig) -> Requirements:
    """Derives the requirements of the configured functions. Raises as `lookup.resolve` does.

    >>> needs = requirements(AlgorithmConfig(advantage="gae", kl_in="loss"))
    >>> needs.critic, needs.reference, needs.greedy_baseline, needs.old_log_probs
    (True, True, False, False)
    >>> requirements(AlgorithmConfig(advantage="remax")).greedy_baseline
    True
    """
    advantage = parameters_of(resolve(config.advantage, ESTIMATORS, "advantage estimator"))
    loss = parameters_of(resolve(config.policy_loss, POLICY_LOSSES, "policy loss"))
    inputs = set(advantage.names)
    if advantage.takes_rest:
        # **rest receives everything available: the policy's pass, but no further model.
        inputs |= _POLICY_OUTPUTS
    if config.kl_in == "reward":
        inputs |= {"old_log_probs", "ref_log_probs"}
    # With interpolated log-probs the update computes the weights.
    corrects = config.correction != "none" and config.old_log_probs != "interpolate"
    if corrects or config.rejections or config.policy_loss in SELECTIONS:
        inputs.add("old_log_probs")
    if config.entropy_share < 1:
        inputs.add("entropies")
    if config.safe:
        inputs |= {"values", "cost_values", "old_log_probs"}
    all_inputs = inputs | loss.names
    return Requirements(
        critic="values" in all_inputs,
        cost_critic="cost_values" in all_inputs,
        reference="ref_log_probs" in all_inputs or config.kl_in == "loss",
        greedy_baseline="baselines" in inputs,
        old_log_probs=bool(_POLICY_OUTPUTS & inputs),
    )


def warnings(config: RLConfig) -> Iterator[str]:
    """Yields warnings about models that no function reads.

    >>> list(warnings(RLConfig()))
    []
    """
    needs, advantage = requirements(config.algorithm), config.algorithm.advantage
    if not needs.reference and config.reference.path:
        yield "config.reference.path: no effect, algorithm.kl_in is 'none'"
    if not needs.critic and config.critic.path:
        yield f"config.critic.path: no effect, advantage={advantage!r} has no critic"
    if not needs.critic and config.algorithm.critic_warmup_steps:
        yield "config.algorithm.critic_warmup_steps: no effect without a critic"


def loss_hyperparameters(policy_loss: str) -> Mapping[str, Hyperparameter]:
    """The hyperparameters of a policy loss: those of its function and of its token selection.

    Inputs with a number as default are not among them.

    Raises as `lookup.resolve` and `lookup.hyperparameters` do.

    >>> {name: each.default for name, each in loss_hyperparameters("kl_cov").items()}
    {'coef': 0.1, 'share': 0.0002}
    """
    functions = [resolve(policy_loss, POLICY_LOSSES, "policy loss")]
    functions += [SELECTIONS[policy_loss]] if policy_loss in SELECTIONS else []
    return {
        name: each
        for function in functions
        for name, each in hyperparameters(function).items()
        if name not in POLICY_LOSS_INPUTS
    }


def with_loss_defaults(config: AlgorithmConfig) -> AlgorithmConfig:
    """The config with every hyperparameter of its policy loss in `loss_args`.

    A run records them, so that one that is resumed does not depend on the defaults of its time.

    >>> config = AlgorithmConfig(policy_loss="sapo", loss_args={"tau_neg": 2.0})
    >>> with_loss_defaults(config).loss_args
    {'tau_pos': 1.0, 'tau_neg': 2.0}
    """
    known = loss_hyperparameters(config.policy_loss)
    defaults = {name: float(each.default) for name, each in known.items()}
    return dataclasses.replace(config, loss_args={**defaults, **config.loss_args})


def _argument_problems(
    field: str,
    loss: str,
    loss_args: Mapping[str, float],
    names: Iterable[str],
    known_of: Callable[[str], Mapping[str, Hyperparameter]],
) -> Iterator[str]:
    """Problems of the `loss_args` of a loss; `field` names it, `names` are those of its table."""
    group, _, name_of_field = field.rpartition(".")
    try:
        known = known_of(loss)
    except FunctionError as error:
        yield f"config.{field}={loss!r}: {error}"
        return
    for name, value in loss_args.items():
        where = f"config.{group}.loss_args.{name}"
        owners = [other for other in names if name in known_of(other)]
        if name in known:
            for message in known[name].problems(value):
                yield f"{where}: {message}"
        elif owners:
            message = f"a hyperparameter of {name_of_field}={' or '.join(map(repr, owners))}"
            yield f"{where}: {message}, not of {loss!r}; remove it, or choose that loss"
        else:
            hint = suggestion(name, list(known))
            message = f"unknown hyperparameter of {name_of_field}={loss!r}{hint}"
            yield f"{where}: {message}; known: {', '.join(known) or 'none'}"


def preference_hyperparameters(loss: str) -> Mapping[str, Hyperparameter]:
    """The hyperparameters of a preference loss, `loss_hyperparameters` of `config.dpo.loss`.

    >>> {name: each.default for name, each in preference_hyperparameters("discopop").items()}
    {'tau': 0.05}
    """
    function = resolve(loss, {**PAIR_LOSSES, **LABEL_LOSSES}, "preference loss")
    return hyperparameters(function)


def with_preference_defaults(config: PreferenceLossConfig) -> PreferenceLossConfig:
    """The config with every hyperparameter of its loss in `loss_args`, as `with_loss_defaults`.

    >>> with_preference_defaults(PreferenceLossConfig(loss="cpo")).loss_args
    {'nll_coef': 1.0}
    """
    known = preference_hyperparameters(config.loss)
    defaults = {name: float(each.default) for name, each in known.items()}
    return dataclasses.replace(config, loss_args={**defaults, **config.loss_args})


def check_preference_loss(config: PreferenceLossConfig) -> None:
    """Raises ConfigError, with all problems, if a preference loss cannot work.

    A function named by import path is found and traced with a few pairs, as `check_functions` does.

    >>> check_preference_loss(PreferenceLossConfig(loss="kto"))
    """
    tables = {**PAIR_LOSSES, **LABEL_LOSSES}
    try:
        resolve(config.loss, tables, "preference loss")
    except Exception as error:  # whatever the user's file raises when it is imported
        raise ConfigError([f"config.dpo.loss: {_lookup_message(config.loss, error)}"]) from error
    problems = list(
        _argument_problems(
            "dpo.loss", config.loss, config.loss_args, tables, preference_hyperparameters
        )
    )
    if is_import_path(config.loss) and not problems:
        try:
            _trace_preference_loss(config)
        except FunctionError as error:
            problems.append(str(error))
        except Exception as error:  # what the user's function raises when it is traced
            problems.append(f"config.dpo.loss: {_traced_message(config.loss, error)}")
    if problems:
        raise ConfigError(problems)


def _lookup_message(name: str, error: Exception) -> str:
    # Errors of the lookup itself begin with the name; of an import, with anything.
    if str(error).startswith(repr(name)):
        return str(error)
    return f"{name!r}: {type(error).__name__}: {error}"


def _traced_message(name: str, error: Exception) -> str:
    file = os.path.basename(name.rpartition(":")[0])
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each.lineno for each in frames if os.path.basename(each.filename) == file]
    line = f"in line {lines[-1]}: " if lines else ""
    return f"{name!r} raises {line}{type(error).__name__}: {error}"


def check_functions(config: AlgorithmConfig) -> None:
    """Raises ConfigError, with all problems, if a function of the algorithm cannot work.

    A function named by import path is found and traced with arrays of small shapes: it must name
    what is available and return what is wanted, and the rest of the config must fit what the
    advantage reads. `loss_args` must be hyperparameters of the policy loss, within their ranges.

    >>> check_functions(AlgorithmConfig(advantage="grpo"))
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
            problems.append(f"config.algorithm.{field}: {_lookup_message(name, error)}")
            continue
        try:
            bad_arguments: list[str] = []
            if field == "policy_loss":
                bad_arguments += _argument_problems(
                    "algorithm.policy_loss",
                    name,
                    config.loss_args,
                    POLICY_LOSSES,
                    loss_hyperparameters,
                )
            problems.extend(bad_arguments)
            if is_import_path(name) and not bad_arguments:
                trace(config)
            if field == "advantage":
                if config.old_log_probs == "interpolate" and requirements(config).old_log_probs:
                    message = "'interpolate' has no pass before the update, whose log-probs"
                    message += f" advantage={config.advantage!r}, or another setting, reads"
                    problems.append(f"config.algorithm.old_log_probs: {message}; use 'recompute'")
                for path, message in config.advantage_rules(parameters_of(function).names):
                    problems.append(f"config.algorithm.{path}: {message}")
        except FunctionError as error:
            problems.append(str(error))
        except Exception as error:  # what the user's function raises when it is traced
            problems.append(f"config.algorithm.{field}: {_traced_message(name, error)}")
    if problems:
        raise ConfigError(problems)


def _trace_advantage(config: AlgorithmConfig) -> None:
    jax.eval_shape(lambda step: estimate(config, **step), _STEP)


def _trace_policy_loss(config: AlgorithmConfig) -> None:
    def objective(minibatch: Minibatch):
        counts = minibatch_denominators(minibatch.loss_mask, loss_scale=1.0)
        tokens = minibatch.old_log_probs
        return policy_objective(config, tokens, tokens, minibatch, minibatch.loss_mask, counts)

    jax.eval_shape(objective, jax.eval_shape(lambda: Minibatch.zeros(_ROWS, _WIDTH)))


def _trace_preference_loss(config: PreferenceLossConfig) -> None:
    def objective(ratios: jax.Array):
        sums = AnswerSums(**{field.name: ratios for field in dataclasses.fields(AnswerSums)})
        counts = AnswerCounts(
            rows=1.0, desirable=1.0, desirable_tokens=1.0, desirable_text_tokens=1.0
        )
        return pair_objective(config, sums, sums, ratios > 0, counts)[0]

    jax.eval_shape(objective, jax.ShapeDtypeStruct((_ROWS,), jnp.float32))
