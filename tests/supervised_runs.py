"""A supervised run on given rows, with the weights that it began with."""

import dataclasses

import jax
import numpy as np

from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import supervised


def train_on_rows(job, rows, workdir, monkeypatch):
    """The state at the end of a run on one device, its objective, and its first weights."""
    seen = {}
    make, initial = supervised._OBJECTIVES[job.job], weights_lib.initial_params

    def objective(config, models):
        seen["objective"] = make(config, models)
        return dataclasses.replace(seen["objective"], rows=lambda split: rows)

    def begin(config, models):
        params = initial(config, models)
        seen["before"] = jax.tree.map(np.asarray, params)
        return params

    monkeypatch.setitem(supervised._OBJECTIVES, job.job, objective)
    monkeypatch.setattr(weights_lib, "initial_params", begin)
    with mesh_lib.use_devices(jax.devices()[:1]):
        state = supervised.train(job, workdir)
    return state, seen["objective"], seen["before"]
