"""Rematerialization policies: activations that are saved for the backward pass, or offloaded."""

import jax

# Of a layer, "full" saves the input, "attention" also q, k, v and the attention output,
# "projections" also the MLP's gate and up projections, "dots" the result of every matmul with a
# weight; the offload policies save to host memory.
_ATTENTION_NAMES = ("q", "k", "v", "mixed")
_save = jax.checkpoint_policies.save_only_these_names


def _offload(*names: str):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=("stream", *names),
        offload_src="device",
        offload_dst="pinned_host",
    )


REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": _save(*_ATTENTION_NAMES),
    "projections": _save(*_ATTENTION_NAMES, "gate", "up"),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload_full": _offload(),
    "offload_attention": _offload(*_ATTENTION_NAMES),
}
