"""Folders of tokenizers and models with one contradiction each, by seed.

A case writes a valid folder, then makes one place of it contradict another. It returns the word
that a refusal must name. A folder that is not refused must load as its weights and tokenizer.json
say.
"""

import functools
import json
import shutil

import hf_checkpoints
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
CORPUS = (
    "Hello world, the quick brown fox 12345 jumps over 678!",
    "def f(x):\n    return x + 1\n",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f600 text text the the",
) * 8
MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "glm4", "gpt_oss", "deepseek_v3")
CLASSES = (
    *("PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer"),
    *("Qwen2TokenizerFast", "GPT2TokenizerFast", "GemmaTokenizerFast", "TokenizersBackend"),
)
WEIGHTS = "model.safetensors"


# Tokenizers.


@functools.cache
def tokenizer_text(kind):
    """tokenizer.json of a trained tokenizer."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=[*SPECIAL, *bytes_], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        splits = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind == "digits":
            splits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), splits])
        if kind == "composed":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer, tokenizer.decoder = splits, decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


KINDS = ("bytes", "composed", "digits", "metaspace")


def write_json(path, contents):
    path.write_text(json.dumps(contents, ensure_ascii=False))


def edit(path, change):
    contents = json.loads(path.read_text()) if path.exists() else {}
    change(contents)
    write_json(path, contents)


def make_tokenizer(folder, random, kind=""):
    """A valid folder of a tokenizer, without a model."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer_text(kind or str(random.choice(KINDS))))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    write_json(folder / "tokenizer_config.json", settings)


def ids_of(folder):
    file = json.loads((folder / "tokenizer.json").read_text())
    ids = dict(file["model"]["vocab"])
    return ids | {token["content"]: token["id"] for token in file["added_tokens"]}


def some_token(folder, random):
    plain = [token for token in ids_of(folder) if token not in SPECIAL and token.isascii()]
    return str(random.choice(plain))


def class_and_model_type(folder, random):
    """The settings name a class that may bring its own normalizer and splits."""
    make_tokenizer(folder, random)
    kind, of_model = str(random.choice(CLASSES)), str(random.choice(MODEL_TYPES))
    edit(folder / "tokenizer_config.json", lambda c: c.update(tokenizer_class=kind))
    write_json(folder / "config.json", {"model_type": of_model})
    return "tokenizer.json"


def no_class(folder, random):
    class_and_model_type(folder, random)
    edit(folder / "tokenizer_config.json", lambda c: c.pop("tokenizer_class"))
    return "tokenizer.json"


def another_prefix_space(folder, random):
    class_and_model_type(folder, random)
    edit(folder / "tokenizer_config.json", lambda c: c.update(add_prefix_space=True))
    return "tokenizer.json"


def another_id_of_an_added_token(folder, random):
    make_tokenizer(folder, random)
    token, number = str(random.choice(SPECIAL)), int(random.integers(20, 200))
    decoder = {str(number): {"content": token, "special": True}}
    edit(folder / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder=decoder))
    return "added_tokens_decoder"


def another_id_in_added_tokens(folder, random):
    make_tokenizer(folder, random)
    write_json(folder / "added_tokens.json", {str(random.choice(SPECIAL)): 300})
    return "added_tokens.json"


def other_flags_of_an_added_token(folder, random):
    make_tokenizer(folder, random)
    token = str(random.choice(SPECIAL))
    flag = str(random.choice(["lstrip", "rstrip", "single_word"]))
    entry = {"content": token, "special": True, "normalized": False, flag: True}
    decoder = {str(ids_of(folder)[token]): entry}
    edit(folder / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder=decoder))
    return flag


def an_end_that_is_no_token(folder, random):
    make_tokenizer(folder, random)
    key = str(random.choice(["eos_token", "bos_token"]))
    edit(folder / "tokenizer_config.json", lambda c: c.update({key: "<|absent|>"}))
    return key


def another_end_in_the_map(folder, random):
    make_tokenizer(folder, random)
    key = str(random.choice(["eos_token", "bos_token"]))
    content = "<|im_end|>" if random.random() < 0.5 else {"content": "<|im_end|>"}
    write_json(folder / "special_tokens_map.json", {key: content})
    return key


def another_chat_template(folder, random):
    make_tokenizer(folder, random)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}" + "!" * 3)
    return "chat_template"


