"""Which networks can have quantized kernels."""

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.quantized.kernels import FORMATS


def problem(shape: Architecture, format: str, stages: int) -> str:
    """Why a network's kernels cannot be quantized in this format; "" if they can."""
    unread = {
        "experts": shape.experts,
        "latent attention": shape.latent,
        "gated delta nets": shape.gated_delta,
    }
    if names := [name for name, part in unread.items() if part]:
        return f"models with {' and '.join(names)} have kernels that only full precision is for"
    if stages > 1:
        return f"layers on {stages} pipeline stages are read in full precision only"
    block = FORMATS[format].block
    inputs = {
        "hidden_size": shape.hidden_size,
        "num_heads * head_size": shape.num_heads * shape.value_size,
        "mlp_size": shape.mlp_size,
    }
    if block and (cut := [f"{name} is {n}" for name, n in inputs.items() if n % block]):
        return f"blocks of {block} inputs do not divide the kernels: {', '.join(cut)}"
    return ""
