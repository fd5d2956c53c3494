"""Loads the trained weights of a run's folder, or the policy of a model folder."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.checkpoint import saver as saver_lib
from jaxrl_llm.config import (
    JobConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    RLConfig,
)
from jaxrl_llm.config.workdir import load_config
from jaxrl_llm.learner import job_models, layer_restacking
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.models import lora
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.planning.model_names import pin_models
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sampling.policy_sampler import PolicySampler
from jaxrl_llm.storage import files, model_folder
from jaxrl_llm.types import Weights

DEFAULT_MAX_TOKENS = 4096  # default limit of prompt and answer, if the model allows more


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """The newest or best weights of a run: a policy's, or a reward model's."""

    config: JobConfig
    models: Models
    network: Network
    base: Params  # base weights of its adapters; empty without adapters
    # Reads the trained parameters (full, or adapters) and the step of their checkpoint.
    read_params: Callable[[], tuple[Params, int]]

    def full_params(self, params: Params) -> Params:
        """Merges adapters in `params` into full weights of `plain_network`, in its layout.

        The base is dequantized first, if it is quantized.
        """
        if not self.base:
            return params
        mesh = self.models.mesh
        merge_adapters = job_models.adapter_merger(self.network.lora)
        merge = jax.jit(
            lambda tree: merge_adapters(job_models.plain_params(self.network, tree)),
            out_shardings=job_models.train_shardings(self.plain_network, mesh),
        )
        with jax.set_mesh(mesh):
            return merge(lora.combine_params(self.base, params))

    @property
    def plain_network(self) -> Network:
        """The network of `full_params`, for exports."""
        return self.network.unquantized


def load_run(workdir: str | os.PathLike[str], best: bool = False) -> SavedRun:
    """The newest weights of a finished or running run, or the best by `checkpoint.best_metric`.

    Critics, optimizers and frozen models are not read.

    Raises:
      ConfigError: If `workdir` is not the folder of a run.
      CheckpointError: If there is no checkpoint, or, when it is read, none is undamaged.
    """
    config, folder = load_config(workdir), files.run_path(workdir)
    saved = folder / "checkpoints"
    steps = (saved / name for name in files.names(saved) if name.isdecimal())
    if all(map(saver_lib.is_empty, steps)):
        message = f"{folder / 'checkpoints'}: no complete checkpoint; wait until the run has saved"
        raise saver_lib.CheckpointError(f"{message} one (checkpoint.every), or name another run")
    models = job_models.make_models(config, resolve_sizes.resolved_meshes(config))
    network = models.value if config.trained_head == "scalar" else models.policy
    base: Params = {}
    if config.lora.rank:  # base weights are those that the run began with
        product = folder / "warm_start" / "product"
        if saver_lib.tree_exists(product):
            abstract = weights_lib.abstract_params(network, models.mesh)
            load = functools.partial(saver_lib.load_tree, product)
            initial_params = layer_restacking.restore_restacked(load, abstract, network.shape)[0]
        else:
            initial_params = weights_lib.initial_params(config, models)
        base = {name: value for name, value in initial_params.items() if name != "score"}
    read = functools.partial(_read_checkpoint, config, models, network, folder, best)
    return SavedRun(config, models, network, base, read)


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """A policy from a folder, ready to sample from."""

    name: str  # of the folder
    config: RLConfig  # of its run, or the defaults
    models: Models
    sampler: PolicySampler  # holds the base weights of adapters, if any
    max_tokens: int  # default limit of prompt and answer together
    # Reads the newest trained parameters (full, or adapters) and the step of their checkpoint.
    read_params: Callable[[], tuple[Params, int]]

    def weights(self) -> Weights:
        """The newest weights in the rollout layout."""
        params, step = self.read_params()
        return Weights(self.sampler.weights(params), step)


def policy_from_run(workdir: str | os.PathLike[str], best: bool = False) -> SavedPolicy:
    """The policy of a run, ready to sample from; raises as `load_run`.

    Raises:
      ConfigError: If the run trains no policy.
    """
    config = load_config(workdir).as_rl()
    run = load_run(workdir, best)
    return SavedPolicy(
        name=files.folder_name(workdir),
        config=config,
        models=run.models,
        sampler=policy_sampler.make_sampler(config, run.models, run.base),
        max_tokens=config.max_sequence_tokens,
        read_params=run.read_params,
    )


def policy_from_model(config: RLConfig) -> SavedPolicy:
    """The policy of the model `config.model.path`, by any address, without adapters.

    Raises:
      UserError: If the folder cannot be used.
    """
    config = pin_models(dataclasses.replace(config, lora=LoraConfig()))
    models = job_models.make_models(config)
    checkpoint.check(config.model.path, models.policy)
    return SavedPolicy(
        name=model_folder.model_name(config.model.path),
        config=config,
        models=models,
        sampler=policy_sampler.make_sampler(config, models, {}),
        max_tokens=min(models.policy.shape.max_positions, DEFAULT_MAX_TOKENS),
        read_params=lambda: (weights_lib.initial_policy(config, models), 0),
    )


def sampling_config(path: str, dtype: str = "", tensor: int = 1) -> RLConfig:
    """A config for sampling from a model, by any address, with the defaults of a run otherwise.

    `dtype` "" is bfloat16 on accelerators, float32 on CPU. `tensor` is the tensor-parallel size;
    the remaining devices sample other sequences.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return RLConfig(
        model=ModelConfig(path=path, param_dtype=dtype, compute_dtype=dtype),  # type: ignore[arg-type]
        mesh=MeshConfig(tensor=tensor),
    )


def _read_checkpoint(
    config: JobConfig, models: Models, network: Network, workdir: pathlib.Path, best: bool
) -> tuple[Params, int]:
    saver = saver_lib.Saver(workdir / "checkpoints", config.checkpoint, read_only=True)
    step_to_read = saver.best_step() if best else 0
    if best and not step_to_read:
        raise saver_lib.CheckpointError(
            f"{workdir}: no best step; config.checkpoint.best_metric was"
            f" {config.checkpoint.best_metric!r}, or no saved step had it"
        )
    tree: Any = weights_lib.abstract_trained(network, models.mesh)
    for name in reversed(config.trained_in_checkpoint):
        tree = {name: tree}
    read = functools.partial(saver.restore, partial=True, step=step_to_read)
    state, _, step = layer_restacking.restore_restacked(read, tree, network.shape)
    saver.close()
    for name in config.trained_in_checkpoint:
        state = state[name]
    return state, step
