"""A model to serve: from a Hugging Face folder, or from the folder of a run."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax

from jaxrl_llm.config import MeshConfig, ModelConfig, RLConfig, SpeculationConfig
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import sampler as sampler_lib
from jaxrl_llm.learner import saved
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.models import Models
from jaxrl_llm.models import huggingface
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
    config: RLConfig
    models: Models
    max_tokens: int  # prompt and reply, by default
    read: Callable[[], Params]  # the newest weights, in the rollout layout


def from_folder(path: str, dtype: str = "", tensor: int = 1) -> Source:
    """Returns the model of a Hugging Face folder.

    Args:
      path: With config.json, safetensors and the tokenizer's files.
      dtype: Of weights and arithmetic; "" is bfloat16 on accelerators, float32 on CPU.
      tensor: Devices that share each layer; the others serve slots of their own.

    Raises:
      UserError: If the folder, or so many devices, cannot be used.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    config = RLConfig(
        model=ModelConfig(path=path, param_dtype=dtype, compute_dtype=dtype),  # type: ignore[arg-type]
        mesh=MeshConfig(tensor=tensor),
    )
    models = models_lib.of_job(config)
    huggingface.check(path, models.policy)
    sampler = sampler_lib.build(config, models, {})
    return Source(
        name=pathlib.Path(path).resolve().name,
        config=config,
        models=models,
        max_tokens=min(models.policy.shape.max_positions, _MOST_TOKENS),
        read=lambda: sampler.weights(weights_lib.initial_policy(config, models)),
    )


def from_run(workdir: str) -> Source:
    """Returns the policy of a run; each reading takes its newest checkpoint.

    Raises:
      UserError: If it is not the folder of a run, or holds no undamaged checkpoint.
    """
    found = saved.load_policy(workdir)
    unused = [found.params]

    def read() -> Params:
        return found.sampler.weights(unused.pop() if unused else saved.load_policy(workdir).params)

    return Source(
        name=pathlib.Path(workdir).resolve().name,
        config=found.config,
        models=found.models,
        max_tokens=found.config.max_sequence_tokens,
        read=read,
    )


def served(source: Source, name: str = "", max_tokens: int = 0) -> Served:
    """Returns what clients may know of a model; "" and 0 are the source's own."""
    tokenizer = source.models.tokenizer
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # Settings of tokenizer.json that cut prompts; and changed between two calls, they would
        # not let another thread decode meanwhile.
        backend.no_truncation()
        backend.no_padding()
    return Served(
        name=name or source.name,
        tokenizer=tokenizer,
        eos_tokens=source.models.eos_tokens,
        vocab_size=source.models.policy.shape.vocab_size,
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
    mesh = source.models.meshes["rollout"]
    network = sampler_lib.rollout_network(source.config.rollout, source.models.policy, mesh)
    most = 16 if source.models.platform == "cpu" else 64
    return Engine(
        network,
        mesh,
        num_slots=num_slots
        or capacity.num_slots(network, mesh, model.max_tokens, most, draft_tokens),
        max_tokens=model.max_tokens,
        chunk_steps=chunk_steps,
        speculation=SpeculationConfig(draft_tokens=draft_tokens),
        decode=decoder(model.tokenizer),
    )
