"""A policy to serve: what clients may know of it, and an engine for it."""

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.learner import sampler
from jaxrl_llm.learner.saved import Source
from jaxrl_llm.rollout import capacity
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.serving.transcript import decoder
from jaxrl_llm.serving.wanted import Served


def served(source: Source, name: str = "", max_tokens: int = 0) -> Served:
    """Returns what clients may know of a policy.

    Args:
      source: Where it comes from.
      name: What they call it; "": the name of its folder.
      max_tokens: Prompt and reply; 0: the source's own.
    """
    models = source.models
    tokenizer = models.tokenizer
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # Settings of tokenizer.json that cut prompts; and changed between two calls, they would
        # not let another thread decode meanwhile.
        backend.no_truncation()
        backend.no_padding()
    return Served(
        name=name or source.name,
        tokenizer=tokenizer,
        eos_tokens=models.eos_tokens,
        vocab_size=models.policy.shape.vocab_size,
        max_tokens=max_tokens or source.max_tokens,
        chat_template=source.config.data.chat_template,
    )


def engine(
    source: Source,
    model: Served,
    num_slots: int = 0,
    chunk_steps: int = 8,
    draft_tokens: int = 0,
) -> Engine:
    """Returns an engine of its own for serving.

    Args:
      num_slots: Samples decoded at one time; 0: 16 on CPU, 64 elsewhere, fewer where the memory
        is short (see `capacity.num_slots`).
      chunk_steps: Most tokens of a sample between two looks of the host: fewer make streams
        smoother, more cost less.
      draft_tokens: Guesses from the text so far in a decode step; see `SpeculationConfig`.
    """
    models = source.models
    mesh = models.meshes["rollout"]
    network = sampler.rollout_network(source.config.rollout, models.policy, mesh)
    most = 16 if models.platform == "cpu" else 64
    return Engine(
        network,
        mesh,
        num_slots=num_slots
        or capacity.num_slots(network, mesh, model.max_tokens, most, draft_tokens),
        max_tokens=model.max_tokens,
        chunk_steps=chunk_steps,
        layout=source.sampler.engine.layout,
        speculation=SpeculationConfig(draft_tokens=draft_tokens),
        decode=decoder(model.tokenizer),
    )
