"""Checks of settings against layers that keep a state, before weights are loaded."""

import logging

from jaxrl_llm.config import JobConfig
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.recurrent.sequence_memory import has_state

logger = logging.getLogger(__name__)

PREFIX_CACHING_NOTE = (
    "prefix caching is off: this model's gated delta net layers keep a state, and that after a"
    " prefix is not kept"
)
SHARED_PROMPTS_NOTE = (
    "trainer.shared_prompts: off for a model with gated delta net layers, whose state after a"
    " prompt is not given to several samples; each sample is computed with its own prompt"
)


def check_settings(config: JobConfig, shape: Architecture) -> None:
    """Logs settings that have no effect with layers that keep a state."""
    if has_state(shape) and config.trainer.shared_prompts == "auto":
        logger.info("%s", SHARED_PROMPTS_NOTE)
