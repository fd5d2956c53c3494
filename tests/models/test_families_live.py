"""Every family against transformers itself: logits, gradients, greedy decode, folders, configs.

Its tiny models are those of `random_model.EXAMPLES`, and those of `VARIANTS` with other shapes.
"""

import itertools

import jax
import numpy as np
import pytest
import tiny
from flax import traverse_util

from jaxrl_llm.models.hf import checkpoint, config_reader, random_model, safetensors_file
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.sharding.mesh import TRAIN, shardings

TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": None}
# Beside `EXAMPLES`: family, and the keys that differ from its example.
VARIANTS = {
    "qwen3_5_deep": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 6,
            "full_attention_interval": 3,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 5,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
    ),
    "kimi_k2": (
        "deepseek_v3",
        {
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 20,
            "q_lora_rank": None,
            "qk_rope_head_dim": 6,
            "head_dim": 6,
            "qk_nope_head_dim": 10,
            "v_head_dim": 14,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 2.827,
        },
    ),
    "smollm3_window": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 19,
            "no_rope_layer_interval": 2,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "phi3_longrope": (
        "phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "sliding_window": None,
            "tie_word_embeddings": False,
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
}
# All rows are longer than the original context; `generate` changes the factors within a sequence.
VARIANTS["phi3_long"] = ("phi3", {**VARIANTS["phi3_longrope"][1]})
VARIANTS["phi3_long"][1]["original_max_position_embeddings"] = 32
OF_TEXT = [name for name, keys in random_model.EXAMPLES.items() if "vision_config" not in keys]
ODD_SEEDS = (1, 2)


def odd_sizes(family, seed):
    """Keys of a model whose sizes have little to do with each other."""
    random = np.random.default_rng([seed, *family.encode()])
    pick = lambda *values: values[random.integers(len(values))]  # noqa: E731
    example = random_model.example(family)
    heads = pick(2, 3, 6)
    sizes = {
        "hidden_size": pick(20, 36, 52),
        "intermediate_size": pick(28, 44),
        "num_hidden_layers": pick(3, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": pick(1, heads),
        "head_dim": pick(8, 12, 20),
        "tie_word_embeddings": bool(pick(0, 1)),
    }
    if "sliding_window" in example:
        sizes["sliding_window"] = pick(3, 7, 31)
    if "attention_chunk_size" in example:
        sizes["attention_chunk_size"] = pick(3, 31)
    if "layer_types" in example:
        kinds = ["sliding_attention", "full_attention"]
        sizes["layer_types"] = [pick(*kinds) for _ in range(sizes["num_hidden_layers"])]
    if "mlp_layer_types" in example:
        sizes["mlp_layer_types"] = [pick("dense", "sparse") for _ in range(5)][
            : sizes["num_hidden_layers"]
        ]
    if family == "qwen2" or "gemma" in family:  # whose heads divide the hidden size
        sizes["hidden_size"] = heads * sizes["head_dim"]
    if "kv_lora_rank" in example:
        rope = pick(4, 6)
        sizes |= {"num_key_value_heads": heads, "head_dim": rope, "qk_rope_head_dim": rope}
        sizes |= {"qk_nope_head_dim": pick(5, 14), "v_head_dim": pick(7, 16)}
        sizes |= {"kv_lora_rank": pick(9, 18), "q_lora_rank": pick(11, 24)}
    if "index_topk" in example:
        sizes |= {"index_topk": pick(3, 17), "index_head_dim": pick(6, 16)}
    return sizes


# Families with images have tests of their own.
TABLE = {
    **{family: (family, {}) for family in OF_TEXT},
    **VARIANTS,
    **{
        f"{family}, odd {seed}": (family, odd_sizes(family, seed))
        for family in OF_TEXT
        for seed in ODD_SEEDS
    },
}
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LENGTHS = (40, 33)
NUM_GREEDY = 64

pytestmark = pytest.mark.parity


def is_zero_centred(family, name):
    """Whether a norm multiplies by 1 + its weight."""
    return "gemma" in family or (family in HYBRID and "linear_attn" not in name)


def rows_of_table(*excluded):
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(name, marks=pytest.mark.nightly if ", odd " in name else ())
            for name in TABLE
            if name not in excluded
        ],
    )


ALL = rows_of_table()


def make(torch, name):
    """Returns a model whose biases and norms are random too, and whose scores are clear."""
    import transformers

    family, changes = TABLE[name]
    torch.manual_seed(0)
    keys = {**random_model.example(family, **changes), **TOKENS}
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for path, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in path or "embed_scale" in path:
                continue
            size, mean = (0.5, 1.0) if "norm" in path else (0.15, 0.0)
            if "norm" in path and is_zero_centred(family, path):
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


@ALL
def test_a_family_is_that_of_transformers(family, torch, tmp_path):
    model = make(torch, family)
    model.save_pretrained(tmp_path / "theirs")
    shape = checkpoint.read_architecture(tmp_path / "theirs").for_length(max(LENGTHS))
    network = Network(shape)
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


@ALL
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


@rows_of_table("phi3_long")
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
