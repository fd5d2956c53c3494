"""Tokenizers of GGUF files: words, bytes, special tokens; kept by a folder; every refusal."""

import gguf_files
import pytest
from tokenizers import normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel

from jaxrl_llm.data import gguf_tokenizer
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer, load_tokenizer

TEXT = "hello  12 héllo\n<|im_start|>x<tool> 日本 hell123"


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_texts_come_back_and_a_folder_keeps_the_tokenizer(tmp_path, pre):
    tokenizer = gguf_tokenizer.from_fields(gguf_files.byte_level(pre), "a.gguf")
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token is None
    assert "[PAD]" not in tokenizer.get_vocab()
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert pieces(again, TEXT) == pieces(tokenizer, TEXT)
    chat = [{"role": "user", "content": "hello"}]
    text = again.apply_chat_template(chat, tokenize=False)
    assert text == "<|im_start|>hello<|im_end|>"
    # Special tokens are one token each, and the template's are not doubled.
    assert pieces(again, text) == ["<|im_start|>", "hello", "<|im_end|>"]


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("smollm", ["hello", "Ġ", "1", "2", "1"]),  # every digit alone, then GPT-2's words
        ("gpt-2", ["hello", "Ġ12", "1"]),
        ("llama-bpe", ["hello", "Ġ", "12", "1"]),  # three digits, no space before them
        ("qwen2", ["hello", "Ġ", "1", "2", "1"]),
    ],
)
def test_words_end_where_the_model_was_taught(pre, expected):
    tokenizer = gguf_tokenizer.from_fields(
        gguf_files.byte_level(pre, **{"tokenizer.ggml.add_bos_token": False}), "a.gguf"
    )
    assert pieces(tokenizer, "hello 121") == expected


def test_pieces_are_merged_by_their_scores():
    tokenizer = gguf_tokenizer.from_fields(gguf_files.sentence_piece(), "a.gguf")
    assert pieces(tokenizer, "hello hell!") == [
        *("<s>", "▁hello", "▁", "hell", "<0x21>"),
    ]
    assert (
        tokenizer.decode(tokenizer("hello é")["input_ids"], skip_special_tokens=True) == "hello é"
    )
    fields = gguf_files.sentence_piece(
        **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True}
    )
    tokenizer = gguf_tokenizer.from_fields(fields, "a.gguf")
    assert pieces(tokenizer, "hello") == ["<s>", "hello", "</s>"]


def test_plain_text_begins_as_the_file_says():
    begins = {"tokenizer.ggml.add_bos_token": True}
    tokenizer = gguf_tokenizer.from_fields(gguf_files.byte_level(**begins), "a.gguf")
    assert pieces(tokenizer, "hello") == ["<|im_start|>", "hello"]
    fields = gguf_files.byte_level("llama-bpe")
    del fields["tokenizer.ggml.add_bos_token"]  # llama.cpp's default for this one is to add it
    tokenizer = gguf_tokenizer.from_fields(fields, "a.gguf")
    assert pieces(tokenizer, "hello") == ["<|im_start|>", "hello"]


def test_a_turn_may_end_with_another_token_than_the_text():
    fields = gguf_files.byte_level(**{"tokenizer.ggml.eot_token_id": 0})
    assert gguf_tokenizer.end_tokens(fields) == (2, 0)
    assert gguf_tokenizer.end_tokens(gguf_files.byte_level()) == (2,)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', known: gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "poro"}, "tokenizer.ggml.pre is 'poro', known: gpt-2, smollm"),
        ({"tokens": ["a", "a"]}, "not a list of distinct strings"),
        ({"token_type": [1]}, "269 tokens have 1 types"),
        ({"merges": ["zz q"]}, "tokens and merges do not fit"),
        ({"merges": ["zz"]}, "tokens and merges do not fit"),
        ({"bos_token_id": 9999}, "bos_token_id is 9999 of 269 tokens"),
        ({"eos_token_id": None}, "no end-of-sequence token"),
        ({"model": "llama"}, "269 tokens have 0 scores"),
    ],
)
def test_missing_or_unknown_gguf_fields_are_refused(change, message):
    change = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(DataError, match=f"^a.gguf: .*{message}"):
        gguf_tokenizer.from_fields(gguf_files.byte_level(**change), "a.gguf")


