"""What a run learned, in its folder; or a policy in a model's own."""

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
from jaxrl_llm.config.folder import load_config
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import planned, stored
from jaxrl_llm.learner import sampler as sampler_lib
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.sampler import Sampler
from jaxrl_llm.models import huggingface, lora
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.types import Weights

MOST_TOKENS = 4096  # of prompt and answer, where none is asked for and a model would take more


@dataclasses.dataclass(frozen=True)
class Learned:
    """The newest or best weights of a run: a policy's, or a reward model's."""

    config: JobConfig
    models: Models
    network: Network
    base: Params  # what its adapters are added to; empty without adapters
    # Returns the weights as trained (whole, or adapters) and the step of their save.
    read: Callable[[], tuple[Params, int]]

    def whole(self, params: Params) -> Params:
        """Returns the weights without adapters that `params` amount to, in the training layout."""
        if not self.base:
            return params
        mesh = self.models.mesh
        merge = jax.jit(
            models_lib.merge_adapters(self.network.lora),
            out_shardings=models_lib.train_shardings(self.network, mesh),
        )
        with jax.set_mesh(mesh):
            return merge(lora.joined(self.base, params))


def learned(workdir: str | os.PathLike[str], best: bool = False) -> Learned:
    """Returns what a finished or running run learned, or its `best` by `checkpoint.best_metric`.

    Critics, optimizers and frozen models are not read.

    Raises:
      ConfigError: If `workdir` is not the folder of a run.
      CheckpointError: If there is no checkpoint, or, when it is read, none is undamaged.
    """
    config, folder = load_config(workdir), pathlib.Path(workdir)
    steps = (each for each in folder.glob("checkpoints/*") if each.name.isdecimal())
    if all(map(saver_lib.is_empty, steps)):
        message = f"{folder / 'checkpoints'}: no complete checkpoint; wait until the run has saved"
        raise saver_lib.CheckpointError(f"{message} one (checkpoint.every), or name another run")
    models = models_lib.of_job(config, planned.meshes(config))
    network = models.value if config.trained_head == "scalar" else models.policy
    base: Params = {}
    if config.lora.rank:  # adapters lie on the weights that the run began with
        product = folder / "warm_start" / "product"
        if product.exists():
            wanted = weights_lib.abstract_params(network, models.mesh)
            load = functools.partial(saver_lib.load_tree, product)
            first = stored.restored(load, wanted, network.shape)[0]
        else:
            first = weights_lib.initial(config, models)
        base = {name: value for name, value in first.items() if name != "score"}
    read = functools.partial(_newest, config, models, network, folder, best)
    return Learned(config, models, network, base, read)


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """A policy in a folder, and what is needed to sample from it."""

    name: str  # of its folder
    config: RLConfig  # of its run, or the defaults of one
    models: Models
    sampler: Sampler  # with the base of its adapters, if it has any
    max_tokens: int  # of prompt and answer together, where none is asked for
    # Returns the newest weights as trained (whole, or adapters) and the step of their save.
    read: Callable[[], tuple[Params, int]]

    def weights(self) -> Weights:
        """Returns the newest weights for sampling."""
        params, step = self.read()
        return Weights(self.sampler.weights(params), step)


def from_run(workdir: str | os.PathLike[str], best: bool = False) -> SavedPolicy:
    """Returns the policy of a run, ready to be sampled; raises as `learned`.

    Raises:
      ConfigError: If the run trains no policy.
    """
    config = load_config(workdir).as_rl()
    found = learned(workdir, best)
    return SavedPolicy(
        name=pathlib.Path(workdir).resolve().name,
        config=config,
        models=found.models,
        sampler=sampler_lib.build(config, found.models, found.base),
        max_tokens=config.max_sequence_tokens,
        read=found.read,
    )


def from_model(config: RLConfig) -> SavedPolicy:
    """Returns the policy in the model folder `config.model.path`; adapters are of runs alone.

    Raises:
      UserError: If the folder cannot be used.
    """
    config = dataclasses.replace(config, lora=LoraConfig())
    models = models_lib.of_job(config)
    huggingface.check(config.model.path, models.policy)
    return SavedPolicy(
        name=pathlib.Path(config.model.path).resolve().name,
        config=config,
        models=models,
        sampler=sampler_lib.build(config, models, {}),
        max_tokens=min(models.policy.shape.max_positions, MOST_TOKENS),
        read=lambda: (weights_lib.initial_policy(config, models), 0),
    )


def model_config(path: str, dtype: str = "", tensor: int = 1) -> RLConfig:
    """Returns the config of a model folder that is not trained, otherwise the defaults of a run.

    `dtype` "" is bfloat16 on accelerators, float32 on CPU. `tensor` devices share each layer; the
    others have slots of their own.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return RLConfig(
        model=ModelConfig(path=path, param_dtype=dtype, compute_dtype=dtype),  # type: ignore[arg-type]
        mesh=MeshConfig(tensor=tensor),
    )


def _newest(
    config: JobConfig, models: Models, network: Network, workdir: pathlib.Path, best: bool
) -> tuple[Params, int]:
    saver = saver_lib.Saver(workdir / "checkpoints", config.checkpoint, read_only=True)
    wanted = saver.best_step() if best else 0
    if best and not wanted:
        raise saver_lib.CheckpointError(
            f"{workdir}: no best step; config.checkpoint.best_metric was"
            f" {config.checkpoint.best_metric!r}, or no saved step had it"
        )
    tree: Any = weights_lib.abstract_trained(network, models.mesh)
    for name in reversed(config.trained_in_checkpoint):
        tree = {name: tree}
    read = functools.partial(saver.restore, partial=True, step=wanted)
    state, _, step = stored.restored(read, tree, network.shape)
    saver.close()
    for name in config.trained_in_checkpoint:
        state = state[name]
    return state, step
