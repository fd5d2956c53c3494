"""What the jobs on given answers learn: their rows, batches of them, and losses on microbatches."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms import losses, masked
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.config import JobConfig
from jaxrl_llm.config.job import DPOConfig
from jaxrl_llm.data import datasets, packing, streams
from jaxrl_llm.data.packing import Microbatch, PackedBatch
from jaxrl_llm.data.streams import Rows
from jaxrl_llm.data.tasks import Split
from jaxrl_llm.learner import eyes, predict, routing, wide
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.eyes import Eyes
from jaxrl_llm.learner.models import Models
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models import lora
from jaxrl_llm.models.router import Routed, Routing
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Example, Pair

# Sequences that must be in one microbatch: an example, or the two of a pair.
Row = Sequence[Example]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The sequences of one update; those of a pair side by side, the chosen one first."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    mask: Bool[Array, "B T"]  # tokens that bear loss
    ref_log_probs: Float[Array, "B T"]  # of the frozen reference; zero without one
    packed: PackedBatch

    @classmethod
    def of(
        cls, rows: Sequence[Row], packer: Packer, width: int = 0, models: Models | None = None
    ) -> "Batch":
        """Returns rows as right-padded arrays, packed; sequences of a row share a packed row.

        With `models` whose tower reads images, those of the rows are in it.

        `width` is of the arrays and the packed rows; 0: as the longest row needs.
        """
        sequences = [example for row in rows for example in row]
        lengths = np.array([len(example.tokens) for example in sequences], np.int32)
        in_row = len(rows[0])
        width = width or width_of(rows)
        tokens = np.zeros((len(sequences), width), np.int32)
        mask = np.zeros((len(sequences), width), bool)
        for i, example in enumerate(sequences):
            tokens[i, : lengths[i]] = example.tokens
            mask[i, : lengths[i]] = example.mask
        groups = np.repeat(np.arange(len(rows)), in_row)
        together = packing.Beginnings(groups, np.zeros_like(groups), together=in_row > 1)
        packed = packer.pack(lengths, np.arange(len(lengths)), width=width, common=together)
        if models is not None and models.gallery is not None:
            images = [example.images for example in sequences]
            gallery = models.gallery
            found = gallery.of_sequences(images, lengths, width, reads=not gallery.learns)
            packed = wide.carried(packed, models.mesh, **found)
            if gallery.learns:
                packed = gallery.shown(packed, images)
        # They go to the devices with the program.
        on_host: tuple[Any, Any, Any] = tokens, lengths, mask
        blank: Any = np.zeros(tokens.shape, np.float32)
        return cls(*on_host, blank, packed)


def longest(rows: Rows[Row]) -> int:
    """Returns the tokens of the longest row."""
    return streams.longest(rows, lambda row: sum(len(example.tokens) for example in row))


def width_of(rows: Rows[Row]) -> int:
    """Returns the width of packed rows that hold each of these."""
    return packing.bucket(longest(rows), smallest=32)


@dataclasses.dataclass(frozen=True)
class Objective:
    """What one job learns."""

    name: str  # its metrics begin with it
    network: Network  # that learns
    mesh: Mesh
    rows: Callable[[Split], Rows[Row]]
    # loss(params, microbatch, batch): its part of the batch's loss, and metrics to be summed
    loss: Callable[[Params, Microbatch, Batch], tuple[Array, Mapping[str, Array]]]
    # told(microbatch, batch): what routers are told; None without experts, or where none counts.
    told: Callable[[Microbatch, Batch], Routing | None]
    # How much a batch counts in a mean over several.
    weight: Callable[[Batch], float]
    models: Models
    # log_probs(params, microbatch, batch): of all tokens [b, T]; where a reference is asked for
    log_probs: Callable[[Params, Microbatch, Batch], Float[Array, "b T"]] | None = None
    eyes: Eyes | None = None  # read the images of batches, where the tower learns

    def reader(self, batch: Batch) -> predict.Reader:
        """Returns how the network reads a batch."""
        told = lambda microbatch: self.told(microbatch, batch)  # noqa: E731
        return predict.Reader(self.network, batch.tokens, told, self.eyes)


def sft(config: JobConfig, models: Models) -> Objective:
    """Returns cross-entropy of worked answers: a mean over all of their tokens in a batch."""

    def rows(split: Split) -> Rows[Row]:
        given = config.data, models.tokenizer, split, config.seed, config.max_sequence_tokens
        found = datasets.worked_examples(*given, pictures=models.pictures)
        return streams.mapped(found, lambda example: (example,))

    told = functools.partial(_told, config, models.policy)

    def loss(params: Params, microbatch: Microbatch, batch: Batch):
        to_routers = told(microbatch, batch)
        log_probs, likeliest, routed = _log_probs(
            config, models, params, microbatch, batch, to_routers
        )
        mask, denominators = microbatch.take(batch.mask), minibatch_denominators(batch.mask)
        found = losses.token_cross_entropy(log_probs, likeliest, mask, denominators)
        return _with_routers(config, found, routed, batch)

    weight = lambda batch: float(batch.mask.sum())  # noqa: E731
    given = models.policy, models.mesh, rows, loss, told, weight, models
    return Objective("sft", *given, eyes=eyes.of(config, models.policy))


def reward_model(
    config: JobConfig, models: Models, name: str = "reward_model", costs: bool = False
) -> Objective:
    """Returns Bradley and Terry's loss on the preference pairs of a model's name.

    With `costs` a high score is bad: of each pair the rejected answer gets the higher one.
    """

    def rows(split: Split) -> Rows[Row]:
        pairs = _pairs_of(config, models, split, name)
        return streams.mapped(pairs, lambda p: Pair(p.rejected, p.chosen)) if costs else pairs

    told = functools.partial(_told, config, models.value)

    def loss(params: Params, microbatch: Microbatch, batch: Batch):
        to_routers = told(microbatch, batch)
        scores, routed = predict.sequence_scores(
            models.value, params, batch.tokens, batch.lengths, microbatch, to_routers
        )
        here, (chosen, rejected) = _by_pair(microbatch, batch, scores)
        found = losses.bradley_terry(chosen, rejected, here, len(batch.tokens) // 2)
        return _with_routers(config, found, routed, batch)

    mesh = models.meshes["reward"]
    return Objective("reward_model", models.value, mesh, rows, loss, told, _num_pairs, models)


def dpo(config: DPOConfig, models: Models) -> Objective:
    """Returns direct preference optimization on preference pairs, against a frozen reference."""
    chosen_loss = config.dpo

    def rows(split: Split) -> Rows[Row]:
        return _pairs_of(config, models, split)

    def log_probs(params: Params, microbatch: Microbatch, batch: Batch):
        return _log_probs(config, models, params, microbatch, batch)[0]

    told = functools.partial(_told, config, models.policy)

    def loss(params: Params, microbatch: Microbatch, batch: Batch):
        to_routers = told(microbatch, batch)
        found, _, routed = _log_probs(config, models, params, microbatch, batch, to_routers)
        mask, reference = microbatch.take(batch.mask), microbatch.take(batch.ref_log_probs)
        # Of tokens before they are summed: a difference of two sums would have their rounding.
        ratios = masked.sum(found - reference, mask, axis=1)
        here, of_ratios = _by_pair(microbatch, batch, ratios)
        _, of_log_probs = _by_pair(microbatch, batch, masked.sum(found, mask, axis=1))
        _, num_tokens = _by_pair(microbatch, batch, mask.sum(1).astype(jnp.float32))
        num_pairs = len(batch.tokens) // 2
        value, metrics = losses.dpo(chosen_loss, *of_ratios, *num_tokens, here, num_pairs)
        sums = {
            f"logps/{name}": masked.sum(jax.lax.stop_gradient(one), here) / num_pairs
            for name, one in zip(("chosen", "rejected"), of_log_probs, strict=True)
        }
        return _with_routers(config, (value, {**metrics, **sums}), routed, batch)

    of_pairs = told, _num_pairs, models, log_probs
    return Objective("dpo", models.policy, models.mesh, rows, loss, *of_pairs)


def _pairs_of(config: JobConfig, models: Models, split: Split, name: str = "") -> Rows[Pair]:
    return datasets.preference_pairs(
        config.data, models.tokenizer, split, config.seed, name, config.max_pair_tokens
    )


def _log_probs(
    config: JobConfig,
    models: Models,
    params: Params,
    microbatch: Microbatch,
    batch: Batch,
    told: Routing | None = None,
) -> tuple[Float[Array, "b T"], Float[Array, "b T"], Routed | None]:
    """Returns the policy's log-prob of each token, 1 where none was likelier, what routers did."""
    found, routed = predict.token_statistics(
        models.policy,
        params,
        batch.tokens,
        microbatch,
        temperature=1.0,
        chunk=config.model.vocab_chunk,
        entropy="likeliest",
        routing=told,
    )
    width = batch.tokens.shape[1]
    asked = found.log_probs, found.sum_squared_probs
    log_probs, likeliest = (microbatch.unpacked(x, batch.lengths, width) for x in asked)
    return log_probs, likeliest, routed


