"""The policy's tower while it learns: it reads the images of a batch inside the learner's programs.

A frozen tower reads them beside these programs, once for all (`gallery`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.config import JobConfig
from jaxrl_llm.data.packing import PackedBatch, Shown
from jaxrl_llm.models.tower import Tower
from jaxrl_llm.models.transformer import Network, Params


@dataclasses.dataclass(frozen=True)
class Eyes:
    """A tower that learns."""

    tower: Tower
    learning_rate: float

    def see(self, params: Params, shown: Shown) -> Float[Array, "vectors D"]:
        """Returns the vectors of a batch by the tower's parameters; zero where none is.

        One group of rows is read after another; unless `model.remat` is "none" the backward pass
        reads it again, so that what layers keep is of one group alone.
        """

        def read(group: Any):
            return self.tower.read(params, *group)

        one = read if self.tower.remat == "none" else jax.checkpoint(read)
        found = jax.lax.map(one, (shown.pixels, shown.places, shown.images))
        found = found.reshape(-1, found.shape[-1])
        return jnp.where(shown.order[:, None] >= 0, found[jnp.maximum(shown.order, 0)], 0)

    def seen(self, params: Params, packed: PackedBatch) -> PackedBatch:
        """Returns a batch with the vectors of its images by parameters of a policy."""
        assert packed.shown is not None
        found = self.see(params["vision"], packed.shown)
        return dataclasses.replace(packed, vectors=found, shown=None)


def of(config: JobConfig, network: Network) -> Eyes | None:
    """Returns what reads images for a network in its learner's programs; None: nothing there."""
    if network.shape.vision is None:
        return None
    return Eyes(network.tower, config.trainer.tower_learning_rate)
