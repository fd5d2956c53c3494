"""Every family against transformers itself: logits, gradients, greedy decode, folders, configs.

A family is a row of `TABLE`: its config class and what sets a tiny model of it apart.
"""

import itertools

import jax
import numpy as np
import pytest
import tiny
from flax import traverse_util

from jaxrl_llm.models.hf import checkpoint, config_reader, safetensors_file
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.sharding.mesh import TRAIN, shardings

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
WINDOW = 24  # shorter than every row
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENTS = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
# Of many heads: a key that none of them sees has index score 0, and equals are not chosen alike.
INDEXER = {"index_topk": 11, "index_n_heads": 24, "index_head_dim": 14, **LATENTS}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
TABLE = {
    "llama_yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **EXPERTS,
            "num_experts": 4,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **EXPERTS,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            **LATENTS,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
        },
    ),
    "glm4": ("Glm4Config", {}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**EXPERTS, "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 3,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "floor_scale": 8,
        },
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        {
            **EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 20,
            "q_lora_rank": None,
            "qk_rope_head_dim": 6,
            "head_dim": 6,
            "qk_nope_head_dim": 10,
            "v_head_dim": 14,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 2.827,
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 3}),
    "smollm3_window": (
        "SmolLM3Config",
        {
            "use_sliding_window": True,
            "sliding_window": 19,
            "no_rope_layer_interval": 2,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 1}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {"head_dim": 8, "sliding_window": 17, "tie_word_embeddings": True}),
    "phi3_longrope": (
        "Phi3Config",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 200,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [1.2, 1.5, 2.0, 4.0, 8.0, 16.0],
            },
        },
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            **EXPERTS,
            **INDEXER,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **EXPERTS,
            **INDEXER,
            "n_routed_experts": 4,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    ),
}
LENGTHS = (40, 33)
NUM_GREEDY = 64

pytestmark = [pytest.mark.parity, pytest.mark.parametrize("family", TABLE)]


def make(torch, family):
    """Returns a model whose biases and norms are random too, and whose scores are clear."""
    import transformers

    config_class, own = TABLE[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SIZES, **own})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or "embed_scale" in name:
                continue
            size, mean = (0.5, 1.0) if "norm" in name else (0.15, 0.0)
            if "norm" in name and "gemma" in family:
                mean = 0.0
            parameter.copy_(mean + size * torch.randn_like(parameter))
    return model.eval()


def tensors_of(folder):
    found = safetensors_file.open_folder(folder)
    return {
        k: (t.dtype_code, t.shape, np.ascontiguousarray(t.view()).tobytes())
        for k, t in found.items()
    }


def packed_rows(random):
    """Returns tokens, positions and segments of one row with two sequences, and padding."""
    tokens = random.integers(3, 96, (1, sum(LENGTHS) + 5)).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*LENGTHS, 5)])[None].astype(np.int32)
    segments = np.repeat([1, 2, 0], [*LENGTHS, 5])[None].astype(np.int32)
    return tokens, positions, segments


def test_a_family_is_that_of_transformers(family, torch, tmp_path):
    model = make(torch, family)
    model.save_pretrained(tmp_path / "theirs")
    network = Network(checkpoint.read_architecture(tmp_path / "theirs"))
    params = checkpoint.load(tmp_path / "theirs", network)

    tokens, positions, segments = packed_rows(np.random.default_rng(0))
    cuts = np.cumsum((0, *LENGTHS))
    rows = [torch.tensor(tokens[:, a:b].astype(np.int64)) for a, b in itertools.pairwise(cuts)]
    theirs = torch.cat([model(row, use_cache=False).logits[0] for row in rows])
    counted = sum(LENGTHS)
    weights = np.random.default_rng(1).standard_normal(theirs.shape).astype(np.float32)

    @jax.jit
    def loss(params):
        logits = network.logits(
            params, tiny.hidden_states(network)(params, tokens, positions, segments)
        )
        logits = logits[0, :counted]
        return (jax.nn.log_softmax(logits) * weights).sum(), logits

    gradient, ours = jax.grad(loss, has_aux=True)(params)
    wanted = theirs.detach().numpy()
    assert np.abs(wanted).max() > 1.0
    np.testing.assert_allclose(ours, wanted, atol=2e-5 * np.abs(wanted).max())

    (torch.log_softmax(theirs, -1) * torch.tensor(weights)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0 if parameter.grad is None else parameter.grad)
    model.save_pretrained(tmp_path / "gradient")  # by the names of files, fused as they are
    of_theirs = checkpoint.load(tmp_path / "gradient", network)
    wanted = traverse_util.flatten_dict(of_theirs)
    for path, got in traverse_util.flatten_dict(gradient).items():
        want = wanted[path]
        if path[-1] == "selection_bias" or "indexer" in path:
            assert not np.any(got)
            continue
        assert np.linalg.norm(want) > 0, path
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_and_written_folders_are_the_same(family, dtype, torch, tmp_path):
    import transformers

    model = make(torch, family).to(getattr(torch, dtype))
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.data = buffer.data.float() + 1e-4  # as transformers keeps it
    model.save_pretrained(tmp_path / "theirs")
    shape = checkpoint.read_architecture(tmp_path / "theirs")
    network = Network(shape)
    mesh = tiny.make_mesh(fsdp=2, expert=2, tensor=2)
    places = shardings(
        network.abstract_params(), network.logical_axes(), mesh, TRAIN, network.sharding_units
    )
    params = checkpoint.load(tmp_path / "theirs", network)
    split = checkpoint.load(tmp_path / "theirs", network, places)
    source = config_reader.read_config(tmp_path / "theirs")
    checkpoint.save(tmp_path / "ours", network, split, source_config=source, dtype=dtype)
    assert tensors_of(tmp_path / "ours") == tensors_of(tmp_path / "theirs")
    checkpoint.save(tmp_path / "alone", network, params, dtype=dtype)
    assert checkpoint.read_architecture(tmp_path / "ours") == shape
    assert checkpoint.read_architecture(tmp_path / "alone") == shape
    if dtype == "float32":
        tokens = torch.arange(4, 44)[None]
        with torch.no_grad():
            want = model(tokens).logits
            for name in ("ours", "alone"):
                again = transformers.AutoModelForCausalLM.from_pretrained(
                    tmp_path / name, attn_implementation="eager"
                )
                assert torch.allclose(again(tokens).logits, want, atol=1e-6), name


def test_greedy_tokens_are_those_of_generate(family, torch, tmp_path):
    model = make(torch, family)
    model.save_pretrained(tmp_path)
    network = Network(checkpoint.read_architecture(tmp_path))
    random = np.random.default_rng(2)
    prompts = [tuple(random.integers(3, 96, n).tolist()) for n in (30, 5)]
    mesh = tiny.make_mesh()
    params = tiny.rollout_params(checkpoint.load(tmp_path, network), mesh, network)
    engine = Engine(network, mesh, num_slots=2, max_tokens=128)
    greedy = SamplingParams(NUM_GREEDY, temperature=0.0)
    requests = [Request(prompt, np.zeros((1, 2), np.uint32), (greedy,)) for prompt in prompts]
    answers = engine.generate(params, requests)
    for prompt, (completion,) in zip(prompts, answers, strict=True):
        rows = torch.tensor([prompt])
        whole = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            max_new_tokens=NUM_GREEDY,
        )
        assert list(completion.tokens) == whole[0, len(prompt) :].tolist()