def _told(
    config: JobConfig, network: Network, microbatch: Microbatch, batch: Batch
) -> Routing | None:
    """Returns what routers are told: tokens that bear loss are counted. Stages before RL do not."""
    if network.shape.experts is None or config.supervised_router is None:
        return None
    return routing.told(config.supervised_router, microbatch, batch.mask)


def _with_routers(
    config: JobConfig, found: tuple[Array, Mapping[str, Array]], routed: Routed | None, batch: Batch
) -> tuple[Array, Mapping[str, Any]]:
    """Returns a loss and its metrics with those of routers, if there are any."""
    if config.supervised_router is None:
        return found
    value, metrics = found
    extra, sums = routing.penalty(config.supervised_router, routed, batch.mask)
    return value + extra, {**metrics, **sums}


def _by_pair(
    microbatch: Microbatch, batch: Batch, values: Float[Array, " b"]
) -> tuple[Bool[Array, " pairs"], tuple[Float[Array, " pairs"], Float[Array, " pairs"]]]:
    """Returns which pairs of the batch are here, and the values of their two sequences."""
    count = batch.tokens.shape[0]
    by_sequence = microbatch.put(jnp.zeros(count), values)
    here = microbatch.put(jnp.zeros(count, bool), jnp.ones(values.shape, bool))
    return here[0::2], (by_sequence[0::2], by_sequence[1::2])