def another_vocabulary_file(folder, random):
    make_tokenizer(folder, random)
    ids = ids_of(folder)
    one, other = some_token(folder, random), some_token(folder, random)
    if one == other:
        other = next(token for token in ids if token != one)
    ids[one], ids[other] = ids[other], ids[one]
    write_json(folder / "vocab.json", ids)
    return "vocab.json"


def two_tokens_of_one_id(folder, random):
    make_tokenizer(folder, random)
    token = some_token(folder, random)
    edit(folder / "tokenizer.json", lambda c: c["model"]["vocab"].update({token: 30}))
    return "30"


def an_added_token_with_the_id_of_another(folder, random):
    make_tokenizer(folder, random)
    entry = {**json.loads((folder / "tokenizer.json").read_text())["added_tokens"][0]}
    entry |= {"id": int(random.integers(20, 200)), "content": "<|new|>"}
    edit(folder / "tokenizer.json", lambda c: c["added_tokens"].append(entry))
    return "<|new|>"


def no_token_for_unknown_text(folder, random):
    make_tokenizer(folder, random)
    known = {"a": 0, "</s>": 1, "<s>": 2}
    if random.random() < 0.5:
        tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    else:
        tokenizer = Tokenizer(models.BPE(known, [], unk_token="<unk>"))
    edit(folder / "tokenizer_config.json", lambda c: c.pop("unk_token"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return "cannot encode"


def a_denied_first_token(folder, random):
    make_tokenizer(folder, random)
    key, token = [("bos", "<s>"), ("eos", "</s>")][int(random.integers(2))]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A" if key == "bos" else f"$A {token}",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", lambda c: c.update({f"add_{key}_token": False}))
    return f"add_{key}_token"


def special_tokens_that_are_split(folder, random):
    make_tokenizer(folder, random)
    edit(folder / "tokenizer_config.json", lambda c: c.update(split_special_tokens=True))
    return "tokenizer.json"


def texts_that_are_cut(folder, random):
    """A stored truncation, which is no part of what a text is."""
    make_tokenizer(folder, random)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(int(random.integers(2, 6)))
    tokenizer.save(str(folder / "tokenizer.json"))
    return "truncation"


TOKENIZERS = (
    class_and_model_type,
    no_class,
    another_prefix_space,
    another_id_of_an_added_token,
    another_id_in_added_tokens,
    other_flags_of_an_added_token,
    an_end_that_is_no_token,
    another_end_in_the_map,
    another_chat_template,
    another_vocabulary_file,
    two_tokens_of_one_id,
    an_added_token_with_the_id_of_another,
    no_token_for_unknown_text,
    a_denied_first_token,
    special_tokens_that_are_split,
    texts_that_are_cut,
)


# Models.


def make_model(folder, random, family="", **changes):
    """A valid folder of a model of two layers; returns its config."""
    hf_checkpoints.make(folder, family or str(random.choice(hf_checkpoints.FAMILIES)), **changes)
    return json.loads((folder / "config.json").read_text())


def change_config(folder, **changes):
    edit(folder / "config.json", lambda c: c.update(changes))


def change_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / WEIGHTS)


def without_rope(config):
    return {key: value for key, value in config.items() if key not in ("rope_parameters",)}


def two_kinds_of_scaling(folder, random):
    make_model(folder, random)
    kind, factor = str(random.choice(["linear", "yarn"])), float(random.integers(2, 9))
    change_config(
        folder,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rope_theta=None,
        rope_scaling={
            "type": kind,
            "factor": factor,
            "original_max_position_embeddings": 64,
        },
    )
    return "rope_scaling"


def two_factors(folder, random):
    make_model(folder, random)
    factor = float(random.integers(2, 9))
    linear = {"rope_type": "linear", "rope_theta": 1e4}
    change_config(
        folder,
        rope_theta=None,
        rope_parameters={**linear, "factor": factor},
        rope_scaling={**linear, "factor": factor + 1},
    )
    return "factor"


def two_base_frequencies(folder, random):
    make_model(folder, random)
    theta = float(random.integers(2, 90)) * 1e4
    rope = {"rope_type": "default", "rope_theta": theta}
    change_config(folder, rope_parameters=rope, rope_theta=theta * 2, rope_scaling=None)
    return "rope_theta"


