"""A model to serve: from a Hugging Face folder, or from the folder of a run."""

import dataclasses
import pathlib
from collections.abc import Callable

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.learner import saved
from jaxrl_llm.learner.roles import Roles
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import capacity
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.serving.transcript import decoder
from jaxrl_llm.serving.wanted import Served

_MOST_TOKENS = 4096  # by default, where the model would take more


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model comes from, its weights not yet read."""

    name: str
    roles: Roles
    max_tokens: int  # prompt and reply, by default
    read: Callable[[], Params]  # the newest weights, in the rollout layout


def from_folder(path: str, dtype: str = "", tensor: int = 1) -> Source:
    """Returns the model of a Hugging Face folder.

    Args: See `saved.model_config`.

    Raises:
      UserError: If the folder, or so many devices, cannot be used.
    """
    roles = saved.model_roles(saved.model_config(path, dtype, tensor))
    return Source(
        name=pathlib.Path(path).resolve().name,
        roles=roles,
        max_tokens=min(roles.policy.shape.max_positions, _MOST_TOKENS),
        read=lambda: roles.rollout_layout(roles_lib.initial_policy(roles)),
    )


def from_run(workdir: str) -> Source:
    """Returns the policy of a run; each reading takes its newest checkpoint.

    Raises:
      UserError: If it is not the folder of a run, or holds no undamaged checkpoint.
    """
    roles, first, _ = saved.load_policy(workdir)
    unused = [first]

    def read() -> Params:
        params = unused.pop() if unused else saved.load_policy(workdir)[1]
        return roles.rollout_layout(params)

    return Source(
        name=pathlib.Path(workdir).resolve().name,
        roles=roles,
        max_tokens=roles.config.max_sequence_tokens,
        read=read,
    )


def served(source: Source, name: str = "", max_tokens: int = 0) -> Served:
    """Returns what clients may know of a model; "" and 0 are the source's own."""
    roles = source.roles
    tokenizer = roles.tokenizer
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # Settings of tokenizer.json that cut prompts; and changed between two calls, they would
        # not let another thread decode meanwhile.
        backend.no_truncation()
        backend.no_padding()
    return Served(
        name=name or source.name,
        tokenizer=tokenizer,
        eos_tokens=roles.eos_tokens,
        vocab_size=roles.policy.shape.vocab_size,
        max_tokens=max_tokens or source.max_tokens,
        chat_template=roles.config.data.chat_template,
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
    roles = source.roles
    mesh = roles.meshes["rollout"]
    network = roles_lib.rollout_network(roles.config, roles.policy, mesh)
    most = 16 if roles.platform == "cpu" else 64
    return Engine(
        network,
        mesh,
        num_slots=num_slots
        or capacity.num_slots(network, mesh, model.max_tokens, most, draft_tokens),
        max_tokens=model.max_tokens,
        chunk_steps=chunk_steps,
        layout=roles.engine.layout,
        speculation=SpeculationConfig(draft_tokens=draft_tokens),
        decode=decoder(model.tokenizer),
    )