def _num_pairs(batch: Batch) -> float:
    return len(batch.tokens) / 2


def completion(objective: Objective, reference: Params) -> Callable[[Batch, Clock], Batch]:
    """Returns what adds the log-probs of the frozen reference to a batch; times `ref`.

    They are computed for each batch, not once for all rows before the first step: rows may be
    more than memory holds, or more than the job ever takes; a resumed job would compute them again.
    Without a reference a batch stays as it is.
    """
    ask, mesh = objective.log_probs, objective.mesh
    if ask is None:
        return lambda batch, clock: batch

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
    def of_reference(params: Params, batch: Batch) -> Float[Array, "B T"]:
        def one(microbatch: Microbatch):
            return ask(params, microbatch, batch)

        packed = objective.reader(batch).passed(params, batch.packed)
        return packing.by_sequence(packed, one, *batch.tokens.shape)

    def complete(batch: Batch, clock: Clock) -> Batch:
        with clock("ref") as watch, jax.set_mesh(mesh):
            return dataclasses.replace(batch, ref_log_probs=watch(of_reference(reference, batch)))

    return complete


def measurement(objective: Objective):
    """Returns `(trained, base, batch) -> metrics`, jitted: the loss and what comes with it."""

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(objective.mesh))
    def measure(trained: Params, base: Params, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        params = lora.joined(base, trained)

        def one(microbatch: Microbatch):
            found = objective.loss(params, microbatch, batch)[1]
            return {name: value for name, value in found.items() if name != "routers"}

        packed = objective.reader(batch).passed(params, batch.packed)
        return packing.accumulate(packed, one)

    return measure
