"""A policy in training whose loop is the caller's: passes, updates, samples, checkpoints.

The learner, the packing, the losses, the engine and the resharding are those of the jobs.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxrl_llm.checkpoint import saver
from jaxrl_llm.config import LoraConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import weights
from jaxrl_llm.learner.adamw import AdamWParams
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.weights import Trainable
from jaxrl_llm.models.hf import peft_adapter
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Completion, Request, SamplingParams
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sampling.policy_sampler import PolicySampler
from jaxrl_llm.training_api.loss_functions import LossName, resolve_loss
from jaxrl_llm.training_api.policy_base import PolicyBase
from jaxrl_llm.training_api.training_data import Datum, make_batch

_SAMPLE_KEY = 2**30  # folded into the seed of samples
_NO_SETTINGS: Mapping[str, float] = {}


class TrainingSessionError(UserError, RuntimeError):
    """A call that the state of a session does not allow."""


class PassResult(NamedTuple):
    """The result of a pass."""

    loss: float
    metrics: dict[str, float]
    log_probs: list[Float[np.ndarray, " T"]]  # of each datum's targets; 0 for its first token


class TrainingSession:
    """One policy in training. Not to be called by several threads at once.

    `forward_backward` adds gradients up; `optim_step` applies and clears them.
    """

    def __init__(self, base: PolicyBase, lora: LoraConfig | None = None, seed: int | None = None):
        """A policy over `base`: its adapters, or without a rank all of its weights.

        Args:
          base: The model. Several sessions with adapters may share it; one without adapters owns
            it, and nothing else may use it.
          lora: Shapes of the adapters; by default those of the config.
          seed: Of the adapters and the samples; by default that of the config.
        """
        config = base.config if lora is None else dataclasses.replace(base.config, lora=lora)
        config = config if seed is None else dataclasses.replace(config, seed=seed)
        self.base, self.config = base, config
        self.programs = base.programs(config.lora)
        network, mesh = self.programs.network, base.models.mesh
        params, self.frozen = weights.split_trainable(config, network, mesh, base.params)
        self._models = dataclasses.replace(base.models, policy=network)
        shared = base.models.packer
        # Its own: the shapes that it remembers depend on this session's data alone.
        self._packer = Packer(
            shared.max_tokens, shared.num_shards, shared.length_shards, stages=shared.stages
        )
        self.state = self.programs.initial_state(params)
        self.gradients: Params | None = None
        self._sampler: PolicySampler | None = None
        self._rollout_params: Params | None = None  # of the present parameters; None: outdated
        self._num_sample_calls = 0

    @property
    def num_updates(self) -> int:
        """Updates taken; skipped ones are not counted."""
        return int(self.state.num_updates)

    @property
    def has_gradients(self) -> bool:
        """Whether a pass has added gradients since the last update."""
        return self.gradients is not None

    def forward(
        self,
        data: Sequence[Datum],
        loss: LossName = "cross_entropy",
        settings: Mapping[str, float] = _NO_SETTINGS,
    ) -> PassResult:
        """The loss and the log-probs of some data, without a gradient; raises as `resolve_loss`."""
        chosen = resolve_loss(loss, self.config.algorithm)
        batch, numbers = self._inputs(data, chosen, settings)
        with jax.set_mesh(self._models.mesh):
            outputs = self.programs.forward(chosen)(self.state.params, self.frozen, batch, numbers)
        return pass_result(data, outputs)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossName = "cross_entropy",
        settings: Mapping[str, float] = _NO_SETTINGS,
    ) -> PassResult:
        """The loss of some data, whose gradient is added to that of earlier passes.

        Args:
          data: One sequence after another; all have the same fields.
          loss: As in `resolve_loss`.
          settings: Numbers of the loss by name, for example `clip_high_threshold`.

        Raises:
          TrainingDataError, LossError, FunctionError: If data or loss cannot be used; no gradient
            is added.
        """
        chosen = resolve_loss(loss, self.config.algorithm)
        batch, numbers = self._inputs(data, chosen, settings)
        with jax.set_mesh(self._models.mesh):
            gradients = self.gradients or self.programs.zero_gradients()
            self.gradients = None  # consumed by the program, also if it fails
            self.gradients, outputs = self.programs.forward_backward(chosen)(
                gradients, self.state.params, self.frozen, batch, numbers
            )
        return pass_result(data, outputs)

    def _inputs(self, data: Sequence[Datum], loss: Any, settings: Mapping[str, float]):
        vocab_size, max_tokens = self._models.policy.shape.vocab_size, self.max_tokens
        batch = make_batch(data, self._packer, vocab_size, max_tokens)
        loss.check(batch.fields, settings)
        return batch, {name: np.float32(value) for name, value in settings.items()}

    @property
    def max_tokens(self) -> int:
        """Longest sequence, prompt and response."""
        return self.config.max_sequence_tokens

    def optim_step(self, params: AdamWParams = AdamWParams()) -> dict[str, float]:  # noqa: B008
        """Applies the gradients of all passes since the last update, by AdamW, and clears them.

        Returns `grad_norm`, before clipping, and `skipped_updates`: 1 if results were not finite,
        so that nothing changed.

        Raises:
          AdamWError: If a number is out of range.
          TrainingSessionError: If there are no gradients.
        """
        params.check()
        if self.gradients is None:
            raise TrainingSessionError("optim_step: no gradients; call forward_backward first")
        gradients, self.gradients = self.gradients, None
        with jax.set_mesh(self._models.mesh):
            self.state, metrics = self.programs.optim_step(self.state, gradients, params.inputs())
        self._rollout_params = None
        return {name: float(value) for name, value in metrics.items()}

    def log_probs(self, data: Sequence[Datum]) -> list[Float[np.ndarray, " T"]]:
        """The log-probs of every token under the policy, [T] for each datum; 0 for the first."""
        plain = [
            Datum(each.tokens, {"weights": np.ones(len(each.tokens))}, each.targets)
            for each in data
        ]
        return self.forward(plain).log_probs

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int = 1,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> list[list[Completion]]:
        """Samples of each prompt from the present policy.

        Args:
          prompts: Token ids.
          num_samples: Of each prompt.
          params: By default those of the config's rollouts.
          seed: Of the samples; by default the seed of the session and the number of the call.

        Raises:
          RequestError: If a prompt does not fit.
        """
        if self._sampler is None:
            policy_sampler.check(self.config, self._models)
            self._sampler = policy_sampler.make_sampler(self.config, self._models, self.frozen)
        if params is None:
            params = episodes.sampling_params(self.config.rollout, self._models.eos_tokens)
        key = jax.random.fold_in(jax.random.key(self.config.seed), _SAMPLE_KEY)
        key = jax.random.fold_in(key, self._num_sample_calls)
        if seed is not None:
            key = jax.random.key(seed)
        keys = episodes.sample_keys(key, len(prompts) * num_samples)
        requests = [
            Request(
                tuple(prompt),
                keys[i * num_samples : (i + 1) * num_samples],
                (params,) * num_samples,
            )
            for i, prompt in enumerate(prompts)
        ]
        engine = self._sampler.engine
        assert isinstance(engine, Engine), "check_config allows the built-in engine only"
        with jax.set_mesh(self._models.mesh):
            if self._rollout_params is None:
                self._rollout_params = self._sampler.weights(self.state.params)
        completions = engine.generate(self._rollout_params, requests, self.num_updates)
        self._num_sample_calls += 1
        return completions

    # Checkpoints.

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes weights and optimizer state; gradients that are not applied are not saved.

        Raises:
          CheckpointError: If the folder exists.
        """
        saver.save_tree(folder, self.state, self.extra_state())

    def load(self, folder: str | os.PathLike[str], optimizer: bool = True) -> None:
        """Reads a checkpoint of `save`, bit for bit, and drops gradients that are not applied.

        Args:
          folder: Of a session with the same model and adapters of the same shapes.
          optimizer: Whether to read the optimizer state too; else it starts anew.

        Raises:
          CheckpointError: If the folder is missing, damaged, or of other shapes.
        """
        abstract = weights.abstract_arrays(self.state)
        state, extra = saver.load_tree(folder, abstract)
        if not optimizer:
            state = self.programs.initial_state(state.params)
            extra["num_sample_calls"] = 0
        self.restore(state, extra)

    def restore(self, state: Trainable, extra: Mapping[str, Any]) -> None:
        """Takes another state, with its `extra_state`; drops gradients that are not applied."""
        self.state, self._num_sample_calls = state, extra["num_sample_calls"]
        self._packer.set_state(extra["shapes"])
        self.gradients = self._rollout_params = None

    def extra_state(self) -> dict[str, Any]:
        """The contents of a checkpoint beside the arrays, for JSON."""
        lora = self.config.lora
        return {
            "lora": {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)},
            "num_sample_calls": self._num_sample_calls,
            "shapes": self._packer.get_state(),
        }

    def export_adapters(self, folder: str | os.PathLike[str]) -> None:
        """Writes the adapters as a folder for `peft`.

        Raises:
          TrainingSessionError: Without adapters.
          CheckpointFormatError: If the folder holds something else.
        """
        if not self.config.lora.rank:
            raise TrainingSessionError("export_adapters: all weights are trained; use save")
        peft_adapter.save(
            os.fspath(folder), self.programs.network, self.state.params, self.config.model.path
        )


def pass_result(data: Sequence[Datum], outputs: Any) -> PassResult:
    """The outputs of a program for some data."""
    loss, metrics, log_probs = jax.device_get(outputs)
    rows = [np.array(log_probs[i, : len(datum.tokens)]) for i, datum in enumerate(data)]
    return PassResult(float(loss), {name: float(v) for name, v in metrics.items()}, rows)
