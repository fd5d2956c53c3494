"""The policy's vision tower in training: it encodes images inside the learner's programs.

A frozen tower encodes each image once, outside these programs (`gallery`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.config import JobConfig
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.models.vision.encoder import VisionEncoder
from jaxrl_llm.packing.packed_batch import ImageBatch, PackedBatch


@dataclasses.dataclass(frozen=True)
class TrainableVisionEncoder:
    """A vision tower that is trained with the policy."""

    tower: VisionEncoder
    learning_rate: float

    def encode(self, params: Params, images: ImageBatch) -> Float[Array, "vectors D"]:
        """Encodes the images of a batch into one embedding per patch group; padding slots are zero.

        Groups of rows are encoded one after another. Unless `model.remat` is "none" the backward
        pass encodes a group again, so that activations of one group alone are in memory.
        """

        def encode_group(group: Any):
            return self.tower.encode(params, *group)

        checkpointed = encode_group if self.tower.remat == "none" else jax.checkpoint(encode_group)
        features = jax.lax.map(
            checkpointed, (images.pixels, images.patch_positions, images.image_ids)
        )
        features = features.reshape(-1, features.shape[-1])
        return jnp.where(
            images.feature_order[:, None] >= 0, features[jnp.maximum(images.feature_order, 0)], 0
        )

    def with_image_features(self, params: Params, packed: PackedBatch) -> PackedBatch:
        """A batch with the embeddings of its images, by the policy's parameters `params`."""
        assert packed.images is not None
        features = self.encode(params["vision"], packed.images)
        return dataclasses.replace(packed, image_features=features, images=None)


def make_vision_encoder(config: JobConfig, network: Network) -> TrainableVisionEncoder | None:
    """The encoder to train with the network, or None if it is text-only or its tower is frozen."""
    if network.shape.vision is None:
        return None
    return TrainableVisionEncoder(network.vision_encoder, config.trainer.tower_learning_rate)
