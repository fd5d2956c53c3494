"""Losses of a pass: by the names of Tinker's API, those of the jobs, or a function of the caller.

Losses with Tinker's names are sums over tokens, so that the gradient of several passes is that of
one pass over all their data. Those of the jobs are divided by counts of the pass, as the counts of
a minibatch in a job.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import losses, masked, requirements, selection
from jaxrl_llm.algorithms.aggregation import Denominators, LossAndMetrics
from jaxrl_llm.algorithms.kl import clip_log_ratios
from jaxrl_llm.algorithms.lookup import FunctionError, call_by_name, parameters_of
from jaxrl_llm.algorithms.masked import Mask, PerToken
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.heads import EntropyMode
from jaxrl_llm.types import Minibatch

# Per-token losses, and per-token metrics that are summed too.
SummedLoss = tuple[PerToken, dict[str, PerToken]]


class LossError(UserError, ValueError):
    """A loss is not known, or does not take these settings or these fields."""


def cross_entropy(log_probs: PerToken, weights: PerToken) -> SummedLoss:
    """Returns `-weights * log_probs`.

    >>> print(cross_entropy(jnp.array([[-2.0]]), jnp.array([[0.5]]))[0])
    [[1.]]
    """
    return -weights * log_probs, {}


def importance_sampling(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken
) -> SummedLoss:
    """Returns `-A ratio`, with `ratio = exp(log_probs - old_log_probs)`.

    >>> one = jnp.ones((1, 1))
    >>> print(importance_sampling(jnp.log(0.5) * one, 0.0 * one, 3.0 * one)[0])
    [[-1.5]]
    """
    return -advantages * jnp.exp(clip_log_ratios(log_probs - old_log_probs)), {}


def ppo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> SummedLoss:
    """Returns `-min(A ratio, A clip(ratio, clip_low_threshold, clip_high_threshold))`.

    Schulman et al., arXiv:1707.06347, Eq. 7; the thresholds are of the ratio itself.

    >>> one = jnp.ones((1, 1))
    >>> print(ppo(jnp.log(2.0) * one, 0.0 * one, one)[0])
    [[-1.2]]
    """
    ratios = jnp.exp(clip_log_ratios(log_probs - old_log_probs))
    clipped = jnp.clip(ratios, clip_low_threshold, clip_high_threshold)
    return -jnp.minimum(advantages * ratios, advantages * clipped), {}


def cispo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> SummedLoss:
    """Returns `-stop_gradient(clip(ratio, low, high)) A log_probs`.

    MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5; the thresholds are of the ratio itself.

    >>> one = jnp.ones((1, 1))
    >>> print(cispo(-one, -3.0 * one, one)[0])
    [[1.2]]
    """
    ratios = jax.lax.stop_gradient(jnp.exp(clip_log_ratios(log_probs - old_log_probs)))
    weights = jnp.clip(ratios, clip_low_threshold, clip_high_threshold)
    return -weights * advantages * log_probs, {}


def dro(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, beta: float = 0.05
) -> SummedLoss:
    """Returns `-(A log_probs - beta / 2 (log_probs - old_log_probs)**2)`.

    Richemond et al., arXiv:2405.19107.

    >>> one = jnp.ones((1, 1))
    >>> print(dro(-one, -3.0 * one, 0.0 * one, beta=0.5)[0])
    [[1.]]
    """
    differences = log_probs - old_log_probs
    return 0.5 * beta * jnp.square(differences) - advantages * log_probs, {}


SUMMED_LOSSES: Mapping[str, Callable[..., SummedLoss]] = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro)
}
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
}
# The name of the objective that the config's algorithm describes.
CONFIGURED = "algorithm"

# As a caller names a loss.
LossName = str | AlgorithmConfig | Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class TokenInputs:
    """The inputs of a loss of a microbatch: [b, T] arrays, and counts of the whole pass."""

    log_probs: PerToken
    entropies: PerToken
    mask: Mask
    fields: Mapping[str, PerToken]
    denominators: Denominators


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss that a program computes."""

    key: Any  # equal for equal losses: programs are compiled once for each
    # The microbatch's share of the loss, and metrics to be summed, by numbers of the caller.
    evaluate: Callable[[TokenInputs, Mapping[str, Any]], LossAndMetrics]
    required: frozenset[str] = frozenset()  # fields that every datum must have
    settings: tuple[str, ...] = ()  # numbers that the caller may give, by name
    entropy: EntropyMode = "none"
    algorithm: AlgorithmConfig | None = None  # of a job's loss

    def check(self, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Raises LossError if a field is missing, or a setting is not one of this loss."""
        if missing := sorted(self.required - fields.keys()):
            raise LossError(
                f"loss {self.key!r}: data have no {missing[0]!r}; add it to the fields of each"
            )
        for name, value in settings.items():
            if name not in self.settings:
                known = ", ".join(self.settings) or "none"
                raise LossError(f"loss {self.key!r}: no setting {name!r}; it has {known}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise LossError(f"loss {self.key!r}: {name} is {value!r:.100}, not a number")


def resolve_loss(loss: LossName, algorithm: AlgorithmConfig) -> Loss:
    """The loss of a name, of an algorithm, or of a function.

    Args:
      loss: A name of `SUMMED_LOSSES`; "algorithm", the whole objective of `algorithm`; a name of
        `POLICY_LOSSES`, the same with another policy loss; an `AlgorithmConfig`; or a function
        that names what it reads, among `log_probs`, `entropies`, `mask`, `denominators` and the
        fields of the data, and returns a scalar, or a scalar and a dict of metrics. It is called
        for each microbatch and its results are summed.

    Raises:
      LossError, FunctionError: If there is no such loss.
    """
    if isinstance(loss, str) and loss in SUMMED_LOSSES:
        return _summed_loss(loss)
    if isinstance(loss, AlgorithmConfig):
        return _objective(requirements.with_loss_defaults(loss), repr(loss))
    if loss == CONFIGURED:
        return _objective(requirements.with_loss_defaults(algorithm), CONFIGURED)
    if isinstance(loss, str) and loss in POLICY_LOSSES:
        other = dataclasses.replace(algorithm, policy_loss=loss, loss_args={})
        return _objective(requirements.with_loss_defaults(other), loss)
    if callable(loss):
        return _of_function(loss)
    known = ", ".join([*SUMMED_LOSSES, CONFIGURED, *POLICY_LOSSES.keys() - SUMMED_LOSSES.keys()])
    raise LossError(f"loss {loss!r:.100}: not known; use {known}, or a function")


def _summed_loss(name: str) -> Loss:
    function = SUMMED_LOSSES[name]
    required = parameters_of(function).required

    def evaluate(inputs: TokenInputs, settings: Mapping[str, Any]) -> LossAndMetrics:
        available = {**inputs.fields, "log_probs": inputs.log_probs}
        arrays = masked.zero_outside(inputs.mask, *(available[each] for each in required))
        per_token, metrics = function(**dict(zip(required, arrays, strict=True)), **settings)
        sums = {key: masked.sum(value, inputs.mask) for key, value in metrics.items()}
        return masked.sum(per_token, inputs.mask), jax.lax.stop_gradient(sums)

    fields = frozenset(required) - {"log_probs"}
    return Loss(name, evaluate, fields, _SETTINGS.get(name, ()))


def _objective(algorithm: AlgorithmConfig, key: str) -> Loss:
    """The policy objective of a job. Without "old_log_probs" the policy itself is the old one."""
    if algorithm.policy_loss in selection.SELECTIONS:
        raise LossError(
            f"loss {algorithm.policy_loss!r}: selects tokens of the whole minibatch in a pass of"
            " its own, which only jobs do; choose another"
        )
    if algorithm.kl_in == "loss" and algorithm.kl_coef:
        required = frozenset({"advantages", "ref_log_probs"})
    else:
        required = frozenset({"advantages"})

    def evaluate(inputs: TokenInputs, settings: Mapping[str, Any]) -> LossAndMetrics:
        del settings
        zeros, fields = jnp.zeros_like(inputs.log_probs), inputs.fields
        old = fields.get("old_log_probs", jax.lax.stop_gradient(inputs.log_probs))
        rows = dataclasses.replace(
            Minibatch.zeros(*zeros.shape),
            response_mask=inputs.mask,
            loss_mask=inputs.mask,
            old_log_probs=old,
            ref_log_probs=fields.get("ref_log_probs", old),
            rollout_log_probs=fields.get("rollout_log_probs", old),
            advantages=fields["advantages"],
            correction_weights=fields.get("correction_weights", zeros + 1.0),
        )
        return losses.policy_objective(
            algorithm,
            inputs.log_probs,
            inputs.entropies,
            rows,
            jnp.zeros_like(inputs.mask),
            inputs.denominators,
        )

    entropy: EntropyMode = "gradient" if algorithm.entropy_coef else "none"
    return Loss(key, evaluate, required, entropy=entropy, algorithm=algorithm)


def _of_function(function: Callable[..., Any]) -> Loss:
    where = f"loss {getattr(function, '__name__', function)!r}"
    reads = parameters_of(function)
    entropy: EntropyMode = "gradient" if reads.takes_rest or "entropies" in reads.names else "none"

    def evaluate(inputs: TokenInputs, settings: Mapping[str, Any]) -> LossAndMetrics:
        available = {
            **inputs.fields,
            **settings,
            "log_probs": inputs.log_probs,
            "entropies": inputs.entropies,
            "mask": inputs.mask,
            "denominators": inputs.denominators,
        }
        result = call_by_name(function, available, where)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        if jnp.shape(value) != ():
            raise FunctionError(
                f"{where}: returned an array of shape {jnp.shape(value)}; a loss returns a scalar,"
                " or a scalar and a dict of metrics"
            )
        return value, jax.lax.stop_gradient(metrics)

    own = frozenset({"log_probs", "entropies", "mask", "denominators"})
    readable = tuple(reads.names - own)  # fields or settings, as the caller gives them
    return Loss(function, evaluate, settings=readable, entropy=entropy)