def byte_fields(pre="smollm", **changes):
    return gguf_files.byte_level(pre, **changes)


@pytest.mark.parametrize(
    "fields",
    [
        *map(byte_fields, ["smollm", "gpt-2", "qwen2", "llama-bpe"]),
        byte_fields("qwen2", **{"tokenizer.ggml.add_bos_token": True}),
        gguf_files.sentence_piece(),
        gguf_files.sentence_piece(
            **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True}
        ),
    ],
)
def test_fields_come_back_from_their_tokenizer(fields):
    tokenizer = gguf_tokenizer.from_fields(fields, "a.gguf")
    num_tokens = len(fields["tokenizer.ggml.tokens"])
    written = gguf_tokenizer.to_fields(tokenizer, num_tokens + 3)
    for key in ("tokens", "token_type"):
        expected = list(fields[f"tokenizer.ggml.{key}"])
        names = {f"[PAD{i}]": 5 for i in range(num_tokens, num_tokens + 3)}
        if expected[-1] in ("[PAD]", 5):  # an unused token is named by its id
            names = {f"[PAD{num_tokens - 1}]": 5, **names}
            expected.pop()
        expected += names if key == "tokens" else names.values()
        assert written.pop(f"tokenizer.ggml.{key}") == expected
    if "tokenizer.ggml.scores" in fields:  # another scale, the same order of merges
        scores = written.pop("tokenizer.ggml.scores")[:num_tokens]
        made = [i for i, piece in enumerate(fields["tokenizer.ggml.tokens"]) if i > 263]
        order = fields["tokenizer.ggml.scores"]
        assert sorted(made, key=scores.__getitem__) == sorted(made, key=order.__getitem__)
    defaults = {"add_eos_token": False, "add_space_prefix": True, "pre": "default"}
    for key, value in written.items():
        short = key.removeprefix("tokenizer.ggml.")
        assert value == fields.get(key, short == "add_bos_token" or defaults.get(short)), key


def test_more_end_tokens_are_end_of_turn_and_of_message():
    tokenizer = gguf_tokenizer.from_fields(byte_fields(), "a.gguf")
    fields = gguf_tokenizer.to_fields(tokenizer, 269, end_token_ids=(2, 0, 1))
    assert gguf_tokenizer.end_tokens(fields) == (2, 0, 1)


def changed(change):
    tokenizer = gguf_tokenizer.from_fields(byte_fields(), "a.gguf")
    change(tokenizer.backend_tokenizer)
    return tokenizer


def add_two_tokens(backend):
    backend.post_processor = processors.TemplateProcessing(
        single=["<tool>", "$A"], special_tokens=[("<tool>", 3)]
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (character_tokenizer, "reads byte-level BPE .* this one is BPE of characters or words"),
        (
            lambda: changed(lambda b: setattr(b, "pre_tokenizer", ByteLevel(use_regex=False))),
            "splits texts into words as none of gpt-2, smollm, .*convert_hf_to_gguf",
        ),
        (
            lambda: changed(lambda b: setattr(b, "normalizer", normalizers.Lowercase())),
            "'Hello world' would become .*; export with --format=hf",
        ),
        (lambda: changed(add_two_tokens), r"puts tokens \[3\] before and \[\] after a text"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks(make, message):
    with pytest.raises(DataError, match=f"^the tokenizer in GGUF: .*{message}"):
        gguf_tokenizer.to_fields(make(), 280)


def test_composed_text_is_left_to_the_caller():
    tokenizer = changed(lambda b: setattr(b, "normalizer", normalizers.NFC()))
    assert gguf_tokenizer.to_fields(tokenizer, 269)["tokenizer.ggml.pre"] == "smollm"
