"""What a frozen tower sees in images: each is read once, whatever samples and epochs there are."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.data.pictures import Pictures
from jaxrl_llm.models import patches
from jaxrl_llm.models.patches import Grid
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.models.tower import Tower
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Picture, Prompt, Rollouts

KEPT_BYTES = 1 << 31  # of vectors on the host, beside those of the step
_FEWEST = 64  # vectors of a batch; batches have so many, twice as many, ...


class Gallery:
    """Vectors of images by a frozen tower, on the host; those that were not used longest go."""

    def __init__(self, tower: Tower, pictures: Pictures, mesh: Mesh, load: Callable[[], Params]):
        """`load` gives the tower's parameters, when the first image is read."""
        self.tower, self.pictures, self._mesh, self._load = tower, pictures, mesh, load
        self._params: Params = {}
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self.num_read = 0  # images that the tower has read
        self.read = jax.jit(tower.read, out_shardings=mesh_lib.replicated(mesh))

    @property
    def params(self) -> Params:
        """The tower's parameters, in the training layout."""
        if not self._params:
            self._params = self._load()
        return self._params

    def joined(self, network: Network, params: Params) -> tuple[Network, Params]:
        """Returns a decoder with the tower, as a model folder has both."""
        shape = dataclasses.replace(network.shape, vision=self.tower.vision)
        return dataclasses.replace(network, shape=shape), {**params, "vision": self.params}

    def vectors(self, images: Iterable[Picture]) -> dict[str, Float[np.ndarray, "_ D"]]:
        """Returns the vectors of images by their digests."""
        wanted = {image.digest: image for image in images}
        found = {}
        for digest in wanted.keys() & self._kept.keys():
            self._kept.move_to_end(digest)
            found[digest] = self._kept[digest]
        # In the order in which they came: all processes read the same together.
        missing = [image for digest, image in wanted.items() if digest not in found]
        for digest, vectors in self._read(missing):
            found[digest] = self._kept[digest] = vectors
        size = sum(vectors.nbytes for vectors in self._kept.values())
        while size > KEPT_BYTES and self._kept:
            size -= self._kept.popitem(last=False)[1].nbytes
        return found

    def _read(self, images: Sequence[Picture]):
        if not images:
            return
        vision = self.tower.vision
        num_rows, _ = mesh_lib.row_shards(self._mesh)
        made = [self.pictures.patches(image) for image in images]
        prepared = [(Grid(*grid), pixels) for grid, pixels in made]
        for group in patches.groups([grid for grid, _ in prepared], vision, num_rows):
            rows = patches.in_rows([prepared[i] for i in group], vision, num_rows)
            with jax.set_mesh(self._mesh):
                found = self.read(self.params, rows.pixels, rows.places, rows.images)
            whole = np.asarray(found).reshape(-1, self.tower.out_size)
            for i, at in zip(group, rows.vectors, strict=True):
                yield images[i].digest, whole[at]
            self.num_read += len(group)

    def sights(self, images: Sequence[Picture], num_tokens: int) -> Sights | None:
        """Returns what images are to a sequence of so many tokens: a row; None without images."""
        if not images:
            return None
        of_image = self.vectors(images)
        at, where = np.full((1, num_tokens), -1), 0
        for image in images:
            at[0, image.start : image.start + image.num_tokens] = where + np.arange(
                image.num_tokens
            )
            where += image.num_tokens
        vectors: Any = np.concatenate([of_image[image.digest] for image in images])
        on_host: tuple[Any, Any] = _positions(images, num_tokens)[None], at
        return Sights(*on_host, vectors)

    def of_sequences(
        self,
        images: Sequence[Sequence[Picture]],
        lengths: Int[np.ndarray, " B"],
        width: int,
    ) -> Mapping[str, np.ndarray]:
        """Returns what packed rows carry of sequences: `parts`, `seen`, `vectors`; or nothing."""
        if not any(images):
            return {}
        of_image = self.vectors(image for row in images for image in row)
        starts, total = {}, 0
        for digest, vectors in of_image.items():
            starts[digest], total = total, total + len(vectors)
        table = np.zeros((bucket(total, smallest=_FEWEST), self.tower.out_size), self._dtype)
        for digest, vectors in of_image.items():
            table[starts[digest] : starts[digest] + len(vectors)] = vectors
        parts = np.zeros((len(images), width, 3), np.int32)
        seen = np.full((len(images), width, 1), -1, np.int32)
        for row, own in enumerate(images):
            parts[row, : lengths[row]] = _positions(own, int(lengths[row]))
            for image in own:
                inside = slice(image.start, image.start + image.num_tokens)
                seen[row, inside, 0] = starts[image.digest] + np.arange(image.num_tokens)
        return {"parts": parts, "seen": seen, "vectors": table}

    def of_rollouts(self, rollouts: Rollouts) -> Mapping[str, np.ndarray]:
        """Returns `of_sequences` of sampled sequences."""
        images = [rollouts.prompts[group].images for group in rollouts.group_ids]
        return self.of_sequences(images, rollouts.lengths, rollouts.tokens.shape[1])

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.tower.compute_dtype))


def check(config: RLConfig, prompts: Sequence[Prompt], replays: bool) -> None:
    """Raises ConfigError for what a run whose prompts have images cannot do."""
    if not any(prompt.images for prompt in prompts):
        return
    refused = {
        "agent": (config.agent.is_used, "tools and environments"),
        "placement.choice": (
            config.placement.choice != "colocate",
            "roles on devices of their own",
        ),
        "rewards.models": (config.has_scorers, "reward or cost models"),
        "distillation.teachers": (bool(config.distillation.teachers), "teachers"),
        "replay": (replays, "dumps, which hold no images"),
        "trainer.sampling": (config.trainer.sampling == "ahead", "samples ahead of their step"),
        "trainer.layouts": (bool(config.trainer.layouts), "layouts that change"),
    }
    problems = [
        f"config.{name}: prompts with images do not go with {what}; leave it out"
        for name, (is_set, what) in refused.items()
        if is_set
    ]
    if problems:
        raise ConfigError(problems)


def _positions(images: Sequence[Picture], num_tokens: int) -> Int[np.ndarray, "tokens 3"]:
    starts, grids = [image.start for image in images], [Grid(*image.grid) for image in images]
    return patches.positions(num_tokens, starts, grids)
