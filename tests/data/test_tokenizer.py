"""Tokenizers of characters and of folders, prompts as tokens, and the lower bound of tokens."""

import json
import string
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
from jaxrl_llm.data.tokenizer import (
    character_tokenizer,
    load_tokenizer,
    render_prompts,
    token_bound,
)

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture
def folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_every_character_is_one_token_and_comes_back(tokenizer):
    text = string.digits + string.ascii_letters + string.punctuation + " \n  a , b .  don 't"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == 104
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 1
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_words_are_one_token_each_and_the_longer_one_is_taken(tmp_path):
    words = ("call", "call(", '{"name": "', '"}}')
    tokenizer = character_tokenizer(words=words)
    text = '{"name": "call("}} callcal <eos>"}'
    tokens = tokenizer.encode(text)
    split = ['{"name": "', "call(", '"}}', " ", "call", *"cal ", "<eos>", '"', "}"]
    assert [tokenizer.decode(token) for token in tokens] == split
    assert tokenizer.decode(tokens) == text and len(tokenizer) == 112
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text.replace("<eos>", "")
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode(text) == tokens
    call = {"name": "call", "arguments": {}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]
    assert tokenizer.apply_chat_template(chat)["input_ids"][2] == len(tokenizer) - 6
    assert 0 < token_bound(tokenizer)(text) <= len(tokens)
    with pytest.raises(DataError, match=r"config\.model\.words: '<eos>' is a token already"):
        character_tokenizer(words=("call", "<eos>"))


def test_save_and_load_round_trip(tokenizer, folder):
    loaded = load_tokenizer(str(folder))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert render_prompts(loaded, [CHAT]) == render_prompts(tokenizer, [CHAT])
    assert loaded.decode(loaded.encode(" a , b\n")) == " a , b\n"


def test_rendering_is_the_template_with_an_open_turn(tokenizer):
    (tokens,), (text,) = render_prompts(tokenizer, [CHAT])
    assert text == "<bos><system>Add.<eos><user>3+4=<eos><assistant>"
    direct = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    assert list(tokens) == list(direct["input_ids"])
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "Add.3+4="


def test_rendering_without_a_template_joins_the_contents(tokenizer):
    (tokens,), (text,) = render_prompts(tokenizer, [CHAT], chat_template=False)
    assert text == "Add.\n3+4="
    assert list(tokens) == tokenizer.encode("Add.\n3+4=")


def test_rows_do_not_depend_on_their_neighbours(tokenizer):
    other = [{"role": "user", "content": "a much longer question than the first"}]
    alone, _ = render_prompts(tokenizer, [CHAT])
    together, _ = render_prompts(tokenizer, [other, CHAT, other])
    assert together[1] == alone[0]
    assert render_prompts(tokenizer, []) == ([], [])


def test_a_template_file_replaces_the_folders_own(folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}!")
    loaded = load_tokenizer(str(folder), str(template))
    assert render_prompts(loaded, [CHAT])[1] == ["Add.3+4=!"]
    with pytest.raises(DataError, match=r"absent\.jinja"):
        load_tokenizer(str(folder), str(tmp_path / "absent.jinja"))


def test_template_errors_are_reported(tokenizer, folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('only users, please') }}")
    loaded = load_tokenizer(str(folder), str(template))
    with pytest.raises(DataError, match=r"refuses .*Add\..*only users, please"):
        render_prompts(loaded, [CHAT])
    loaded.chat_template = None
    with pytest.raises(DataError, match=r"set model\.chat_template"):
        render_prompts(loaded, [CHAT])


def test_unloadable_tokenizers_are_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"absent.*no such folder"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no tokenizer file .* tokenizer\.json"):
        load_tokenizer(str(tmp_path / "empty"))
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(DataError, match=r"cannot be read: JSONDecodeError"):
        load_tokenizer(str(folder))


def test_a_tokenizer_without_an_end_is_refused(tokenizer, tmp_path):
    endless = character_tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))


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
    assert [prompt.index for prompt in dataset.prompts] == [0, 2]
    strict = DataConfig(
        task="files",
        train_files=(str(file),),
        max_prompt_tokens=64,
        chat_template=False,
        long_rows="error",
    )
    with pytest.raises(DataError, match=r"row 2: the prompt has at least \d{6,7} tokens, more"):
        load_dataset(strict, PROVED["composed"], "train", 0)
