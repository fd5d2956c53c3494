"""Text as it comes: the pieces add up, whole characters only, stop strings never shown."""

import itertools

import pytest
import serving_model
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.token_names import TokenNames, detokenizer
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.rollout.engine.requests import text_before
from jaxrl_llm.serving.replies import IncrementalDetokenizer

BYTES = serving_model.byte_tokenizer()


def piece_tokenizer():
    """Returns a tokenizer in SentencePiece's way: words begin with ▁, rare bytes are tokens."""
    words = ["<pad>", "<eos>", "▁a", "▁the", "the", "n", "▁", "好", "▁好"]
    vocabulary = {word: i for i, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=None)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


PIECES = piece_tokenizer()


def pieces_of(tokenizer, tokens, cuts, stop=(), reason="length"):
    """Returns what is told when `tokens` come in pieces that end at `cuts`."""
    transcript = IncrementalDetokenizer(detokenizer(tokenizer), (tokenizer.eos_token_id,), stop)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    return [
        transcript.extend(tokens[a:b], reason if b == len(tokens) else "")
        for a, b in itertools.pairwise(edges)
    ]


def tokens_below(size):
    return st.lists(st.integers(0, size - 1), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(tokens_below(len(BYTES)), st.lists(st.integers(1, 59)))
def test_any_bytes_add_up_to_the_text_of_all_tokens(tokens, cuts):
    assert "".join(pieces_of(BYTES, tokens, cuts)) == detokenizer(BYTES)(tokens)


@settings(max_examples=100, deadline=None)
@given(tokens_below(len(PIECES)), st.lists(st.integers(1, 59)))
def test_the_pieces_do_not_change_the_text(tokens, cuts):
    assert "".join(pieces_of(PIECES, tokens, cuts)) == "".join(pieces_of(PIECES, tokens, ()))


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_streamed_pieces_hold_whole_characters(tokenizer, data):
    if tokenizer is BYTES:
        text = data.draw(st.text(alphabet="aé你😀 n", min_size=1, max_size=20))
        tokens = BYTES(text)["input_ids"]
    else:
        parts = data.draw(st.lists(st.sampled_from(["▁a", "▁the", "the", "▁好", "é", "😀"])))
        tokens = [PIECES.convert_tokens_to_ids("▁a")]
        for part in parts:
            known = part in PIECES.get_vocab()
            names = [part] if known else [f"<0x{byte:02X}>" for byte in part.encode()]
            tokens += PIECES.convert_tokens_to_ids(names)
        text = detokenizer(PIECES)(tokens)
    told = pieces_of(tokenizer, tokens, range(60))
    assert "".join(told) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in told)


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="abc", min_size=1, max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_is_never_shown(text, stop):
    tokenizer = character_tokenizer()
    ends = [text.find(s) + len(s) for s in stop if s in text]
    tokens = tokenizer.encode(text)[: min(ends, default=len(text))]  # where the engine ends it
    told = pieces_of(tokenizer, tokens, range(30), stop, "stop" if ends else "length")
    kept = "".join(told)
    assert kept == text_before(text[: len(tokens)], stop)
    assert not any(s in kept for s in stop)


def test_text_is_not_held_back_longer_than_it_must_be():
    tokenizer = character_tokenizer()
    told = pieces_of(tokenizer, tokenizer.encode("no Qu Qui"), range(9), ("Quit", "uit"))
    assert told == ["n", "o", " ", "", "", "Qu ", "", "", "Qui"]
    transcript = IncrementalDetokenizer(detokenizer(tokenizer), (), ("or not", "be?"))
    assert transcript.extend(tokenizer.encode("to be, o"), "") == "to be, "


def test_bytes_that_never_become_a_character_are_told_nevertheless():
    bad = BYTES.convert_tokens_to_ids("\u00ff")  # the byte 0xff in a byte-level vocabulary
    told = pieces_of(BYTES, [bad] * 90, range(90))
    broken = "\N{REPLACEMENT CHARACTER}"
    assert told[:4] == ["", "", "", broken]
    assert "".join(told) == broken * 90 and max(map(len, told)) < 8


def test_special_tokens_and_the_stop_token_have_no_text():
    ids = PIECES.convert_tokens_to_ids
    tokens = [0, 0, ids("▁the"), 0, 0, 0, 0, 0, 0, ids("▁a"), ids("n")]
    assert "".join(pieces_of(PIECES, tokens, range(20))) == "the an"
    transcript = IncrementalDetokenizer(detokenizer(PIECES), (ids("n"),))
    assert transcript.extend([ids("▁a"), ids("n"), ids("n")], "stop") == "an"
    assert transcript.offsets == [0, 1, 2]


def test_tokens_are_named_by_their_bytes():
    names = TokenNames(BYTES)
    text = "the déjà 你 😀\n"
    ids = BYTES(text)["input_ids"]
    assert b"".join(names.bytes(i) for i in ids) == text.encode()
    assert names.text(BYTES.convert_tokens_to_ids("\u0120")) == " "
    assert names.text(BYTES.convert_tokens_to_ids("\u00ff")) == "bytes:\\xff"
    assert names.text(1) == "<eos>"
    assert names.bytes(9999) == b""
    pieces = TokenNames(PIECES)
    ids = PIECES.convert_tokens_to_ids
    assert pieces.text(ids("▁the")) == " the"
    assert pieces.bytes(ids("<0xE5>")) == b"\xe5"
    characters = TokenNames(character_tokenizer())
    assert characters.text(character_tokenizer().encode("x")[0]) == "x"
