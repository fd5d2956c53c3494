"""The policy of a finished or running run, read from its folder."""

import dataclasses
import os
import pathlib

from jaxrl_llm.checkpoint import saver as saver_lib
from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import rl_config
from jaxrl_llm.config.folder import load_config
from jaxrl_llm.learner import automatic
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import sampler as sampler_lib
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.sampler import Sampler
from jaxrl_llm.models.transformer import Params


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """The policy of a run."""

    config: RLConfig
    models: Models
    sampler: Sampler  # with the base of adapters, if there are any
    params: Params  # as it was trained: whole, or adapters
    step: int  # it was saved after


def load_policy(workdir: str | os.PathLike[str], best: bool = False) -> SavedPolicy:
    """Returns the newest saved policy of a run, on the devices of this process.

    Critics, optimizers and frozen models are left unread.

    Args:
      workdir: Folder of a finished or running run.
      best: Take the policy of the best `checkpoint.best_metric` instead of the newest.

    Raises:
      ConfigError: If `workdir` is not the folder of a run.
      CheckpointError: If it holds no undamaged checkpoint.
    """
    config, workdir = rl_config(load_config(workdir)), pathlib.Path(workdir)
    models = models_lib.of_job(config, automatic.meshes(config))
    base: Params = {}
    shapes, shardings = models.policy.abstract(), models.policy_shardings
    if config.lora.rank:
        base = _base(config, models, workdir)
        shapes = models.policy.abstract_adapters()
        shardings = models_lib.adapter_shardings(models.policy, models.mesh)
    abstract = weights_lib.with_shardings(shapes, shardings)
    saver = saver_lib.Saver(workdir / "checkpoints", config.checkpoint, read_only=True)
    wanted = saver.best_step() if best else 0
    if best and not wanted:
        raise saver_lib.CheckpointError(
            f"{workdir}: no best step; config.checkpoint.best_metric was"
            f" {config.checkpoint.best_metric!r}, or no saved step had it"
        )
    state, _, step = saver.restore({"policy": {"params": abstract}}, partial=True, step=wanted)
    saver.close()
    sampler = sampler_lib.build(config, models, base)
    return SavedPolicy(config, models, sampler, state["policy"]["params"], step)


def _base(config: RLConfig, models: Models, workdir: pathlib.Path) -> Params:
    """Returns the policy as RL found it: of the warm start, or of where the run began."""
    product = workdir / "warm_start" / "product"
    if not product.exists():
        return weights_lib.initial_policy(config, models)
    abstract = weights_lib.with_shardings(models.policy.abstract(), models.policy_shardings)
    return saver_lib.load_tree(product, abstract)[0]
