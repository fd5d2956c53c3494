"""Checks of settings against layers that keep a state, before weights are loaded."""

import logging

from jaxrl_llm.config import ConfigError, JobConfig
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.recurrent.sequence_memory import has_state

logger = logging.getLogger(__name__)

SPECULATION_PROBLEM = (
    "drafts that are rejected cannot be taken back from the state of this model's gated delta net"
    " layers; use draft_tokens=0"
)
PREFIX_CACHING_NOTE = (
    "prefix caching is off: this model's gated delta net layers keep a state, and that after a"
    " prefix is not kept"
)
SHARED_PROMPTS_NOTE = (
    "trainer.shared_prompts: off for a model with gated delta net layers, whose state after a"
    " prompt is not given to several samples; each sample is computed with its own prompt"
)


def check_settings(config: JobConfig, shape: Architecture) -> None:
    """Raises ConfigError on settings that a model with states cannot have.

    Logs settings that have no effect.
    """
    if not has_state(shape):
        return
    if config.learns_from_samples:
        drafts = config.require_rl().rollout.speculation.draft_tokens
        check_draft_tokens("config.rollout.speculation.draft_tokens", drafts, shape)
    if config.trainer.shared_prompts == "auto":
        logger.info("%s", SHARED_PROMPTS_NOTE)


def check_draft_tokens(setting: str, draft_tokens: int, shape: Architecture) -> None:
    """Raises ConfigError on speculation with a model that has states; `setting` is its name."""
    if draft_tokens and has_state(shape):
        raise ConfigError(f"{setting}: {draft_tokens}, but {SPECULATION_PROBLEM}")
