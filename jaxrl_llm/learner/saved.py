"""A policy read from a folder: of a finished or running run, or a model's own."""

import dataclasses
import os
import pathlib

import jax

from jaxrl_llm import checkpoint
from jaxrl_llm.config import Config, LoraConfig, MeshConfig, ModelConfig
from jaxrl_llm.config.folder import load_config
from jaxrl_llm.learner import networks
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.learner.roles import Roles
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.transformer import Params


def load_policy(workdir: str | os.PathLike[str], best: bool = False) -> tuple[Roles, Params, int]:
    """Returns the roles of a run, its newest saved policy, and the step it was saved after.

    With LoRA the policy is its adapters, and the roles have the base that they belong to:
    `Roles.whole_policy` and `Roles.rollout_layout` put the two together.

    Critics, optimizers and frozen models are left unread; the mesh is that of this process.

    Args:
      workdir: Folder of a finished or running run.
      best: Take the policy of the best `checkpoint.best_metric` instead of the newest.

    Raises:
      ConfigError: If `workdir` is not the folder of a run.
      CheckpointError: If it holds no undamaged checkpoint.
    """
    config = load_config(workdir)
    roles = roles_lib.build(config)
    if config.lora.rank:
        roles = dataclasses.replace(roles, base_params=_base(roles, pathlib.Path(workdir)))
    params, step = _restore(config, roles, pathlib.Path(workdir), best)
    return roles, params, step


def model_config(path: str, dtype: str = "", tensor: int = 1) -> Config:
    """Returns the config of a model folder that is only asked, by the defaults of a run.

    Args:
      path: With config.json, safetensors and the tokenizer's files.
      dtype: Of weights and arithmetic; "" is bfloat16 on accelerators, float32 on CPU.
      tensor: Devices that share each layer; the others have slots of their own.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return Config(
        model=ModelConfig(path=path, param_dtype=dtype, compute_dtype=dtype),  # type: ignore[arg-type]
        mesh=MeshConfig(tensor=tensor),
    )


def model_roles(config: Config) -> Roles:
    """Returns the roles of the model in the folder `config.model.path`, its weights not yet read.

    They are `roles.initial_policy`. Adapters are of runs, so there are none here.

    Raises:
      UserError: If the folder cannot be used.
    """
    roles = roles_lib.build(dataclasses.replace(config, lora=LoraConfig()))
    huggingface.check(config.model.path, roles.policy)
    return roles


def _base(roles: Roles, workdir: pathlib.Path) -> Params:
    """Returns the policy as RL found it: of the warm start, or of where the run began."""
    folder = workdir / "warm_start"
    if not folder.exists():
        return roles_lib.initial_policy(roles)
    return checkpoint.load_tree(folder, _placed(roles.policy.abstract(), roles.policy_shardings))[0]


def _restore(config: Config, roles: Roles, workdir: pathlib.Path, best: bool) -> tuple[Params, int]:
    if config.lora.rank:
        shardings = networks.adapter_shardings(roles.policy, roles.mesh)
        abstract = _placed(roles.policy.abstract_adapters(), shardings)
    else:
        abstract = _placed(roles.policy.abstract(), roles.policy_shardings)
    saver = checkpoint.Saver(workdir / "checkpoints", config.checkpoint, read_only=True)
    wanted = saver.best_step() if best else 0
    if best and not wanted:
        raise checkpoint.CheckpointError(
            f"{workdir}: no best step; config.checkpoint.best_metric was"
            f" {config.checkpoint.best_metric!r}, or no saved step had it"
        )
    state, _, step = saver.restore({"policy": {"params": abstract}}, partial=True, step=wanted)
    saver.close()
    return state["policy"]["params"], step


def _placed(shapes: Params, shardings: Params) -> Params:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
    )
