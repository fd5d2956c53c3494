"""The model under the policies that callers train: loaded once, shared by all adapters."""

import dataclasses
import functools

import jax

from jaxrl_llm.config import ConfigError, LoraConfig, RLConfig
from jaxrl_llm.config.rollout_data import BUILT_IN_ENGINE
from jaxrl_llm.learner import job_models, weights
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.training_api.programs import PolicyPrograms


@dataclasses.dataclass(frozen=True)
class PolicyBase:
    """A base model with its networks; the programs of each set of adapter shapes are made once."""

    config: RLConfig
    models: Models
    params: Params  # in the training layout
    adapter_dtype: str = ""  # of adapters; "": that of the base

    def network(self, lora: LoraConfig) -> Network:
        """The policy's network with adapters of these shapes."""
        policy = self.models.policy
        dtype = self.adapter_dtype if lora.rank and self.adapter_dtype else policy.param_dtype
        return dataclasses.replace(policy, lora=lora, param_dtype=dtype)

    @functools.cached_property
    def _programs(self) -> dict[LoraConfig, PolicyPrograms]:
        return {}

    def programs(self, lora: LoraConfig) -> PolicyPrograms:
        """The compiled programs of policies with adapters of these shapes."""
        if lora not in self._programs:
            network = self.network(lora)
            self._programs[lora] = PolicyPrograms(self.config, self.models, network)
        return self._programs[lora]


def load_base(config: RLConfig) -> PolicyBase:
    """Checks a config and loads its model.

    Raises:
      ConfigError: If the config asks for what only jobs do.
      UserError: If the model folder cannot be used.
    """
    check_config(config)
    config = resolve_sizes.resolve_unsaved(config)
    models = job_models.make_models(config)
    weights.check_folders(config, models, [])
    return PolicyBase(config, models, weights.initial_policy(config, models))


def check_config(config: RLConfig) -> None:
    """Raises ConfigError with every setting that only jobs support."""
    router = config.router
    refused = {
        "placement.choice": config.placement.choice not in ("colocate", "auto"),
        "mesh.on_host": bool(config.mesh.on_host),
        "rollout.engine": config.rollout.engine != BUILT_IN_ENGINE,
        "trainer.tower_learning_rate": config.trains_vision_tower,
        "router": bool(router.balance_coef or router.z_coef or router.bias_rate)
        or router.replay != "off",
    }
    problems = [
        f"config.{name}: only jobs support it (`jaxrl_llm train`); leave it at its default"
        for name, is_set in refused.items()
        if is_set
    ]
    if jax.process_count() > 1:
        problems.append(
            f"config: {jax.process_count()} processes; a training session runs in one. Use a job"
        )
    if problems:
        raise ConfigError(problems)
