"""What a tower sees in images: each is read once by the same weights, whatever samples there are.

A frozen tower has the same weights in the whole run. One that learns reads images here for the
engine and for critics; the policy's own programs read them themselves (`eyes`).
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
from jaxrl_llm.data.packing import PackedBatch, Shown, bucket
from jaxrl_llm.data.pictures import Pictures
from jaxrl_llm.models import patches
from jaxrl_llm.models.patches import Grid
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.models.tower import Tower
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Picture, Prompt, Rollouts

KEPT_BYTES = 1 << 31  # of vectors on the host, beside those of the step
FEWEST = 64  # vectors of a batch; batches have so many, twice as many, ...


class Gallery:
    """Vectors of images by a tower, on the host; those that were not used longest go."""

    def __init__(
        self,
        tower: Tower,
        pictures: Pictures,
        mesh: Mesh,
        load: Callable[[], Params],
        learns: bool = False,
    ):
        """`load` gives the parameters of a frozen tower, when the first image is read.

        Those of one that `learns` come by `renew`.
        """
        self.tower, self.pictures, self._mesh, self._load = tower, pictures, mesh, load
        self.learns = learns
        self._lock = threading.Lock()  # a server renews weights while it reads
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

    def renew(self, params: Params) -> None:
        """Takes a copy of new parameters of the tower; what older ones saw is forgotten."""
        with self._lock, jax.set_mesh(self._mesh):
            self._params = _copied(params)
            self._kept.clear()

    def joined(self, network: Network, params: Params) -> tuple[Network, Params]:
        """Returns a decoder with the tower, as a model folder has both."""
        if self.learns:
            return network, params  # it has it
        shape = dataclasses.replace(network.shape, vision=self.tower.vision)
        return dataclasses.replace(network, shape=shape), {**params, "vision": self.params}

    def vectors(self, images: Iterable[Picture]) -> dict[str, Float[np.ndarray, "_ D"]]:
        """Returns the vectors of images by their digests."""
        with self._lock:
            return self._vectors(images)

    def _vectors(self, images: Iterable[Picture]) -> dict[str, Float[np.ndarray, "_ D"]]:
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
        for group, rows in self._in_rows(images, mesh_lib.row_shards(self._mesh)[0]):
            with jax.set_mesh(self._mesh):
                found = self.read(self.params, rows.pixels, rows.places, rows.images)
            whole = np.asarray(found).reshape(-1, self.tower.out_size)
            for i, at in zip(group, rows.vectors, strict=True):
                yield images[i].digest, whole[at]
            self.num_read += len(group)

    def _in_rows(
        self, images: Sequence[Picture], num_rows: int, most: int = patches.MOST
    ) -> Iterator[tuple[list[int], patches.Rows]]:
        """Yields which images the tower reads together, and their patches in so many rows.

        Rows that hold several images have `most` patches.
        """
        vision = self.tower.vision
        made = [self.pictures.patches(image) for image in images]
        prepared = [(Grid(*grid), pixels) for grid, pixels in made]
        for group in patches.groups([grid for grid, _ in prepared], vision, num_rows, most):
            yield group, patches.in_rows([prepared[i] for i in group], vision, num_rows)

    def _narrow(self, images: Sequence[Picture]) -> tuple[int, int]:
        """Returns rows that the tower reads together, and their width, that of the largest image.

        What a layer of whole images compares grows with the width.
        """
        vision, (shards, _) = self.tower.vision, mesh_lib.row_shards(self._mesh)
        sizes = [patches.num_places(Grid(*image.grid).split(vision), vision) for image in images]
        width = patches.width(max(sizes, default=0))
        rows = max(1, -(-sum(sizes) // (width * shards)))
        most = max(1, patches.TOGETHER // width)
        return shards * bucket(min(rows, most), largest=most), width

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
        reads: bool = True,
    ) -> Mapping[str, np.ndarray]:
        """Returns what packed rows carry of sequences: `parts`, `seen`, `vectors`; or nothing.

        Unless it `reads`, the vectors are zero: the learner's programs read the images themselves.
        """
        if not any(images):
            return {}
        starts, size = _starts(images)
        table = np.zeros((size, self.tower.out_size), self._dtype)
        if reads:
            for digest, vectors in self.vectors(image for row in images for image in row).items():
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
        return self.of_sequences(_images(rollouts), rollouts.lengths, rollouts.tokens.shape[1])

    def showing(self, packed: PackedBatch, rollouts: Rollouts) -> PackedBatch:
        """Returns `shown` of sampled sequences."""
        return self.shown(packed, _images(rollouts))

    def shown(self, packed: PackedBatch, images: Sequence[Sequence[Picture]]) -> PackedBatch:
        """Returns a batch with the images of its own sequences, `images` those of the whole step.

        They stand in groups of as many rows, all of one width; few sizes mean few programs.
        """
        starts, size = _starts(images)
        order = np.full(size, -1, np.int32)
        own = {i.digest: i for row in np.flatnonzero(packed.chosen).tolist() for i in images[row]}
        wanted = list(own.values())
        vision, (num_rows, most) = self.tower.vision, self._narrow(wanted)
        found = list(self._in_rows(wanted, num_rows, most))
        width = max((rows.images.shape[1] for _, rows in found), default=patches.FEWEST)
        per_row, count = width // vision.merge_size**2, bucket(len(found))
        pixels = np.zeros((count, num_rows, width, vision.patch_dims), np.float32)
        places = np.zeros((count, num_rows, width, 2), np.int32)
        of_image = np.zeros((count, num_rows, width), np.int32)
        for number, (group, rows) in enumerate(found):
            narrow = rows.images.shape[1]
            pixels[number, :, :narrow] = rows.pixels
            places[number, :, :narrow] = rows.places
            of_image[number, :, :narrow] = rows.images
            for i, at in zip(group, rows.vectors, strict=True):
                row, column = np.divmod(at, narrow // vision.merge_size**2)
                start = starts[wanted[i].digest]
                order[start : start + len(at)] = (number * num_rows + row) * per_row + column
        given: Any = order
        split = self._split
        shown = Shown(split(pixels), split(places), split(of_image), given)
        return dataclasses.replace(packed, shown=shown)

    def _split(self, array: np.ndarray) -> jax.Array:
        dims = (None, "batch", *[None] * (array.ndim - 2))
        sharding = mesh_lib.sharding_of(array.shape, dims, self._mesh)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.tower.compute_dtype))


def check(config: RLConfig, prompts: Sequence[Prompt], replays: bool) -> None:
    """Raises ConfigError for what a run whose prompts have images cannot do."""
    problems = refused(config, replays)
    if problems and any(prompt.images for prompt in prompts):
        raise ConfigError(problems)


def refused(config: RLConfig, replays: bool) -> list[str]:
    """Returns what of a run does not go with images, in prompts or from tools."""
    unsuited = {
        "placement.choice": (
            config.placement.choice != "colocate",
            "roles on devices of their own",
        ),
        "rewards.models": (config.has_scorers, "reward or cost models"),
        "distillation.teachers": (bool(config.distillation.teachers), "teachers"),
        "replay": (replays, "dumps, which hold no images"),
        "trainer.sampling": (config.trainer.sampling == "async", "samples ahead of their step"),
    }
    return [
        f"config.{name}: prompts with images do not go with {what}; leave it out"
        for name, (is_set, what) in unsuited.items()
        if is_set
    ]


def _images(rollouts: Rollouts) -> Sequence[Sequence[Picture]]:
    return rollouts.images or [rollouts.prompts[group].images for group in rollouts.group_ids]


def _starts(images: Sequence[Sequence[Picture]]) -> tuple[dict[str, int], int]:
    """Returns where in a table of vectors each image begins, and the size of the table."""
    starts: dict[str, int] = {}
    total = 0
    for image in (image for row in images for image in row):
        if image.digest not in starts:
            starts[image.digest], total = total, total + image.num_tokens
    return starts, bucket(total, smallest=FEWEST)


@jax.jit
def _copied(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def _positions(images: Sequence[Picture], num_tokens: int) -> Int[np.ndarray, "tokens 3"]:
    starts, grids = [image.start for image in images], [Grid(*image.grid) for image in images]
    return patches.positions(num_tokens, starts, grids)
