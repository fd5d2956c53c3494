"""Which passes of several clients share a batch, and their results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.serving.training_service import wire
from jaxrl_llm.serving.training_service.operations import checked_loss
from jaxrl_llm.serving.training_service.trained_model import (
    PASS,
    Outcome,
    TrainedModel,
    session_pass,
)
from jaxrl_llm.training_api import adapter_batch
from jaxrl_llm.training_api.adapter_batch import BlockPlace, BlockShape
from jaxrl_llm.training_api.policy_base import PolicyBase


class WaitingPass(NamedTuple):
    """The next request of a model, a pass with gradients, and the block that it needs."""

    model: TrainedModel
    request: wire.PassRequest
    shape: BlockShape

    @property
    def batch_key(self) -> Any:
        """Equal for passes that one program computes."""
        fields = {name for datum in self.request.data for name in datum.fields}
        return self.model.lora, self.request.loss, set(self.request.settings), fields


class PassBatch(NamedTuple):
    """Passes that are computed together, each model's in a block of this shape."""

    passes: Sequence[WaitingPass]
    shape: BlockShape


class PassBatcher:
    """Chooses passes that share a batch. For the training thread alone."""

    def __init__(self, base: PolicyBase, max_models: int):
        """`max_models`: in memory at once."""
        self._base, self._max_blocks = base, max_models
        self._can_batch = adapter_batch.can_batch(base)

    def choose(self, models: Sequence[TrainedModel]) -> PassBatch | None:
        """The batch of the first of some models with those after it that fit; None: alone.

        Args:
          models: Whose next request has come, in the order of their turns.
        """
        if not self._can_batch or models[0].next_operation.kind != PASS:
            return None
        waiting: list[WaitingPass] = []
        for model in models:
            candidate = self._waiting_pass(model)
            if candidate is None and not waiting:
                return None
            if candidate and (not waiting or candidate.batch_key == waiting[0].batch_key):
                waiting.append(candidate)
        first, *others = waiting
        # Of similar shapes: they pad each other the least. Equal ones stay in the order of turns.
        others.sort(key=lambda each: abs(each.shape.num_tokens - first.shape.num_tokens))
        waiting = [first, *others]
        shapes = [each.shape for each in waiting]
        packer = self._base.models.packer
        count, shape = adapter_batch.common_shape(shapes, self._max_blocks, packer)
        return PassBatch(waiting[:count], shape) if count > 1 else None

    def _waiting_pass(self, model: TrainedModel) -> WaitingPass | None:
        """The next request of a model, if it is a pass that can share a batch."""
        operation = model.next_operation
        if operation.kind != PASS:
            return None
        try:
            request = wire.decode_pass(operation.body)
            checked_loss(request)
            adapter_batch.check_data(self._base, request.data)
        except UserError:
            return None  # refused in its turn
        packer = self._base.models.packer
        if request.forward_only:
            return None
        return WaitingPass(model, request, adapter_batch.block_shape(request.data, packer))

    def run(self, batch: PassBatch) -> list[Outcome]:
        """The results of a batch of passes.

        Raises:
          UserError: If a model or a loss cannot be used; no gradient is added.
        """
        passes = [
            session_pass(each.model.load_session(self._base), each.request) for each in batch.passes
        ]
        results = adapter_batch.forward_backward(passes, batch.shape)
        num_blocks = adapter_batch.num_blocks(len(passes))
        return [
            Outcome(
                "protobuf",
                wire.encode_pass_result(result),
                BlockPlace(num_blocks, block, batch.shape),
            )
            for block, result in enumerate(results)
        ]
