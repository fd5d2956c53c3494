"""The policy of a finished or running run, read from its folder."""

import os
import pathlib

import jax

from jaxrl_llm import checkpoint
from jaxrl_llm.config import Config
from jaxrl_llm.config_bridge import load_config
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.learner.roles import Roles
from jaxrl_llm.models.transformer import Params


def load_policy(workdir: str | os.PathLike[str]) -> tuple[Roles, Params, int]:
    """Returns the roles of a run, its newest saved policy, and the step it was saved after.

    Critics, optimizers and frozen models are left unread; the mesh is that of this process.

    Raises:
      ConfigError: If `workdir` is not the folder of a run.
      CheckpointError: If it holds no undamaged checkpoint.
    """
    config = load_config(workdir)
    roles = roles_lib.build(config)
    params, step = _restore(config, roles, pathlib.Path(workdir))
    return roles, params, step


def _restore(config: Config, roles: Roles, workdir: pathlib.Path) -> tuple[Params, int]:
    abstract = jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        roles.policy.abstract(),
        roles.policy_shardings,
    )
    saver = checkpoint.Saver(workdir / "checkpoints", config.checkpoint)
    state, _, step = saver.restore({"policy": {"params": abstract}}, partial=True)
    saver.close()
    return state["policy"]["params"], step
