"""Warnings about valid settings that ruin a run, which would end with status 0 all the same.

A setting is here only if the mathematics or the number format says so, whatever the data are.
Settings without any effect are warned of where the job is (`config/job.py`).
"""

from collections.abc import Iterator, Mapping

from jaxrl_llm.config import recipes
from jaxrl_llm.config.algorithm import AlgorithmConfig, PreferenceLossConfig
from jaxrl_llm.config.learner import LoraConfig, ModelConfig, ReferenceConfig, TrainerConfig
from jaxrl_llm.config.rollout_data import RewardsConfig, RolloutConfig

# An update of AdamW is about the learning rate. A bfloat16 keeps 8 bits, so a weight of 0.02 or
# more loses updates below 0.02 / 2**9 = 4e-5, and weights of 0.05 those below 1e-4.
MIN_BFLOAT16_RATE = 1e-4
# Of a reward that reaches the first token of a long response, by the discount.
MIN_DISCOUNT = 1e-3


def sampling_warnings(rollout: RolloutConfig) -> Iterator[str]:
    """Sampling from another distribution than that of the log-probs that are trained.

    >>> [warning.partition(":")[0] for warning in sampling_warnings(RolloutConfig(top_p=0.9))]
    ['config.rollout.top_p']
    >>> list(sampling_warnings(RolloutConfig(top_p=0.9, support_tokens=64)))
    []
    """
    for name, is_on, off in (
        ("top_p", rollout.top_p < 1, "1.0"),
        ("top_k", rollout.top_k > 0, "0"),
        ("min_p", rollout.min_p > 0, "0.0"),
    ):
        if is_on and not rollout.support_tokens:
            yield (
                f"config.rollout.{name}: {getattr(rollout, name):g} samples from a truncated"
                " distribution, but log-probs, ratios and KL are of the whole one, so that"
                " gradients are biased: the samples are not the policy's; keep the tokens that each"
                " was drawn from with rollout.support_tokens, for example 64, or use"
                f" {off} in training (evaluation.top_p is apart)"
            )
    if rollout.temperature == 0:
        yield (
            "config.rollout.temperature: 0 (greedy) explores nothing, and responses are not drawn"
            " from the distribution that is trained; set it above 0"
        )


def algorithm_warnings(algorithm: AlgorithmConfig, max_response_tokens: int) -> Iterator[str]:
    """Choices of an algorithm whose gradient is zero, or loses what it should carry."""
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "config.algorithm.kl_estimator: the expected gradient of 'k1' in the loss is exactly 0:"
            " it adds noise and holds nothing near the reference; use 'k2', 'k3' or 'k1+'"
        )
    if algorithm.kl_in != "none" and not algorithm.kl_coef:
        yield (
            "config.algorithm.kl_coef: 0 makes the KL to the reference cost a model and change"
            " nothing; raise it, or set kl_in='none'"
        )
    if algorithm.kl_unbiased and algorithm.kl_in != "loss":
        yield f"config.algorithm.kl_unbiased: no effect, kl_in is {algorithm.kl_in!r}"
    default = AlgorithmConfig()
    for name, readers in recipes.PREFERENCE_SETTINGS.items():
        known = algorithm.advantage in recipes.ADVANTAGES and algorithm.advantage not in readers
        if known and getattr(algorithm, name) != getattr(default, name):
            yield f"config.algorithm.{name}: no effect, advantage is {algorithm.advantage!r}"
    if algorithm.dynamic_sampling_term and not algorithm.dynamic_sampling:
        yield "config.algorithm.dynamic_sampling_term: no effect, dynamic_sampling is off"
    if algorithm.kl_in == "reward" and algorithm.advantage == "gdpo":
        yield (
            "config.algorithm.kl_in: 'reward' has no effect on advantage='gdpo', which normalizes"
            " each reward term alone; use kl_in='loss'"
        )
    discounts = algorithm.advantage in ("gae", "reinforce_plus_plus")
    kept = algorithm.gamma**max_response_tokens
    if discounts and kept < MIN_DISCOUNT:
        yield (
            f"config.algorithm.gamma: {algorithm.gamma:g} leaves {kept:.1g} of a reward at the end"
            f" of {max_response_tokens} tokens (rollout.max_response_tokens) for the first; use 1.0"
        )
    if algorithm.correction != "none" and not algorithm.correction_high:
        yield (
            "config.algorithm.correction_high: 0 makes every importance weight 0: no token has a"
            " gradient; raise it, for example to 2.0"
        )


def reward_warnings(rewards: RewardsConfig, environments: bool) -> Iterator[str]:
    """Rewards that are the same whatever is answered."""
    weights = [term.weight for term in rewards.reward_terms.values()]
    if environments:
        weights.append(rewards.environment_weight)
    if weights and not any(weights):
        yield "config.rewards: all weights are 0, so that every score is 0; raise one"


def precision_warnings(
    model: ModelConfig, lora: LoraConfig, rates: Mapping[str, float]
) -> Iterator[str]:
    """Updates that rounding loses; `rates` are the peak learning rates by their field's path.

    >>> model, rates = ModelConfig(param_dtype="bfloat16"), {"trainer.optimizer": 1e-6}
    >>> [warning.partition(":")[0] for warning in precision_warnings(model, LoraConfig(), rates)]
    ['config.model.param_dtype']
    """
    low = {name: rate for name, rate in rates.items() if 0 < rate < MIN_BFLOAT16_RATE}
    if model.param_dtype != "bfloat16" or lora.rank or not low:  # adapters are float32
        return
    said = ", ".join(f"{name}={rate:g}" for name, rate in low.items())
    yield (
        f"config.model.param_dtype: 'bfloat16' has 8 bits, and {said} moves a weight by less than"
        " half of its last one: rounding loses nearly all updates; use param_dtype='float32'"
        " (compute_dtype='bfloat16' keeps its speed), or lora.rank"
    )


def trainer_warnings(trainer: TrainerConfig) -> Iterator[str]:
    """A trainer that moves no weight."""
    if not (trainer.optimizer.learning_rate or trainer.tower_learning_rate):
        yield "config.trainer.optimizer.learning_rate: 0 trains nothing; raise it"


def reference_warnings(loss: PreferenceLossConfig, reference: ReferenceConfig) -> Iterator[str]:
    """A reference model that the preference loss does not read.

    >>> [w.partition(":")[0] for w in reference_warnings(
    ...     PreferenceLossConfig(loss="orpo"), ReferenceConfig(path="folder"))]
    ['config.reference.path']
    """
    if reference.path and not loss.reads_reference:
        yield f"config.reference.path: no effect, dpo.loss={loss.loss!r} has no reference"
