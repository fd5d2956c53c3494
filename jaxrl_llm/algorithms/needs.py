"""What a run must have, because its functions read it.

Functions name what they read by their parameters. These names decide which models a run has,
whether each prompt gets a greedy sample, and whether the policy computes log-probs before the
update.
"""

import dataclasses
import functools
from collections.abc import Iterator

from jaxrl_llm.algorithms.advantages import ESTIMATORS
from jaxrl_llm.algorithms.lookup import declared, resolve
from jaxrl_llm.algorithms.losses import POLICY_LOSSES
from jaxrl_llm.algorithms.selection import SELECTIONS
from jaxrl_llm.config import AlgorithmConfig, RLConfig

# What the policy computes in a pass over the step before the update.
_OF_POLICY = frozenset({"old_log_probs", "sum_squared_probs", "entropies"})


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the functions of an algorithm read."""

    before_update: frozenset[str]  # advantage, KL in the reward, corrections, selection
    in_update: frozenset[str]  # policy loss and KL in the loss

    @property
    def critic(self) -> bool:
        return "values" in self.before_update | self.in_update

    @property
    def cost_critic(self) -> bool:
        return "cost_values" in self.before_update | self.in_update

    @property
    def num_critics(self) -> int:
        return self.critic + self.cost_critic

    @property
    def reference(self) -> bool:
        return "ref_log_probs" in self.before_update | self.in_update

    @property
    def greedy_baseline(self) -> bool:
        """Whether each prompt gets a greedy sample, whose score is the baseline of the others."""
        return "baselines" in self.before_update

    @property
    def old_log_probs(self) -> bool:
        """Whether the policy computes them before the update, even if a step is one update."""
        return bool(_OF_POLICY & self.before_update)


@functools.lru_cache(maxsize=64)
def of(config: AlgorithmConfig) -> Needs:
    """Returns what the functions that the config names read.

    Raises:
      ValueError, ImportError, AttributeError, TypeError: As `lookup.resolve` does.

    >>> needs = of(AlgorithmConfig(advantage="gae", kl_in="loss"))
    >>> needs.critic, needs.reference, needs.greedy_baseline, needs.old_log_probs
    (True, True, False, False)
    >>> of(AlgorithmConfig(advantage="remax")).greedy_baseline
    True
    """
    advantage = declared(resolve(config.advantage, ESTIMATORS, "advantage estimator"))
    loss = declared(resolve(config.policy_loss, POLICY_LOSSES, "policy loss"))
    before, in_update = set(advantage.names), set(loss.names)
    if advantage.takes_rest:
        # It gets all that the run has: the policy's pass, but no further model.
        before |= _OF_POLICY
    if config.kl_in == "reward":
        before |= {"old_log_probs", "ref_log_probs"}
    if config.correction != "none" or config.rejections:
        before |= {"old_log_probs", "rollout_log_probs"}
    if config.policy_loss in SELECTIONS:
        before.add("old_log_probs")
    if config.safe:
        before |= {"values", "cost_values", "old_log_probs"}
    if config.kl_in == "loss":
        in_update.add("ref_log_probs")
    return Needs(frozenset(before), frozenset(in_update))


def warnings(config: RLConfig) -> Iterator[str]:
    """Yields settings of models that nothing reads.

    >>> list(warnings(RLConfig()))
    []
    """
    needs, advantage = of(config.algorithm), config.algorithm.advantage
    if not needs.reference and config.reference.path:
        yield "config.reference.path: no effect, algorithm.kl_in is 'none'"
    if not needs.critic and config.critic.path:
        yield f"config.critic.path: no effect, advantage={advantage!r} has no critic"
    if not needs.critic and config.algorithm.critic_warmup_steps:
        yield "config.algorithm.critic_warmup_steps: no effect without a critic"
