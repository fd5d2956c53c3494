"""A cache of image features: the vision tower encodes each image once per version of its weights.

A frozen tower has the same weights in the whole run. A trainable one encodes images here for the
engine and for critics; the policy's own programs encode them themselves (`eyes`).
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.config.rollout_data import VLLM_ENGINE
from jaxrl_llm.data.images import ImagePreprocessor
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.models.vision import patches
from jaxrl_llm.models.vision.encoder import VisionEncoder
from jaxrl_llm.models.vision.patches import PatchGrid
from jaxrl_llm.packing.packed_batch import ImageBatch, PackedBatch, bucket
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Prompt, PromptImage, Rollouts

MAX_CACHE_BYTES = 1 << 31  # of cached features on the host, beside those of the step
MIN_FEATURES = 64  # features of a batch; batches have this number, twice as many, ...


class ImageFeatureCache:
    """Features of images by a vision tower, on the host; the least recently used are evicted."""

    def __init__(
        self,
        tower: VisionEncoder,
        image_processor: ImagePreprocessor | None,
        mesh: Mesh,
        load: Callable[[], Params],
        learns: bool = False,
    ):
        """Without an `image_processor` it keeps the tower for exports, and encodes no image.

        `load` reads the parameters of a frozen tower, when the first image is encoded.

        Those of a tower that `is_trainable` are set by `update_params`.
        """
        self.tower, self.image_processor = tower, image_processor
        self._mesh, self._load = mesh, load
        self.is_trainable = learns
        self._lock = threading.Lock()  # a server renews weights while it reads
        self._tower_params: Params = {}
        self._cache: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self.num_encoded = 0  # images that the tower has encoded
        self.encode = jax.jit(tower.encode, out_shardings=mesh_lib.replicated(mesh))

    @property
    def params(self) -> Params:
        """The tower's parameters, in the training layout."""
        if not self._tower_params:
            self._tower_params = self._load()
        return self._tower_params

    def update_params(self, params: Params) -> None:
        """Copies new parameters of the tower, and drops the features by older ones."""
        with self._lock, jax.set_mesh(self._mesh):
            self._tower_params = _copy_params(params)
            self._cache.clear()

    def with_tower(self, network: Network, params: Params) -> tuple[Network, Params]:
        """A decoder and its parameters with the tower added, as a model folder has both."""
        if self.is_trainable:
            return network, params  # its tower is in them already
        shape = dataclasses.replace(network.shape, vision=self.tower.vision)
        return dataclasses.replace(network, shape=shape), {**params, "vision": self.params}

    def features(self, images: Iterable[PromptImage]) -> dict[str, Float[np.ndarray, "_ D"]]:
        """The features of images, by digest."""
        with self._lock:
            return self._cached_features(images)

    def _cached_features(
        self, images: Iterable[PromptImage]
    ) -> dict[str, Float[np.ndarray, "_ D"]]:
        by_digest = {image.digest: image for image in images}
        features = {}
        for digest in by_digest.keys() & self._cache.keys():
            self._cache.move_to_end(digest)
            features[digest] = self._cache[digest]
        # In the order of the images, not of a set: all processes encode the same ones together.
        missing = [image for digest, image in by_digest.items() if digest not in features]
        for digest, image_features in self._encode_missing(missing):
            features[digest] = self._cache[digest] = image_features
        size = sum(image_features.nbytes for image_features in self._cache.values())
        while size > MAX_CACHE_BYTES and self._cache:
            size -= self._cache.popitem(last=False)[1].nbytes
        return features

    def _encode_missing(self, images: Sequence[PromptImage]):
        if not images:
            return
        for group, rows in self._patch_rows(images, mesh_lib.num_row_shards(self._mesh)[0]):
            with jax.set_mesh(self._mesh):
                outputs = self.encode(self.params, rows.pixels, rows.coordinates, rows.image_ids)
            all_features = np.asarray(outputs).reshape(-1, self.tower.feature_size)
            for i, slots in zip(group, rows.embedding_indices, strict=True):
                yield images[i].digest, all_features[slots]
            self.num_encoded += len(group)

    def _patch_rows(
        self,
        images: Sequence[PromptImage],
        num_rows: int,
        max_patches: int = patches.MAX_SHARED_ROW_PATCHES,
    ) -> Iterator[tuple[list[int], patches.PatchRows]]:
        """Yields the images that the tower encodes together, and their patches in `num_rows` rows.

        Rows that hold several images have `max_patches` patches.
        """
        vision = self.tower.vision
        assert self.image_processor is not None
        loaded = [self.image_processor.patches(image) for image in images]
        prepared = [(PatchGrid(*grid), pixels) for grid, pixels in loaded]
        for group in patches.image_batches(
            [grid for grid, _ in prepared], vision, num_rows, max_patches
        ):
            yield group, patches.pack_images([prepared[i] for i in group], vision, num_rows)

    def _batch_rows(self, images: Sequence[PromptImage]) -> tuple[int, int]:
        """The number of rows that the tower encodes together, and their width: the largest image.

        The cost of a layer with attention over whole images grows with the width.
        """
        vision, (shards, _) = self.tower.vision, mesh_lib.num_row_shards(self._mesh)
        sizes = [
            patches.num_padded_patches(PatchGrid(*image.grid).to_patch_grid(vision), vision)
            for image in images
        ]
        width = patches.row_width(max(sizes, default=0))
        rows = max(1, -(-sum(sizes) // (width * shards)))
        max_rows = max(1, patches.MAX_TRAINED_PATCHES // width)
        return shards * bucket(min(rows, max_rows), largest=max_rows), width

    def image_inputs(self, images: Sequence[PromptImage], num_tokens: int) -> ImageInputs | None:
        """The images of one sequence as inputs of the decoder, one row; None without images."""
        if not images:
            return None
        features = self.features(images)
        feature_index, offset = np.full((1, num_tokens), -1), 0
        for image in images:
            feature_index[0, image.start : image.start + image.num_tokens] = offset + np.arange(
                image.num_tokens
            )
            offset += image.num_tokens
        vectors: Any = np.concatenate([features[image.digest] for image in images])
        on_host: tuple[Any, Any] = _mrope_positions(images, num_tokens)[None], feature_index
        return ImageInputs(*on_host, vectors)

    def token_fields(
        self,
        images: Sequence[Sequence[PromptImage]],
        lengths: Int[np.ndarray, " B"],
        width: int,
        encodes: bool = True,
    ) -> Mapping[str, np.ndarray]:
        """The per-token fields `mrope_positions`, `image_index` and the features `vectors`; {}
        without images.

        Without `encodes` the features are zero: the learner's programs encode the images
        themselves.
        """
        if not any(images):
            return {}
        offsets, size = _table_offsets(images)
        table = np.zeros((size, self.tower.feature_size), self._dtype)
        if encodes:
            for digest, vectors in self.features(image for row in images for image in row).items():
                table[offsets[digest] : offsets[digest] + len(vectors)] = vectors
        mrope_positions = np.zeros((len(images), width, 3), np.int32)
        image_index = np.full((len(images), width, 1), -1, np.int32)
        for row, sequence_images in enumerate(images):
            mrope_positions[row, : lengths[row]] = _mrope_positions(
                sequence_images, int(lengths[row])
            )
            for image in sequence_images:
                inside = slice(image.start, image.start + image.num_tokens)
                image_index[row, inside, 0] = offsets[image.digest] + np.arange(image.num_tokens)
        return {
            "mrope_positions": mrope_positions,
            "image_index": image_index,
            "image_features": table,
        }

    def rollout_token_fields(self, rollouts: Rollouts) -> Mapping[str, np.ndarray]:
        """The fields of `token_fields` for sampled sequences."""
        return self.token_fields(
            _images_by_sequence(rollouts), rollouts.lengths, rollouts.tokens.shape[1]
        )

    def with_rollout_images(self, packed: PackedBatch, rollouts: Rollouts) -> PackedBatch:
        """The batch of `with_images` for sampled sequences."""
        return self.with_images(packed, _images_by_sequence(rollouts))

    def with_images(
        self, packed: PackedBatch, images: Sequence[Sequence[PromptImage]]
    ) -> PackedBatch:
        """A batch with the images of its own sequences; `image_ids` are those of the whole step.

        All groups have the same number of rows and one width; few sizes mean few programs.
        """
        offsets, size = _table_offsets(images)
        order = np.full(size, -1, np.int32)
        by_digest = {
            i.digest: i for row in np.flatnonzero(packed.is_member).tolist() for i in images[row]
        }
        unique_images = list(by_digest.values())
        vision, (num_rows, max_patches) = self.tower.vision, self._batch_rows(unique_images)
        groups = list(self._patch_rows(unique_images, num_rows, max_patches))
        width = max(
            (rows.image_ids.shape[1] for _, rows in groups), default=patches.MIN_ROW_PATCHES
        )
        features_per_row, count = width // vision.merge_size**2, bucket(len(groups))
        pixels = np.zeros((count, num_rows, width, vision.patch_dims), np.float32)
        places = np.zeros((count, num_rows, width, patches.NUM_COORDINATES), np.int32)
        image_ids = np.zeros((count, num_rows, width), np.int32)
        for g, (group, rows) in enumerate(groups):
            group_width = rows.image_ids.shape[1]
            pixels[g, :, :group_width] = rows.pixels
            places[g, :, :group_width] = rows.coordinates
            image_ids[g, :, :group_width] = rows.image_ids
            for i, slots in zip(group, rows.embedding_indices, strict=True):
                row, column = np.divmod(slots, group_width // vision.merge_size**2)
                start = offsets[unique_images[i].digest]
                order[start : start + len(slots)] = (g * num_rows + row) * features_per_row + column
        feature_order: Any = order
        to_device = self._to_device
        shown = ImageBatch(
            to_device(pixels), to_device(places), to_device(image_ids), feature_order
        )
        return dataclasses.replace(packed, images=shown)

    def _to_device(self, array: np.ndarray) -> jax.Array:
        dims = (None, "batch", *[None] * (array.ndim - 2))
        sharding = mesh_lib.activation_sharding(array.shape, dims, self._mesh)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.tower.compute_dtype))


def check_image_support(config: RLConfig, prompts: Sequence[Prompt], replays: bool) -> None:
    """Raises ConfigError if prompts have images and a setting of the run does not support them."""
    problems = unsupported_settings(config, replays)
    if problems and any(prompt.images for prompt in prompts):
        raise ConfigError(problems)


def unsupported_settings(config: RLConfig, replays: bool) -> list[str]:
    """Error texts for the settings of a run that do not support images of prompts or tools."""
    unsupported = {
        "placement.choice": (
            config.placement.choice != "colocate",
            "roles on devices of their own",
        ),
        "rewards.models": (config.has_scorers, "reward or cost models"),
        "distillation.teachers": (bool(config.distillation.teachers), "teachers"),
        "replay": (replays, "dumps, which hold no images"),
        "rollout.engine": (config.rollout.engine == VLLM_ENGINE, "the engine of vLLM"),
        "trainer.sampling": (config.trainer.sampling == "async", "samples ahead of their step"),
    }
    return [
        f"config.{name}: prompts with images do not go with {feature}; leave it out"
        for name, (is_set, feature) in unsupported.items()
        if is_set
    ]


def _images_by_sequence(rollouts: Rollouts) -> Sequence[Sequence[PromptImage]]:
    return rollouts.images or [rollouts.prompts[group].images for group in rollouts.group_ids]


def _table_offsets(images: Sequence[Sequence[PromptImage]]) -> tuple[dict[str, int], int]:
    """The offset of each image, by digest, in a table of features, and the size of the table."""
    offsets: dict[str, int] = {}
    total = 0
    for image in (image for row in images for image in row):
        if image.digest not in offsets:
            offsets[image.digest], total = total, total + image.num_tokens
    return offsets, bucket(total, smallest=MIN_FEATURES)


@jax.jit
def _copy_params(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def _mrope_positions(images: Sequence[PromptImage], num_tokens: int) -> Int[np.ndarray, "tokens 3"]:
    starts, grids = [image.start for image in images], [PatchGrid(*image.grid) for image in images]
    return patches.mrope_positions(num_tokens, starts, grids)
