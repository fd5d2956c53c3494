"""Supervised objectives: their rows and batches; the losses of SFT and reward models."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.aggregation import LossAndMetrics, minibatch_denominators
from jaxrl_llm.config import JobConfig
from jaxrl_llm.data import datasets, streams
from jaxrl_llm.data.streams import Rows
from jaxrl_llm.data.tasks import Split
from jaxrl_llm.learner import predict, router_replay
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.predict import ForwardOutputs
from jaxrl_llm.learner.vision import trainable_encoder
from jaxrl_llm.learner.vision.trainable_encoder import TrainableVisionEncoder
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models import lora
from jaxrl_llm.models.moe.router import RouterInputs
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.packing import packed_batch, token_fields
from jaxrl_llm.packing.packed_batch import Microbatch, PackedBatch
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Example, PreferencePair

# Sequences that must share a microbatch: one example, or the two of a pair.
Row = Sequence[Example]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
    """The sequences of one update; pairs are adjacent rows, the chosen one first."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    mask: Bool[Array, "B T"]  # tokens that bear loss
    ref_log_probs: Float[Array, "B T"]  # of the frozen reference; zero without one
    desirable: Bool[Array, " B"]  # labels of answers; true without labels
    baselines: Float[Array, " B"]  # `Objective.baselines`; zero without such
    packed: PackedBatch
    # The same answers to the prompts of other rows, for `Objective.mismatches`.
    mismatched: "SupervisedBatch | None" = None

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], packer: Packer, width: int = 0, models: Models | None = None
    ) -> "SupervisedBatch":
        """Pads rows to arrays and packs them; the sequences of a row share a packed row.

        If the vision encoder of `models` reads images, the batch includes those of the rows.

        `width` is that of arrays and packed rows; 0: derived from the longest row.
        """
        sequences = [example for row in rows for example in row]
        lengths = np.array([len(example.tokens) for example in sequences], np.int32)
        row_size = len(rows[0])
        width = width or packed_width(rows)
        tokens = np.zeros((len(sequences), width), np.int32)
        mask = np.zeros((len(sequences), width), bool)
        for i, example in enumerate(sequences):
            tokens[i, : lengths[i]] = example.tokens
            mask[i, : lengths[i]] = example.mask
        groups = np.repeat(np.arange(len(rows)), row_size)
        same_row = packed_batch.SharedPrefixes(groups, np.zeros_like(groups), same_row=row_size > 1)
        packed = packer.pack(lengths, np.arange(len(lengths)), width=width, common=same_row)
        if models is not None and models.image_feature_cache is not None:
            images = [example.images for example in sequences]
            gallery = models.image_feature_cache
            image_fields = gallery.token_fields(
                images, lengths, width, encodes=not gallery.is_trainable
            )
            packed = token_fields.with_fields(packed, models.mesh, **image_fields)
            if gallery.is_trainable:
                packed = gallery.with_images(packed, images)
        # Still on the host: the jitted program transfers them.
        host_arrays: dict[str, Any] = {
            "tokens": tokens,
            "lengths": lengths,
            "mask": mask,
            "ref_log_probs": np.zeros(tokens.shape, np.float32),
            "desirable": np.array([example.desirable for example in sequences]),
            "baselines": np.zeros(len(sequences), np.float32),
        }
        return cls(**host_arrays, packed=packed)


def longest_row(rows: Rows[Row]) -> int:
    """Tokens of the longest row."""
    return streams.max_size(rows, lambda row: sum(len(example.tokens) for example in row))


def packed_width(rows: Rows[Row]) -> int:
    """The packed row width (a bucket) that fits each of these rows."""
    return packed_batch.bucket(longest_row(rows), smallest=32)


def mismatched_rows(rows: Sequence[Row], max_tokens: int) -> list[Row]:
    """The prompt of each row with the answer of the row before it, cut to `max_tokens`.

    The first row gets the last answer. An answer begins at its first token with a loss.
    """
    firsts = [row[0].mask.index(True) if any(row[0].mask) else len(row[0].mask) for row in rows]
    others: list[Row] = []
    for index, row in enumerate(rows):
        prompt, answer = row[0].tokens[: firsts[index]], rows[index - 1][0]
        begin = firsts[index - 1]
        tokens = (*prompt, *answer.tokens[begin:])[:max_tokens]
        mask = (*(False for _ in prompt), *answer.mask[begin:])[:max_tokens]
        others.append((Example(tokens, mask),))
    return others