def two_names_of_a_scaling(folder, random):
    make_model(folder, random)
    rope = {"type": "linear", "rope_type": "yarn", "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    change_config(folder, rope_scaling=rope, rope_parameters=None, rope_theta=1e4)
    return "rope_type"


def a_factor_that_scales_nothing(folder, random):
    make_model(folder, random)
    key = str(random.choice(["rope_scaling", "rope_parameters"]))
    other = {"rope_scaling": None, "rope_parameters": None}
    rope = {"rope_type": "default", "factor": float(random.integers(2, 9)), "rope_theta": 1e4}
    change_config(folder, **{**other, key: rope, "rope_theta": 1e4})
    return "factor"


def another_projection_than_the_tied_one(folder, random):
    make_model(folder, random)

    def untie(tensors):
        head = np.array(tensors["model.embed_tokens.weight"])
        head[int(random.integers(len(head))), 0] += 1.0
        tensors["lm_head.weight"] = head

    change_weights(folder, untie)
    change_config(folder, tie_word_embeddings=True)
    return "tie_word_embeddings"


def no_projection_though_untied(folder, random):
    make_model(folder, random)
    change_weights(folder, lambda tensors: tensors.pop("lm_head.weight", None))
    change_config(folder, tie_word_embeddings=False)
    return "lm_head.weight"


def another_number_of_layers(folder, random):
    config = make_model(folder, random)
    number = config["num_hidden_layers"] + int(random.choice([-1, 1, 2]))
    # What lists layers says how many there are, too.
    change_config(folder, num_hidden_layers=number, layer_types=None, max_window_layers=number)
    return "layers."


def another_number(key, name, numbers):
    def case(folder, random):
        config = make_model(folder, random)
        current = config.get(key)
        change_config(folder, **{key: int(random.choice([n for n in numbers if n != current]))})
        return name

    case.__name__ = f"another_{key}"
    return case


def a_bias_that_is_not_of_the_family(folder, random):
    config = make_model(folder, random, str(random.choice(["llama", "qwen3"])))
    layer, ours = (
        int(random.integers(config["num_hidden_layers"])),
        str(random.choice(list("qkvo"))),
    )
    module = f"model.layers.{layer}.self_attn.{ours}_proj"

    def add(tensors):
        tensors[f"{module}.bias"] = np.ones(len(tensors[f"{module}.weight"]), np.float32)

    change_weights(folder, add)
    return f"{ours}_proj.bias"


def a_norm_that_is_not_of_the_family(folder, random):
    make_model(folder, random, str(random.choice(["llama", "qwen2"])))
    name = f"model.layers.0.self_attn.{random.choice(['q', 'k'])}_norm.weight"
    change_weights(folder, lambda tensors: tensors.update({name: np.full(8, 2.0, np.float32)}))
    return "_norm.weight"


def another_family(folder, random):
    config = make_model(folder, random)
    types = [name for name in ("llama", "qwen2", "qwen3") if name != config["model_type"]]
    change_config(folder, model_type=str(random.choice(types)))
    return "architectures"


def two_architectures(folder, random):
    config = make_model(folder, random)
    (name,) = config["architectures"]
    other = name.replace("ForCausalLM", "ForSequenceClassification")
    change_config(folder, architectures=[name, other])
    return "architectures"


def a_family_without_its_tensors(folder, random):
    make_model(folder, random, "llama")
    name, head = [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")][
        int(random.integers(2))
    ]
    change_config(folder, model_type=name, architectures=[head])
    return "missing"


def a_tensor_in_two_shards(folder, random):
    make_model(folder, random, max_shard_bytes=int(random.integers(8_000, 30_000)))
    files = sorted(folder.glob("model-*.safetensors"))
    first, other = load_file(files[0]), load_file(files[-1])
    name = str(random.choice(sorted(first)))
    other[name] = first[name] + 1.0
    save_file(other, files[-1])
    if random.random() < 0.5:  # the index may name either

        def point(index):
            index["weight_map"][name] = files[-1].name

        edit(folder / "model.safetensors.index.json", point)
    return name


def two_sets_of_weights(folder, random):
    make_model(folder, random, max_shard_bytes=20_000)
    whole = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        whole |= load_file(file)
    name = str(random.choice(sorted(whole)))
    whole[name] = whole[name] * 2.0
    save_file(whole, folder / WEIGHTS)
    return "two sets of weights"


def an_index_with_another_file(folder, random):
    make_model(folder, random, max_shard_bytes=20_000)

    def move(index):
        names = sorted(index["weight_map"])
        files = sorted(set(index["weight_map"].values()))
        name = str(random.choice(names))
        index["weight_map"][name] = next(f for f in files if f != index["weight_map"][name])

    edit(folder / "model.safetensors.index.json", move)
    return "index"


def an_index_without_a_tensor(folder, random):
    make_model(folder, random, max_shard_bytes=20_000)

    def drop(index):
        names = [name for name in sorted(index["weight_map"]) if name.startswith("model.layers")]
        del index["weight_map"][str(random.choice(names))]

    edit(folder / "model.safetensors.index.json", drop)
    return "missing"


def layers_that_slide_without_a_window(folder, random):
    config = make_model(folder, random, str(random.choice(["qwen2", "qwen3", "llama"])))
    types = ["full_attention"] * config["num_hidden_layers"]
    types[int(random.integers(len(types)))] = "sliding_attention"
    change_config(folder, layer_types=types, use_sliding_window=False, sliding_window=None)
    return "layer_types"


def another_number_of_layer_types(folder, random):
    config = make_model(folder, random)
    number = config["num_hidden_layers"] + int(random.choice([-1, 1]))
    change_config(folder, layer_types=["full_attention"] * number)
    return "layer_types"


def eight_bits_without_scales(folder, random):
    make_model(folder, random)
    stored = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    change_config(folder, quantization_config=stored)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    change_weights(folder, lambda tensors: tensors.update({name: np.ones((1, 1), np.float32)}))
    return "q_proj.weight"


def scales_without_a_quantization(folder, random):
    make_model(folder, random)
    name = f"model.layers.0.mlp.{random.choice(['up', 'down', 'gate'])}_proj.weight_scale_inv"
    change_weights(folder, lambda tensors: tensors.update({name: np.ones((1, 1), np.float32)}))
    return "weight_scale_inv"


def numbers_that_are_none(folder, random):
    make_model(folder, random)
    bad = float(random.choice([np.nan, np.inf, -np.inf]))
    names = []

    def spoil(tensors):
        names.append(str(random.choice(sorted(n for n in tensors if n.startswith("model.")))))
        array = np.array(tensors[names[0]])
        array.flat[int(random.integers(array.size))] = bad
        tensors[names[0]] = array

    change_weights(folder, spoil)
    return names[0]


def a_key_that_comes_twice(folder, random):
    config = make_model(folder, random)
    key = str(random.choice(["num_hidden_layers", "rope_theta", "rms_norm_eps"]))
    value = config.get(key) or 1e4
    text = json.dumps({**config, key: value})
    again = f'"{key}": {json.dumps(value)}, "{key}": {json.dumps(value * 2)}'
    (folder / "config.json").write_text(text.replace(f'"{key}": {json.dumps(value)}', again, 1))
    return key


def ends_that_are_no_tokens(folder, random):
    config = make_model(folder, random)
    values = ("258", [[258]], config["vocab_size"] + 9999, -1, True, [2, "3"], 2.5)
    value = values[int(random.integers(len(values)))]
    if random.random() < 0.5:
        write_json(folder / "generation_config.json", {"eos_token_id": value})
    else:
        change_config(folder, eos_token_id=value)
    return "eos_token_id"


MODELS = (
    two_kinds_of_scaling,
    two_factors,
    two_base_frequencies,
    two_names_of_a_scaling,
    a_factor_that_scales_nothing,
    another_projection_than_the_tied_one,
    no_projection_though_untied,
    another_number_of_layers,
    another_number("num_key_value_heads", "k_proj.weight", (1, 4)),
    another_number("vocab_size", "embed_tokens.weight", (64, 95, 97, 128)),
    another_number("intermediate_size", "mlp", (16, 24, 200)),
    another_number("hidden_size", "embed_tokens.weight", (16, 24, 64, 128)),
    another_number("head_dim", "_proj", (6, 12, 32)),
    a_bias_that_is_not_of_the_family,
    a_norm_that_is_not_of_the_family,
    another_family,
    two_architectures,
    a_family_without_its_tensors,
    a_tensor_in_two_shards,
    two_sets_of_weights,
    an_index_with_another_file,
    an_index_without_a_tensor,
    layers_that_slide_without_a_window,
    another_number_of_layer_types,
    eight_bits_without_scales,
    scales_without_a_quantization,
    numbers_that_are_none,
    a_key_that_comes_twice,
    ends_that_are_no_tokens,
)


def make(case, seed, folder):
    """Writes the folder of a case; returns the word that a refusal names."""
    shutil.rmtree(folder, ignore_errors=True)
    return case(folder, np.random.default_rng(seed))
