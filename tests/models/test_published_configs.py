"""config.json of published models of each family: which shape it is, and what is refused.

`goldens/configs.json` is made by `goldens/make_configs.py`.
"""

import dataclasses
import json

import hf_checkpoints
import pytest

from jaxrl_llm.models.architecture import (
    Architecture,
    Experts,
    GatedDeltaSizes,
    KeyIndexer,
    LatentAttentionSizes,
    LayerType,
    RopeScaling,
    VisionArchitecture,
)
from jaxrl_llm.models.hf import config_reader, config_writer, vision_config
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.families import FAMILIES, MODEL_TYPE_ALIASES


def hybrid(num_layers, experts):
    """Three gated delta nets and an attention layer in turn, of Qwen3-Next and Qwen3.5."""
    mixes = LayerType(mixer="gated_delta", rope="none", experts=experts)
    return {
        "layers": (mixes, mixes, mixes, LayerType(experts=experts)) * (num_layers // 4),
        "gated_delta": GatedDeltaSizes(16, 32, 128, 128),
        "rope_size": 64,
        "qk_norm": True,
        "output_gate": True,
        "norm_offset": 1.0,
        **UNTIED,
    }


def tower(image_token, **fields):
    """The tower of Qwen3-VL-8B and larger, which Qwen3.5 has too."""
    sizes = {"patch_size": 16, "window_size": 0, "kind": "qwen3", "position_side": 48}
    layers = tuple(range(27))
    return VisionArchitecture(
        27, 1152, 16, 4304, layers, image_token=image_token, **sizes, **fields
    )


CONFIGS = json.loads((hf_checkpoints.GOLDENS / "configs.json").read_text())


def shape(name, sizes, heads, **fields):
    """Args: sizes: Of vocabulary, hidden state, MLP; heads: Layers, heads, KV heads, head size."""
    vocab_size, hidden_size, mlp_size = sizes
    num_layers, num_heads, num_kv_heads, head_size = heads
    if isinstance(fields.get("layers"), LayerType):
        fields["layers"] = (fields["layers"],) * num_layers
    return Architecture(
        family=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        mlp_size=mlp_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        **fields,
    )


UNTIED = {"tie_embeddings": False}
GEMMA = {"act": "gelu", "norm_offset": 1.0, "post_norms": True, "scale_embeddings": True}
OLMO = {"wide_qk_norm": True, "pre_norms": False, "post_norms": True, "rope_theta": 5e5, **UNTIED}
EXPERTS = LayerType(experts=True)
INTERLEAVED = {"rope_sections": (24, 20, 20), "rope_sections_interleaved": True}
SPARSE_EXPERTS = LayerType(experts=True, top_keys=2048)
LOCAL, CHUNK = LayerType(window=512, rope="local"), LayerType(chunk=8192, experts=True)
SHAPES = {
    "Llama-3.2-1B": shape(
        "llama",
        (128256, 2048, 8192),
        (16, 32, 8, 64),
        rope_theta=5e5,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
        norm_eps=1e-5,
    ),
    "Qwen2.5-0.5B": shape(
        "qwen2",
        (151936, 896, 4864),
        (24, 14, 2, 64),
        max_positions=32768,
        rope_theta=1e6,
        qkv_bias=True,
    ),
    "Qwen3-0.6B": shape(
        "qwen3",
        (151936, 1024, 3072),
        (28, 16, 8, 128),
        max_positions=40960,
        rope_theta=1e6,
        qk_norm=True,
    ),
    "Mistral-7B-v0.1": shape(
        "mistral", (32000, 4096, 14336), (32, 32, 8, 128), layers=LayerType(window=4096), **UNTIED
    ),
    "Mixtral-8x7B-v0.1": shape(
        "mixtral",
        (32000, 4096, 14336),
        (32, 32, 8, 128),
        rope_theta=1e6,
        norm_eps=1e-5,
        layers=EXPERTS,
        experts=Experts(8, 2, 14336),
        **UNTIED,
    ),
    "Qwen3-30B-A3B": shape(
        "qwen3_moe",
        (151936, 2048, 6144),
        (48, 32, 4, 128),
        max_positions=40960,
        rope_theta=1e6,
        qk_norm=True,
        layers=EXPERTS,
        experts=Experts(128, 8, 768),
        **UNTIED,
    ),
    "gemma-2-9b": shape(
        "gemma2",
        (256000, 3584, 14336),
        (42, 16, 8, 256),
        max_positions=8192,
        layers=(LayerType(window=4096), LayerType()) * 21,
        score_cap=50.0,
        logit_cap=30.0,
        **GEMMA,
    ),
    "gemma-3-1b": shape(
        "gemma3_text",
        (262208, 1152, 6912),
        (26, 4, 1, 256),
        max_positions=32768,
        rope_theta=1e6,
        qk_norm=True,
        layers=((*[LOCAL] * 5, LayerType()) * 5)[:26],
        **GEMMA,
    ),
    "gpt-oss-20b": shape(
        "gpt_oss",
        (201088, 2880, 2880),
        (24, 64, 8, 64),
        rope_theta=150_000.0,
        # magnitude: 0.1 ln 32 + 1
        rope_scaling=RopeScaling(
            32.0,
            original_max_positions=4096,
            kind="yarn",
            whole_dims=False,
            magnitude=1.3465735902799727,
        ),
        norm_eps=1e-5,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        layers=(LayerType(window=128, experts=True), EXPERTS) * 12,
        experts=Experts(32, 4, 2880, bias=True, act="clamped"),
        **UNTIED,
    ),
    "DeepSeek-V3": shape(
        "deepseek_v3",
        (129280, 7168, 18432),
        (61, 128, 128, 192),
        max_positions=163840,
        rope_scaling=RopeScaling(40.0, original_max_positions=4096, kind="yarn"),
        layers=(LayerType(),) * 3 + (EXPERTS,) * 58,
        rope_size=64,
        rope_interleaved=True,
        query_scale=0.1352337788608801,  # 192 ** -0.5 (0.1 ln 40 + 1) ** 2
        latent=LatentAttentionSizes(512, 128, 128, 1536),
        experts=Experts(
            256,
            8,
            2048,
            shared_size=2048,
            scores="sigmoid",
            scale=2.5,
            selection_bias=True,
            groups=8,
            top_groups=4,
        ),
        **UNTIED,
    ),
    "GLM-4-9B-0414": shape(
        "glm4",
        (151552, 4096, 13696),
        (40, 32, 2, 128),
        norm_eps=1.5625e-7,
        qkv_bias=True,
        rope_size=64,
        rope_interleaved=True,
        post_norms=True,
        **UNTIED,
    ),
    "GLM-4.5-Air": shape(
        "glm4_moe",
        (151552, 4096, 10944),
        (46, 96, 8, 128),
        norm_eps=1e-5,
        qkv_bias=True,
        rope_size=64,
        layers=(LayerType(), *[EXPERTS] * 45),
        experts=Experts(128, 8, 1408, shared_size=1408, scores="sigmoid", selection_bias=True),
        **UNTIED,
    ),
    "Llama-4-Scout": shape(
        "llama4_text",
        (202048, 5120, 16384),
        (48, 40, 8, 128),
        rope_theta=5e5,
        norm_eps=1e-5,
        layers=(*[CHUNK] * 3, LayerType(rope="none", experts=True)) * 12,
        rope_interleaved=True,
        unit_qk=True,
        long_query_scale=0.1,
        experts=Experts(
            16,
            1,
            8192,
            shared_size=8192,
            scores="sigmoid",
            normalized=False,
            weighs_input=True,
        ),
        **UNTIED,
    ),
    "Kimi-K2": shape(
        "deepseek_v3",
        (163840, 7168, 18432),
        (61, 64, 64, 192),
        rope_theta=5e4,
        rope_scaling=RopeScaling(
            32.0, original_max_positions=4096, kind="yarn", fast_turns=1.0, slow_turns=1.0
        ),
        layers=(LayerType(), *[EXPERTS] * 60),
        rope_size=64,
        rope_interleaved=True,
        query_scale=0.13086079996295005,  # 192 ** -0.5 (0.1 ln 32 + 1) ** 2
        latent=LatentAttentionSizes(512, 128, 128, 1536),
        experts=Experts(
            384,
            8,
            2048,
            shared_size=2048,
            scores="sigmoid",
            scale=2.827,
            selection_bias=True,
        ),
        **UNTIED,
    ),
    "DeepSeek-V3.2": shape(
        "deepseek_v32",
        (129280, 7168, 18432),
        (61, 128, 128, 192),
        max_positions=163840,
        rope_scaling=RopeScaling(40.0, original_max_positions=4096, kind="yarn"),
        layers=(LayerType(top_keys=2048),) * 3 + (SPARSE_EXPERTS,) * 58,
        rope_size=64,
        rope_interleaved=True,
        query_scale=0.1352337788608801,
        latent=LatentAttentionSizes(512, 128, 128, 1536),
        indexer=KeyIndexer(64, 128),
        experts=Experts(
            256,
            8,
            2048,
            shared_size=2048,
            scores="sigmoid",
            scale=2.5,
            selection_bias=True,
            groups=8,
            top_groups=4,
        ),
        **UNTIED,
    ),
    "GLM-5": shape(
        "glm_moe_dsa",
        (154880, 6144, 12288),
        (78, 64, 64, 256),
        max_positions=202752,
        rope_theta=1e6,
        norm_eps=1e-5,
        layers=(LayerType(top_keys=2048),) * 3 + (SPARSE_EXPERTS,) * 75,
        rope_size=64,
        rope_interleaved=True,
        latent=LatentAttentionSizes(512, 192, 256, 2048),
        indexer=KeyIndexer(32, 128, rope_interleaved=True),
        experts=Experts(
            256, 8, 2048, shared_size=2048, scores="sigmoid", scale=2.5, selection_bias=True
        ),
        **UNTIED,
    ),
    "SmolLM3-3B": shape(
        "smollm3",
        (128256, 2048, 11008),
        (36, 16, 4, 128),
        max_positions=65536,
        rope_theta=5e6,
        layers=(*[LayerType()] * 3, LayerType(rope="none")) * 9,
    ),
    "OLMo-2-1124-7B": shape(
        "olmo2", (100352, 4096, 11008), (32, 32, 32, 128), max_positions=4096, **OLMO
    ),
    "Olmo-3-7B": shape(
        "olmo3",
        (100278, 4096, 11008),
        (32, 32, 32, 128),
        max_positions=65536,
        # magnitude: 0.1 ln 8 + 1
        rope_scaling=RopeScaling(
            8.0, original_max_positions=8192, kind="yarn", magnitude=1.2079441541679836
        ),
        local_rope_theta=5e5,
        layers=(*[LayerType(window=4096, rope="local")] * 3, LayerType()) * 8,
        **OLMO,
    ),
    "Phi-4": shape(
        "phi3",
        (100352, 5120, 17920),
        (40, 40, 10, 128),
        max_positions=16384,
        rope_theta=250_000.0,
        norm_eps=1e-5,
        **UNTIED,
    ),
    "MiniMax-M2": shape(
        "minimax_m2",
        (200064, 3072, 1536),
        (62, 48, 8, 128),
        max_positions=196608,
        rope_theta=5e6,
        wide_qk_norm=True,
        rope_size=64,
        layers=EXPERTS,
        experts=Experts(256, 8, 1536, scores="sigmoid", selection_bias=True),
        **UNTIED,
    ),
    "Qwen3-Next-80B-A3B": shape(
        "qwen3_next",
        (151936, 2048, 5632),
        (48, 16, 2, 256),
        max_positions=262144,
        rope_theta=1e7,
        experts=Experts(512, 10, 512, shared_size=512, shared_gate=True),
        **hybrid(48, experts=True),
    ),
    "Qwen3.5": shape(
        "qwen3_5_text",
        (248320, 4096, 12288),
        (32, 16, 4, 256),
        max_positions=32768,
        **hybrid(32, experts=False),
    ),
    "Qwen3.5 with experts": shape(
        "qwen3_5_moe_text",
        (248320, 2048, 0),
        (40, 16, 2, 256),
        max_positions=32768,
        experts=Experts(256, 8, 512, shared_size=512, shared_gate=True),
        **hybrid(40, experts=True),
    ),
    "Qwen3-VL-8B": shape(
        "qwen3_vl",
        (151936, 4096, 12288),
        (36, 32, 8, 128),
        max_positions=262144,
        rope_theta=5e6,
        qk_norm=True,
        vision=tower(151655, deepstack_layers=(8, 16, 24)),
        num_deepstack=3,
        **INTERLEAVED,
        **UNTIED,
    ),
    "Qwen3-VL-30B-A3B": shape(
        "qwen3_vl_moe",
        (151936, 2048, 6144),
        (48, 32, 4, 128),
        max_positions=262144,
        rope_theta=5e6,
        qk_norm=True,
        layers=EXPERTS,
        experts=Experts(128, 8, 768),
        vision=tower(151655, deepstack_layers=(8, 16, 24)),
        num_deepstack=3,
        **INTERLEAVED,
        **UNTIED,
    ),
    "Qwen3.5 with images": shape(
        "qwen3_5",
        (248320, 4096, 12288),
        (32, 16, 4, 256),
        max_positions=32768,
        vision=tower(248056),
        **{**INTERLEAVED, "rope_sections": (11, 11, 10)},
        **hybrid(32, experts=False),
    ),
    "Qwen3.5 with experts and images": shape(
        "qwen3_5_moe",
        (248320, 2048, 0),
        (40, 16, 2, 256),
        max_positions=32768,
        experts=Experts(256, 8, 512, shared_size=512, shared_gate=True),
        vision=tower(248056),
        **{**INTERLEAVED, "rope_sections": (11, 11, 10)},
        **hybrid(40, experts=True),
    ),
    "Qwen2.5-VL-7B": shape(
        "qwen2_5_vl",
        (152064, 3584, 18944),
        (28, 28, 4, 128),
        max_positions=128000,
        rope_theta=1e6,
        qkv_bias=True,
        rope_sections=(16, 24, 24),
        vision=VisionArchitecture(32, 1280, 16, 3420, (7, 15, 23, 31)),
        **UNTIED,
    ),
}


def test_every_family_is_here():
    assert {config["model_type"] for config in CONFIGS.values()} == {*FAMILIES, *MODEL_TYPE_ALIASES}
    assert SHAPES.keys() == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shape_of_a_published_model(name):
    found = config_reader.architecture_from_config(vision_config.flat_config(CONFIGS[name]))
    assert dataclasses.asdict(found) == dataclasses.asdict(SHAPES[name])
    written = json.loads(json.dumps(config_writer.to_hf_config(found, "lm", "bfloat16")))
    written = vision_config.flat_config(written)
    assert config_reader.architecture_from_config(written) == found


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
REFUSED = [
    ("gpt-oss-20b", {"rope_parameters": ROPE}, "rope_type must be 'default' or 'linear'"),
    ("Mistral-7B-v0.1", {"rope_parameters": {**ROPE, "rope_type": "other"}}, "'longrope'"),
    (
        "Phi-4",
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_parameters of type longrope lacks short_factor, long_factor",
    ),
    (
        "Phi-4",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}},
        "short_factor has 1 numbers; each of the 64 rotated pairs",
    ),
    (
        "Phi-4",
        {"rope_parameters": {"rope_type": "su", "short_factor": [0.0], "long_factor": "x"}},
        "each rope_parameters.short_factor must be a number .*long_factor must be a list",
    ),
    (
        "MiniMax-M2",
        {"rotary_dim": 32},
        "rotary_dim is 32 and rope_parameters.partial_rotary_factor",
    ),
    ("DeepSeek-V3.2", {"index_topk": 0}, "index_topk must be an integer"),
    ("DeepSeek-V3.2", {"q_lora_rank": None}, "q_lora_rank must be above 0: the indexer"),
    ("DeepSeek-V3.2", {"rope_interleave": False}, "rope_interleave must be true"),
    (
        "DeepSeek-V3.2",
        {"index_head_dim": 32},
        "index_head_dim is 32; its first qk_rope_head_dim=64",
    ),
    ("DeepSeek-V3.2", {"layer_types": ["full_attention"] * 60}, "of 60 layers, num_hidden_layers"),
    ("GLM-5", {"index_topk_freq": 4}, "layers that share the selected keys of an earlier layer"),
    (
        "GLM-5",
        {"indexer_types": ["full", "shared"] * 39},
        "indexer_types .* must be 'full' for all",
    ),
    (
        "GLM-5",
        {"mlp_layer_types": ["dense"] * 77},
        "mlp_layer_types must be 'dense' or 'sparse' for",
    ),
    ("gemma-2-9b", {"layer_types": ["indexed_attention"] * 42}, "only full_attention, sliding_"),
    ("MiniMax-M2", {"attn_type_list": [0, 1]}, "attn_type_list must be 1 for all layers"),
    ("MiniMax-M2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; only 'per_layer'"),
    ("MiniMax-M2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8; only 0"),
    ("SmolLM3-3B", {"no_rope_layers": [1] * 35}, "no_rope_layers is of 35 layers"),
    ("gemma-3-1b", {"rope_parameters": {"full_attention": ROPE}}, "rope_type must be 'default'"),
    (
        "gemma-3-1b",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": ROPE}},
        "rope_parameters.sliding_attention must not be scaled",
    ),
    ("DeepSeek-V3", {"rope_parameters": {"rope_type": "yarn"}}, "yarn lacks factor, original_max"),
    ("gemma-2-9b", {"hidden_activation": "gelu"}, "only 'gelu_pytorch_tanh' is implemented for"),
    ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is implemented"),
    ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; only 7.0 is implemented"),
    ("gpt-oss-20b", {"quantization_config": {"quant_method": "awq"}}, "use a folder of bfloat16"),
    ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}, "cannot visit 9 of 8 experts"),
    ("DeepSeek-V3", {"topk_group": 9}, "of 256 experts in 9 of 8 equal groups"),
    ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc'"),
    ("DeepSeek-V3", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
    ("Qwen3-30B-A3B", {"moe_intermediate_size": None}, "moe_intermediate_size missing"),
    ("gemma-3-1b", {"layer_types": ["full_attention"] * 25}, "of 25 layers, num_hidden_layers"),
    ("gemma-2-9b", {"layer_types": ["chunked_attention"] * 42}, "only full_attention, sliding_"),
    ("Llama-4-Scout", {"layer_types": ["sliding_attention"] * 48}, "only chunked_attention, full"),
    ("Llama-4-Scout", {"no_rope_layers": [1, 0]}, "no_rope_layers is of 2 layers"),
    ("Qwen3-0.6B", {"use_sliding_window": True}, "use_sliding_window is True; only False"),
    ("GLM-4.5-Air", {"head_dim": 66, "partial_rotary_factor": 0.5}, "need an even size"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_unsupported_features_of_a_family_are_refused(name, changes, message):
    config = {**CONFIGS[name], **changes}
    if "partial_rotary_factor" in changes:
        config["rope_parameters"] = None
    with pytest.raises(CheckpointFormatError, match=rf"^here: .*{message}"):
        config_reader.architecture_from_config(config, "here")


def test_wrong_value_of_a_key_is_named():
    """Whatever one key holds, there is a shape or an error with the key's name."""
    of_keys = {key: config for config in CONFIGS.values() for key in config}
    for key, config in of_keys.items():
        for value in ("x", -1, 0, float("nan"), [3], {"a": {}}):
            try:
                config_reader.architecture_from_config({**config, key: value}, "here")
            except CheckpointFormatError as error:
                assert key in str(error) or "experts" in str(error), (key, value, error)