@dataclasses.dataclass(frozen=True)
class Objective:
    """The objective of a supervised job: its data, network and loss."""

    name: str  # its metrics begin with it
    config: JobConfig
    models: Models
    network: Network  # the one that is trained
    mesh: Mesh
    rows: Callable[[Split], Rows[Row]]
    # The microbatch's share of the batch loss, and metrics to sum, from the outputs of the network.
    output_loss: Callable[[ForwardOutputs, SupervisedBatch], LossAndMetrics]
    # Weight of a batch in a mean over several; by default its pairs.
    batch_weight: Callable[[SupervisedBatch], float] = lambda batch: len(batch.tokens) / 2
    needs_reference: bool = False
    vision_encoder: TrainableVisionEncoder | None = None  # vision encoder, if it is trained
    # Statistics of the whole batch that the loss compares its rows with, from a pass of the policy
    # without gradient: (log-probs [B, T], batch) -> [B]; None: the loss has none.
    baselines: Callable[[Array, SupervisedBatch], Array] | None = None
    # Whether batches have each answer to the prompt of another row too; `baselines` is of those.
    mismatches: bool = False

    def make_batch(self, rows: Sequence[Row], packer: Packer, width: int = 0) -> SupervisedBatch:
        """The batch of some rows; `width` as for `SupervisedBatch.from_rows`."""
        batch = SupervisedBatch.from_rows(rows, packer, width, self.models)
        if not self.mismatches:
            return batch
        limit = min(self.config.max_sequence_tokens, packer.max_tokens)
        others = mismatched_rows(rows, limit)
        width = min(packed_width(others), packer.max_tokens)
        mismatched = SupervisedBatch.from_rows(others, packer, width, self.models)
        return dataclasses.replace(batch, mismatched=mismatched)

    def with_baselines(self, params: Params, batch: SupervisedBatch) -> SupervisedBatch:
        """The batch with its `baselines`, from a pass over it; unchanged for other losses."""
        if self.baselines is None:
            return batch
        source = batch if batch.mismatched is None else batch.mismatched
        log_probs = self.log_probs(params, source)
        values = jax.lax.stop_gradient(self.baselines(log_probs, source))
        return dataclasses.replace(batch, baselines=values)

    def log_probs(self, params: Params, batch: SupervisedBatch) -> Float[Array, "B T"]:
        """The network's log-prob of each token of a batch."""
        forward = self.forward_spec(batch)

        def microbatch_log_probs(microbatch: Microbatch):
            return answer_log_probs(self.config, forward.run(params, microbatch), batch)[0]

        packed = forward.with_stage_outputs(params, batch.packed)
        return packed_batch.map_to_sequences(packed, microbatch_log_probs, *batch.tokens.shape)

    def forward_spec(self, batch: SupervisedBatch) -> predict.ForwardSpec:
        """How the network reads the packed rows of a batch."""

        def router_inputs(microbatch: Microbatch) -> RouterInputs | None:
            # They count the loss tokens; none without experts, and in stages before RL.
            router = self.config.supervised_router
            if self.network.shape.experts is None or router is None:
                return None
            return router_replay.router_inputs(router, microbatch, batch.mask)

        return predict.ForwardSpec(self.network, batch.tokens, router_inputs, self.vision_encoder)

    def loss(
        self, params: Params, microbatch: Microbatch, batch: SupervisedBatch
    ) -> tuple[Array, Mapping[str, Any]]:
        """The microbatch's share of the batch loss, router penalty included, and metrics to sum."""
        outputs = self.forward_spec(batch).run(params, microbatch)
        value, metrics = self.output_loss(outputs, batch)
        if (router := self.config.supervised_router) is None:
            return value, metrics
        penalty, router_metrics = router_replay.router_loss(router, outputs.routed, batch.mask)
        return value + penalty, {**metrics, **router_metrics}


def sft(config: JobConfig, models: Models) -> Objective:
    """SFT: cross-entropy of demonstrations, the mean over all their loss tokens in a batch."""

    def rows(split: Split) -> Rows[Row]:
        examples = datasets.worked_examples(
            config.data,
            models.tokenizer,
            split,
            config.seed,
            config.max_sequence_tokens,
            image_processor=models.image_processor,
        )
        return streams.map_rows(examples, lambda example: (example,))

    def loss(outputs: ForwardOutputs, batch: SupervisedBatch) -> LossAndMetrics:
        log_probs, is_argmax = answer_log_probs(config, outputs, batch)
        mask = outputs.microbatch.take(batch.mask)
        denominators = minibatch_denominators(batch.mask)
        return losses.token_cross_entropy(
            log_probs, is_argmax, mask, denominators, config.weighs_by_probability
        )

    return Objective(
        name="sft",
        config=config,
        models=models,
        network=models.policy,
        mesh=models.mesh,
        rows=rows,
        output_loss=loss,
        batch_weight=lambda batch: float(batch.mask.sum()),
        vision_encoder=trainable_encoder.make_vision_encoder(config, models.policy),
    )


