"""A text never has fewer tokens than its bound, and a row that cannot fit is not tokenized."""

import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import load_dataset
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.token_bound import token_bound
from jaxrl_llm.data.tokenizer import character_tokenizer

CORPUS = [
    "to be or not to be",
    "wherever whenever forever",
    "ééé café",
    "{{}} == ----",
    "日本語日本",
]
BYTES = {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}


def byte_level(normalizer=None):
    """As GPT-2, Qwen and Llama 3 have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 9, trainer)
    return backend


def with_greedy_tokens():
    """Added tokens that swallow the white space around them, as Phi-3 has them."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True)])
    return backend


def byte_fallback():
    """As Llama 2 has it."""
    words = {"▁": 300, "t": 301, "o": 302, "to": 303, "▁to": 304}
    merges = [("t", "o"), ("▁", "to")]
    backend = tokenizers.Tokenizer(
        models.BPE({"<unk>": 0, **BYTES, **words}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.ByteFallback()
    return backend


def wrapped(backend):
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


PROVED = {
    "characters": character_tokenizer(),
    "byte level": wrapped(byte_level()),
    "composed": wrapped(byte_level(normalizers.NFC())),
    "composed for compatibility": wrapped(byte_level(normalizers.NFKC())),
    "greedy tokens": wrapped(with_greedy_tokens()),
    "byte fallback": wrapped(byte_fallback()),
}
texts = st.lists(
    st.text(max_size=8)
    | st.sampled_from(["to be ", "whenever", "<|end|>", " " * 50, "e\u0301" * 20, "ᄀ\u1161ᆨ" * 9])
    | st.sampled_from(["\u1f00\u0300\u0345" * 9, "½", "ﷺ", "<assistant>", "\n\x1f\u3000"]),
    max_size=12,
).map("".join)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_its_bound(text):
    for name, tokenizer in PROVED.items():
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert token_bound(tokenizer)(text) <= len(found), name


@pytest.mark.parametrize("name", PROVED)
def test_the_bound_grows_with_the_text(name):
    bound = token_bound(PROVED[name])
    assert bound("") == 0 and bound("x" * 100_000) > 1000


def fused_unknown():
    return tokenizers.Tokenizer(
        models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)
    )


def dropped_unknown():
    return tokenizers.Tokenizer(models.BPE({"a": 0}, []))


def words():
    return tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def stripped():
    return byte_level(normalizers.Replace(tokenizers.Regex("x+"), "x"))


def split_away():
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "removed"), backend.pre_tokenizer]
    )
    return backend


@pytest.mark.parametrize(
    "backend",
    [fused_unknown, dropped_unknown, words, stripped, split_away],
    ids=lambda f: f.__name__,
)
def test_nothing_is_claimed_of_a_tokenizer_that_joins_or_drops(backend):
    tokenizer = wrapped(backend())
    assert len(tokenizer("x" * 1000)["input_ids"]) < 10
    assert token_bound(tokenizer)("x" * 1000) == 0


def test_a_row_that_cannot_fit_is_not_tokenized(tmp_path):
    file = tmp_path / "rows.jsonl"
    prompts = ["to be", "whenever " * 2_000_000, "or not"]
    rows = [{"data_source": "s", "prompt": prompt} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        task="files", train_files=(str(file),), max_prompt_tokens=64, chat_template=False
    )
    begin = time.monotonic()
    dataset = load_dataset(config, PROVED["composed"], "train", 0)
    assert time.monotonic() - begin < 30  # tokenized, it takes minutes
    assert [prompt.index for prompt in dataset.prompts] == [0, 2] and dataset.num_dropped == 1
    strict = DataConfig(
        task="files",
        train_files=(str(file),),
        max_prompt_tokens=64,
        chat_template=False,
        filter_long_prompts=False,
    )
    with pytest.raises(DataError, match=r"row 1: the prompt has at least \d{6,7} tokens, more"):
        load_dataset(strict, PROVED["composed"], "train", 0)
