"""What the forward pass keeps for the backward pass, which computes the rest again."""

import jax

# Of a layer, "full" keeps its input, "attention" what surrounds the scores, "projections" the MLP's
# two inner products too, "dots" the result of every product with a weight; the last two keep it on
# the host.
_AROUND_SCORES = ("q", "k", "v", "mixed")
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
    "attention": _save(*_AROUND_SCORES),
    "projections": _save(*_AROUND_SCORES, "gate", "up"),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload_full": _offload(),
    "offload_attention": _offload(*_AROUND_SCORES),
}
