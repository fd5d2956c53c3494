"""Tokenizers of Hugging Face folders: they give the ids of tokenizer.json, or are refused.

transformers chooses a class by the folder's settings, and some classes replace the normalizer and
the splits of tokenizer.json by their own: text becomes other ids than the model was trained with,
and nothing says so. What is loaded here is compared with the file; where it differs, the class that
takes the file as it is does it. No code from a folder is run.
"""

import json
import pathlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.storage import model_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

# Texts that tokenizers of different settings split differently.
PROBES = (
    "Hello world",
    " two  three   spaces\n\n\ttab ",
    "def f(x):\n    return x_1 + 2.5e-3  # isn't it?",
    "1234567890 12 3",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",  # composed accents
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m",  # decomposed ones
    "\u65e5\u672c\u8a9e \u4e2d\u6587\u5b57 \ud55c\uad6d\uc5b4",
    "\U0001f600 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\uff21\uff22 \u00bd \ufb01 \u2026",  # compatibility forms
    "<s>[INST] Hi! [/INST]</s>",
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_MAX_PROBED_TOKENS = 64  # special tokens that are probed


def load(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, by any address (`storage/model_folder.py`).

    Raises:
      DataError: If there is none, its files contradict each other, it cannot encode ordinary text,
        or has no end-of-sequence token.
    """
    folder, where = model_folder.local_folder(path), f"tokenizer {path!r}"
    if not folder.is_dir():
        remedy = "give a folder with tokenizer.json, or a name of the hub: org/name"
        raise DataError(f"{where}: no such folder; {remedy}")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        known = ", ".join(TOKENIZER_FILES)
        raise DataError(f"{where}: no tokenizer file in this folder; it needs one of {known}")
    if problem := next(contradictions(folder), ""):
        raise DataError(f"{where}: {problem}")
    tokenizer: Any = _as_in_file(folder, where) or _by_library(folder, where)
    _check_probes(tokenizer, where)
    if tokenizer.eos_token_id is None:
        rule = "no end-of-sequence token, so no response could end"
        raise DataError(f"{where}: {rule}; set eos_token in its tokenizer_config.json")
    # An export copies the files of this folder, unless tokens are added.
    tokenizer.source_folder, tokenizer.num_source_tokens = str(folder.resolve()), len(tokenizer)
    return tokenizer


def _by_library(folder: pathlib.Path, where: str, kind: Any = AutoTokenizer) -> Any:
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds, bare Exception among them
        raise DataError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error


def _as_in_file(folder: pathlib.Path, where: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that encodes as tokenizer.json does; None without this file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        reference = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        json.loads(file.read_text("utf-8"))
        raise DataError(f"{where}: tokenizer.json cannot be read: {error}") from error
    reference.no_truncation()
    reference.no_padding()
    differing = ""
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        try:
            tokenizer = _by_library(folder, where, kind)
        except DataError:
            if kind is AutoTokenizer:  # its class may not fit the file
                continue
            raise
        differing = _difference(tokenizer, reference)
        if not differing:
            return tokenizer
    raise DataError(
        f"{where}: the tokenizer that transformers makes of this folder is not that of"
        f" tokenizer.json: {differing}; correct tokenizer_config.json (remove what is not in"
        " tokenizer.json), or write the folder again with save_pretrained"
    )


def _difference(tokenizer: Any, reference: tokenizers.Tokenizer) -> str:
    """How a tokenizer differs from that of a file; "" if it does not."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return f"{type(tokenizer).__name__} does not use it"
    for part in _PARTS:
        if _state(getattr(backend, part)) != _state(getattr(reference, part)):
            return f"another {part}"
    theirs = {token.content: token for token in reference.get_added_tokens_decoder().values()}
    ours = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for name, token in theirs.items():
        if name not in ours or backend.token_to_id(name) != reference.token_to_id(name):
            return f"the added token {name!r} is missing or has another id"
        for flag in _FLAGS:
            if getattr(ours[name], flag) != getattr(token, flag):
                return f"{flag} of the added token {name!r} is {getattr(ours[name], flag)}"
    for probe in (*PROBES, *_with_tokens(theirs)):
        try:
            expected = reference.encode(probe, add_special_tokens=False).ids
        except Exception:  # reported by `_check_probes`
            continue
        ids = tokenizer(probe, add_special_tokens=False)["input_ids"]
        if ids != expected:
            return f"{probe!r} becomes {ids[:8]}, in the file {expected[:8]}"
    return ""


def _state(part: Any) -> Any:
    return part if part is None else part.__getstate__()


def _with_tokens(tokens: Mapping[str, Any]) -> Iterator[str]:
    """Texts with added tokens, at the edge of words and within them."""
    for name in list(tokens)[:_MAX_PROBED_TOKENS]:
        yield f"a {name} b{name}c"


def _check_probes(tokenizer: Any, where: str) -> None:
    """Raises DataError if ordinary text cannot be encoded."""
    for probe in PROBES:
        try:
            tokenizer(probe, add_special_tokens=False)
        except Exception as error:
            raise DataError(
                f"{where}: cannot encode {probe!r}: {type(error).__name__}: {error}; add the token"
                " for unknown text to the vocabulary of tokenizer.json, or take a tokenizer that"
                " covers all bytes"
            ) from error


def contradictions(folder: pathlib.Path) -> Iterator[str]:
    """Yields what one file of a tokenizer's folder says against another; each names file and key.

    Raises:
      DataError: If one of them is no readable JSON.
    """
    file = _read_json(folder, "tokenizer.json")
    settings = _read_json(folder, "tokenizer_config.json")
    more = _read_json(folder, "added_tokens.json")
    legacy = _read_json(folder, "special_tokens_map.json")
    ids = yield from _ids(file)
    if file:
        yield from _of_added_tokens(settings, more, ids)
        yield from _of_vocabulary_files(folder, file)
        yield from _of_special_tokens(settings, legacy, more, ids)
        yield from _of_post_processor(settings, file)
    yield from _of_templates(folder, settings)


def _read_json(folder: pathlib.Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        contents = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        raise DataError(f"tokenizer {str(folder)!r}: {name} {what}") from error
    if not isinstance(contents, dict):
        came = f"expected a JSON object, got {type(contents).__name__}"
        raise DataError(f"tokenizer {str(folder)!r}: {name}: {came}")
    return contents


def _vocabulary(file: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the tokens of tokenizer.json's model."""
    model = file.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        pairs = (entry[0] for entry in vocabulary if isinstance(entry, list) and entry)
        return {token: index for index, token in enumerate(pairs) if isinstance(token, str)}
    return vocabulary if isinstance(vocabulary, dict) else {}


def _ids(file: Mapping[str, Any]) -> Generator[str, None, dict[str, int]]:
    """Yields contradictions within tokenizer.json; returns the id of each of its tokens."""
    ids: dict[str, int] = dict(_vocabulary(file))
    tokens: dict[int, str] = {}
    for token, index in ids.items():
        if index in tokens:
            yield f"tokenizer.json: {tokens[index]!r} and {token!r} are both token {index}"
        tokens[index] = token
    added = file.get("added_tokens") or ()
    for entry in added if isinstance(added, list) else ():
        name, index = entry.get("content"), entry.get("id")
        if ids.get(name, index) != index:
            yield f"tokenizer.json: {name!r} is token {ids[name]} and, in added_tokens, {index}"
        if tokens.get(index, name) != name:
            other = tokens[index]
            yield f"tokenizer.json: token {index} is {other!r} and, in added_tokens, {name!r}"
        ids[name], tokens[index] = index, name
    return ids


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _of_added_tokens(
    settings: Mapping[str, Any], more: Mapping[str, Any], ids: Mapping[str, int]
) -> Iterator[str]:
    tokens = {index: token for token, index in ids.items()}
    decoder = settings.get("added_tokens_decoder")
    declared = [
        ("tokenizer_config.json: added_tokens_decoder", _content(token), index)
        for index, token in (decoder if isinstance(decoder, Mapping) else {}).items()
    ]
    declared += [("added_tokens.json", token, index) for token, index in more.items()]
    for source, name, index in declared:
        if not str(index).isdecimal() or not isinstance(name, str):
            yield f"{source}: {name!r} with the id {index!r}; ids are integers of texts"
            continue
        number = int(index)
        if ids.get(name, number) != number:
            yield f"{source}: {name!r} is token {number}, in tokenizer.json {ids[name]}"
        if tokens.get(number, name) != name:
            yield f"{source}: token {number} is {name!r}, in tokenizer.json {tokens[number]!r}"
    # transformers gives the next free ids to tokens that tokenizer.json lacks, whatever is said.
    absent = sorted({(int(i), name) for _, name, i in declared if name not in ids})
    for free, (number, name) in enumerate(absent, max(tokens, default=-1) + 1):
        if number != free:
            yield (
                f"tokenizer_config.json: {name!r} is token {number}, but tokenizer.json lacks it"
                f" and the next free id is {free}; add it to tokenizer.json"
            )


def _of_vocabulary_files(folder: pathlib.Path, file: Mapping[str, Any]) -> Iterator[str]:
    vocabulary = _vocabulary(file)
    for token, index in _read_json(folder, "vocab.json").items():
        if token in vocabulary and vocabulary[token] != index:
            yield (
                f"vocab.json: {token!r} is token {index}, in tokenizer.json {vocabulary[token]};"
                " remove the file that is not the model's"
            )
            return


def _of_special_tokens(
    settings: Mapping[str, Any],
    legacy: Mapping[str, Any],
    more: Mapping[str, Any],
    ids: Mapping[str, int],
) -> Iterator[str]:
    decoder = settings.get("added_tokens_decoder")
    known = {*ids, *more} | {_content(t) for t in (decoder or {}).values()}
    for key in _NAMED_TOKENS:
        token, other = _content(settings.get(key)), _content(legacy.get(key))
        for name, value in (("tokenizer_config.json", token), ("special_tokens_map.json", other)):
            if value is not None and not isinstance(value, str):
                yield f"{name}: {key} is {value!r}; it must be a text"
                return
        if token and other and token != other and key != "pad_token":
            yield (
                f"{key} is {token!r} in tokenizer_config.json and {other!r} in"
                " special_tokens_map.json; correct one of them"
            )
        token = token or other
        # The library would add it with an id of its own, which no model was trained with.
        if key in ("bos_token", "eos_token") and token and token not in known:
            yield (
                f"{key} is {token!r}, which is no token of tokenizer.json; correct it in"
                " tokenizer_config.json"
            )


def _of_post_processor(settings: Mapping[str, Any], file: Mapping[str, Any]) -> Iterator[str]:
    """Yields where the settings deny a token that tokenizer.json puts around a text."""
    written = json.dumps(_steps_of_template(file.get("post_processor")))
    for key in ("bos", "eos"):
        token = _content(settings.get(f"{key}_token"))
        if not token or settings.get(f"add_{key}_token") is not False:
            continue
        if json.dumps({"id": token, "type_id": 0}) in written:
            yield (
                f"tokenizer_config.json: add_{key}_token is false, but the post_processor of"
                f" tokenizer.json adds {token!r}; correct one of them"
            )


def _steps_of_template(processor: Any) -> list[Any]:
    if not isinstance(processor, Mapping):
        return []
    if processor.get("type") == "Sequence":
        return [step for each in processor["processors"] for step in _steps_of_template(each)]
    return list(processor.get("single") or ()) if "single" in processor else []


def _of_templates(folder: pathlib.Path, settings: Mapping[str, Any]) -> Iterator[str]:
    template, path = settings.get("chat_template"), folder / "chat_template.jinja"
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    if not isinstance(template, str) or not path.is_file():
        return
    try:
        other = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"chat_template.jinja cannot be read: {error}"
        return
    if template.strip() != other.strip():
        yield (
            "chat_template.jinja and chat_template in tokenizer_config.json differ; remove the one"
            " that is not the model's"
        )
