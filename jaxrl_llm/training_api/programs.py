"""The compiled programs of a policy whose loop is the caller's."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.config import RLConfig
from jaxrl_llm.learner import adamw, gradients, optimizer, weights
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.predict import ForwardSpec
from jaxrl_llm.learner.weights import Trainable
from jaxrl_llm.models import heads, lora
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.packing import packed_batch
from jaxrl_llm.packing.packed_batch import Microbatch
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.training_api.loss_functions import Loss, TokenInputs
from jaxrl_llm.training_api.training_data import TrainingBatch

_STACK_DIM = 1  # of the policies in stacked factors, behind the dim of the layers
# Loss, metrics, and log-probs [B, T] of the targets.
PassOutputs = tuple[Float[Array, ""], Mapping[str, Float[Array, ""]], Float[Array, "B T"]]


class PolicyPrograms:
    """The programs of all policies with one network: those whose adapters have the same shapes."""

    def __init__(self, config: RLConfig, models: Models, network: Network):
        self._config, self._models, self.network = config, models, network
        self._temperature = config.rollout.temperature or 1.0
        self._programs: dict[Any, Any] = {}
        self._replicated = mesh_lib.replicated(models.mesh)
        abstract = weights.abstract_trained(network, models.mesh)
        shardings: Any = jax.tree.map(lambda a: a.sharding, abstract)
        moments: Any = optax.ScaleByAdamState(self._replicated, shardings, shardings)
        replicated: Any = self._replicated
        self._shardings = Trainable(shardings, moments, replicated)

    def initial_state(self, params: Params) -> Trainable:
        """Parameters with moments of zeros."""
        opt_state = jax.jit(adamw.init_moments, out_shardings=self._shardings.opt_state)(params)
        zero = mesh_lib.replicate_host_value(np.int32(0), self._models.mesh)
        return Trainable(params, opt_state, zero)

    @functools.cached_property
    def shared_zero_gradients(self) -> Params:
        """The sum of no gradients, for programs that do not consume it."""
        return self.zero_gradients()

    @functools.cached_property
    def zero_gradients(self) -> Callable[[], Params]:
        """Makes the sum of no gradients, in float32; compiled once."""
        abstract = weights.abstract_trained(self.network, self._models.mesh)

        def zeros() -> Params:
            return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), abstract)

        return jax.jit(zeros, out_shardings=self._shardings.params)

    def _cached(self, kind: str, key: Any, make: Callable[[], Any]) -> Any:
        if (kind, key) not in self._programs:
            self._programs[kind, key] = make()
        return self._programs[kind, key]

    def forward(self, loss: Loss) -> Callable[..., PassOutputs]:
        """`(params, base, batch, settings) -> outputs`, without a gradient."""
        return self._cached("forward", loss.key, functools.partial(self._make_forward, loss))

    def forward_backward(self, loss: Loss) -> Callable[..., tuple[Params, PassOutputs]]:
        """`(gradients, params, base, batch, settings) -> (gradients, outputs)`.

        Adds the gradient of the pass to `gradients`, float32 sums, which it consumes.
        """
        make = functools.partial(self._make_forward_backward, loss)
        return self._cached("forward_backward", loss.key, make)

    def batched_forward_backward(self, loss: Loss) -> Callable[..., Any]:
        """`(gradients, params, base, batch, settings) -> (gradients, outputs)` of N policies.

        `gradients` and `params` are tuples of N trees, the batch one of `make_block_batch`,
        settings arrays [N]. It returns the sums of the gradients, and losses [N], metrics [N] and
        log-probs [N, B, T].
        """
        make = functools.partial(self._make_batched_forward_backward, loss)
        return self._cached("batched_forward_backward", loss.key, make)

    @functools.cached_property
    def optim_step(self) -> Callable[..., tuple[Trainable, Mapping[str, Array]]]:
        """`(state, gradients, numbers) -> (state, metrics)`; consumes the state.

        An update whose results are not all finite is skipped, and counted in `skipped_updates`.
        """

        out_shardings = self._shardings, self._replicated

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=out_shardings)
        def step(state: Trainable, gradients: Params, numbers: adamw.AdamWInputs):
            params, opt_state, norm, skipped = optimizer.apply_if_finite(
                adamw.adamw(numbers), gradients, state.opt_state, state.params
            )
            state = Trainable(params, opt_state, state.num_updates + ~skipped)
            return state, {"grad_norm": norm, "skipped_updates": skipped.astype(jnp.float32)}

        return step

    def _make_forward(self, loss: Loss):
        @functools.partial(jax.jit, out_shardings=self._replicated)
        def forward(params: Params, base: Params, batch: TrainingBatch, settings):
            all_params, spec = lora.combine_params(base, params), self._spec(batch)
            packed = spec.with_stage_outputs(all_params, batch.packed)
            value, (metrics, log_probs) = packed_batch.accumulate(
                packed, lambda m: self._microbatch_loss(loss, all_params, m, batch, settings)
            )
            return value, metrics, log_probs

        return forward

    def _make_forward_backward(self, loss: Loss):
        compute_dtype = self._config.model.compute_dtype

        out_shardings = self._shardings.params, self._replicated

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=out_shardings)
        def forward_backward(gradients_so_far, params, base, batch: TrainingBatch, settings):
            def microbatch_loss(params: Params, microbatch: Microbatch):
                all_params = lora.combine_params(base, params)
                value, extra = self._microbatch_loss(loss, all_params, microbatch, batch, settings)
                return value, {"metrics": extra[0], "log_probs": extra[1]}

            (value, sums), gradient = gradients.loss_and_gradients(
                self._spec(batch),
                functools.partial(lora.combine_params, base),
                params,
                batch.packed,
                microbatch_loss,
                compute_dtype,
            )
            total = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), gradients_so_far, gradient)
            return total, (value, sums["metrics"], sums["log_probs"])

        return forward_backward

    def _make_batched_forward_backward(self, loss: Loss):
        compute_dtype = self._config.model.compute_dtype
        stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves, _STACK_DIM))

        # Not donated: empty blocks share their arguments with others.
        @functools.partial(jax.jit, out_shardings=self._replicated)
        def forward_backward(gradients_so_far, params, base, batch: TrainingBatch, settings):
            num_blocks = len(params)

            def microbatch_loss(params: Params, microbatch: Microbatch):
                all_params = lora.combine_params(base, params)
                losses, metrics, log_probs = self._block_losses(
                    loss, all_params, microbatch, batch, settings, num_blocks
                )
                return losses.sum(), {"losses": losses, "metrics": metrics, "log_probs": log_probs}

            (_, sums), gradient = gradients.loss_and_gradients(
                self._spec(batch),
                functools.partial(lora.combine_params, base),
                stack(*params),
                batch.packed,
                microbatch_loss,
                compute_dtype,
            )

            def total(block: int):
                return jax.tree.map(
                    lambda a, b: a + jnp.take(b, block, _STACK_DIM).astype(jnp.float32),
                    gradients_so_far[block],
                    gradient,
                )

            shardings = self._shardings.params
            totals = tuple(
                jax.lax.with_sharding_constraint(total(i), shardings) for i in range(num_blocks)
            )
            return totals, (sums["losses"], sums["metrics"], sums["log_probs"])

        return forward_backward

    def _block_losses(
        self,
        loss: Loss,
        params: Params,
        microbatch: Microbatch,
        batch: TrainingBatch,
        settings: Mapping[str, Any],
        num_blocks: int,
    ):
        """Loss [N], metrics [N] and log-probs [N, B, T] of the N policies of a batch."""

        def by_block(values: Array) -> Array:
            return values.reshape(num_blocks, -1, values.shape[-1])

        zeros = jnp.zeros(batch.tokens.shape, jnp.float32)
        log_probs, entropies = (
            by_block(microbatch.put(zeros, values))
            for values in self._token_statistics(loss, params, microbatch, batch)
        )
        losses, metrics = jax.vmap(functools.partial(self._evaluate, loss))(
            log_probs,
            entropies,
            by_block(batch.mask),
            by_block(batch.mask),
            jax.tree.map(by_block, batch.fields),
            settings,
        )
        return losses, metrics, jax.lax.stop_gradient(log_probs)

    def _spec(self, batch: TrainingBatch) -> ForwardSpec:
        return ForwardSpec(self.network, batch.tokens)

    def _microbatch_loss(
        self,
        loss: Loss,
        params: Params,
        microbatch: Microbatch,
        batch: TrainingBatch,
        settings: Mapping[str, Any],
    ):
        log_probs, entropies = self._token_statistics(loss, params, microbatch, batch)
        fields = {name: microbatch.take(values) for name, values in batch.fields.items()}
        mask = microbatch.take(batch.mask)
        value, metrics = self._evaluate(
            loss, log_probs, entropies, mask, batch.mask, fields, settings
        )
        detached = jax.lax.stop_gradient(log_probs)
        zeros = jnp.zeros(batch.tokens.shape, jnp.float32)
        return value, (metrics, microbatch.put(zeros, detached))

    def _token_statistics(
        self, loss: Loss, params: Params, microbatch: Microbatch, batch: TrainingBatch
    ) -> tuple[Float[Array, "b T"], Float[Array, "b T"]]:
        """Log-probs and entropies of the targets of a microbatch, by sequence."""
        outputs = self._spec(batch).run(params, microbatch)
        # The head scores the targets in the place of the tokens that the model has read.
        outputs = outputs._replace(tokens=microbatch.to_rows(batch.targets))
        statistics: heads.TokenStatistics = outputs.token_statistics(
            temperature=self._temperature,
            chunk=self._config.model.vocab_chunk,
            entropy=loss.entropy,
        )
        width = batch.tokens.shape[1]
        unpack = functools.partial(microbatch.to_sequences, lengths=batch.lengths, width=width)
        return unpack(statistics.log_probs), unpack(statistics.entropies)

    def _evaluate(
        self,
        loss: Loss,
        log_probs: Float[Array, "b T"],
        entropies: Float[Array, "b T"],
        mask: Bool[Array, "b T"],
        mask_of_pass: Bool[Array, "B T"],
        fields: Mapping[str, Float[Array, "b T"]],
        settings: Mapping[str, Any],
    ):
        """The loss of some sequences of a pass, and its metrics."""
        scale = float(self._config.rollout.max_response_tokens)
        if loss.algorithm is not None:
            scale = loss.algorithm.loss_scale or scale
        denominators = minibatch_denominators(mask_of_pass, scale)
        inputs = TokenInputs(log_probs, entropies, mask, fields, denominators)
        return loss.evaluate(inputs, settings)
