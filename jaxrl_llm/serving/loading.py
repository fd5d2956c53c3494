"""A policy to serve: what clients may know of it, and an engine for it."""

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.learner import sampler
from jaxrl_llm.learner.saved import SavedPolicy
from jaxrl_llm.rollout import capacity
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.serving.transcript import decoder
from jaxrl_llm.serving.wanted import Served


def served(source: SavedPolicy, name: str = "", max_tokens: int = 0) -> Served:
    """Returns what clients may know of a policy; "" and 0 stand for the source's own values."""
    models = source.models
    if backend := getattr(models.tokenizer, "backend_tokenizer", None):
        # tokenizer.json may cut and pad prompts. Changing that between two calls would also keep
        # another thread from decoding meanwhile.
        backend.no_truncation()
        backend.no_padding()
    return Served(
        name=name or source.name,
        tokenizer=models.tokenizer,
        eos_tokens=models.eos_tokens,
        vocab_size=models.policy.shape.vocab_size,
        max_tokens=max_tokens or source.max_tokens,
        chat_template=source.config.data.chat_template,
    )


def engine(
    source: SavedPolicy,
    model: Served,
    num_slots: int = 0,
    chunk_steps: int = 8,
    draft_tokens: int = 0,
) -> Engine:
    """Returns an engine for serving; fewer `chunk_steps` make streams smoother, more cost less.

    Without `num_slots` it has 16 on CPU, 64 elsewhere, fewer where memory is short.
    """
    models = source.models
    mesh, max_tokens = models.meshes["rollout"], model.max_tokens
    network = sampler.rollout_network(source.config.rollout, models.policy, mesh)
    most = 16 if models.platform == "cpu" else 64
    return Engine(
        network,
        mesh,
        num_slots=num_slots or capacity.num_slots(network, mesh, max_tokens, most, draft_tokens),
        max_tokens=max_tokens,
        chunk_steps=chunk_steps,
        layout=source.sampler.engine.layout,
        speculation=SpeculationConfig(draft_tokens=draft_tokens),
        decode=decoder(model.tokenizer),
    )
