"""Builds what answers the policy in episodes: tools and environments, or a black-box agent."""

from typing import TYPE_CHECKING

from jaxrl_llm.agents.agent_pool import AgentError
from jaxrl_llm.agents.env_manager import EnvManager
from jaxrl_llm.agents.episode import call_format
from jaxrl_llm.config import RLConfig
from jaxrl_llm.data.images import ImagePreprocessor
from jaxrl_llm.learner.job_models import Models

if TYPE_CHECKING:  # its packages are an extra
    from jaxrl_llm.serving.sessions.harness_manager import HarnessManager


def make_agent_host(
    config: RLConfig, models: Models, image_processor: ImagePreprocessor | None = None
) -> "EnvManager | HarnessManager":
    """Starts the processes of `config.agent`; AgentError if they cannot be used.

    Args:
      image_processor: Reads the images of tools and environments; None for a text-only run.
    """
    if not config.agent.harness:
        return EnvManager(config.agent, models.tokenizer, image_processor)
    try:
        from jaxrl_llm.serving.protocol import ServedModel
        from jaxrl_llm.serving.sessions.harness_manager import HarnessManager
    except ModuleNotFoundError as error:
        raise AgentError(
            f"config.agent.harness: a package is missing ({error.name}) that serves its requests;"
            " pip install 'jaxrl_llm[serve]'"
        ) from error
    served = ServedModel(
        name=config.model.path or "policy",
        tokenizer=models.tokenizer,
        eos_tokens=models.eos_tokens,
        vocab_size=models.policy.shape.vocab_size,
        max_tokens=config.max_sequence_tokens,
        chat_template=config.data.chat_template,
        call_format=call_format(config.agent, models.tokenizer),
        constrains_replies=config.rollout.support_tokens > 0,
    )
    judged_sources = {term.data_source for term in config.rewards.reward_terms.values()}
    return HarnessManager(config.agent, served, judged_sources)