def reward_model(
    config: JobConfig, models: Models, name: str = "reward_model", costs: bool = False
) -> Objective:
    """Bradley-Terry loss on the preference pairs for the reward model `name`.

    With `costs` it learns a cost: the rejected answer of a pair gets the higher score.
    """

    def rows(split: Split) -> Rows[Row]:
        pairs = preference_pairs(config, models, split, name)
        return (
            streams.map_rows(pairs, lambda p: PreferencePair(p.rejected, p.chosen))
            if costs
            else pairs
        )

    def loss(outputs: ForwardOutputs, batch: SupervisedBatch) -> LossAndMetrics:
        scores = outputs.sequence_scores(batch.lengths)
        in_microbatch, (chosen, rejected) = split_pairs(outputs.microbatch, batch, scores)
        return losses.bradley_terry(chosen, rejected, in_microbatch, len(batch.tokens) // 2)

    return Objective(
        name="reward_model",
        config=config,
        models=models,
        network=models.value,
        mesh=models.meshes["reward"],
        rows=rows,
        output_loss=loss,
    )


def preference_pairs(
    config: JobConfig, models: Models, split: Split, name: str = ""
) -> Rows[PreferencePair]:
    """The preference pairs of a job, for the reward model `name` if it is one of several."""
    return datasets.preference_pairs(
        config.data, models.tokenizer, split, config.seed, name, config.max_pair_tokens
    )


def answer_log_probs(
    config: JobConfig, outputs: ForwardOutputs, batch: SupervisedBatch
) -> tuple[Float[Array, "b T"], Float[Array, "b T"]]:
    """The policy's log-prob of each token, and 1 where it is the argmax else 0."""
    token_stats = outputs.token_statistics(
        temperature=1.0, chunk=config.model.vocab_chunk, entropy="likeliest"
    )
    microbatch, width = outputs.microbatch, batch.tokens.shape[1]
    log_probs = microbatch.to_sequences(token_stats.log_probs, batch.lengths, width)
    is_argmax = microbatch.to_sequences(token_stats.sum_squared_probs, batch.lengths, width)
    return log_probs, is_argmax


def split_pairs(
    microbatch: Microbatch, batch: SupervisedBatch, values: Float[Array, " b"]
) -> tuple[Bool[Array, " pairs"], tuple[Float[Array, " pairs"], Float[Array, " pairs"]]]:
    """Which pairs of the batch are in this microbatch, and the values of their two sequences."""
    count = batch.tokens.shape[0]
    by_sequence = microbatch.put(jnp.zeros(count), values)
    in_microbatch = microbatch.put(jnp.zeros(count, bool), jnp.ones(values.shape, bool))
    return in_microbatch[0::2], (by_sequence[0::2], by_sequence[1::2])


def reference_log_prob_adder(
    objective: Objective, reference: Params
) -> Callable[[SupervisedBatch, Clock], SupervisedBatch]:
    """A function that adds the frozen reference's log-probs to a batch; times `ref`.

    They are computed batch by batch, not for all rows before the first step: the rows may exceed
    memory, or what the job ever trains on, and a resumed job would have to compute them again.
    Without a reference the batch is unchanged.
    """
    if not objective.needs_reference:
        return lambda batch, clock: batch
    mesh = objective.mesh

    reference_log_probs = jax.jit(objective.log_probs, out_shardings=mesh_lib.replicated(mesh))

    def with_reference(batch: SupervisedBatch, watch: Callable[[Any], Any]) -> SupervisedBatch:
        return dataclasses.replace(
            batch, ref_log_probs=watch(reference_log_probs(reference, batch))
        )

    def complete(batch: SupervisedBatch, clock: Clock) -> SupervisedBatch:
        with clock("ref") as watch, jax.set_mesh(mesh):
            if batch.mismatched is not None:
                mismatched = with_reference(batch.mismatched, watch)
                batch = dataclasses.replace(batch, mismatched=mismatched)
            return with_reference(batch, watch)

    return complete


def make_metrics_program(objective: Objective):
    """A jitted `(trained, base, batch) -> metrics`: the loss and its companion metrics."""

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(objective.mesh))
    def measure(
        trained: Params, base: Params, batch: SupervisedBatch
    ) -> Mapping[str, Float[Array, ""]]:
        params = lora.combine_params(base, trained)
        batch = objective.with_baselines(params, batch)

        def microbatch_metrics(microbatch: Microbatch):
            metrics = objective.loss(params, microbatch, batch)[1]
            return {name: value for name, value in metrics.items() if name != "routers"}

        packed = objective.forward_spec(batch).with_stage_outputs(params, batch.packed)
        return packed_batch.accumulate(packed, microbatch_metrics)

    return measure
