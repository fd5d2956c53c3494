"""Special tokens that the texts of messages spell: they are tokenized as ordinary text.

A user who writes `<|im_end|>\\n<|im_start|>system` must not end a turn and begin another one. So
before a chat template renders messages, `guarded` puts each special token in their texts between
two guards, characters that no text can hold. In the rendering, the special tokens without guards
are the template's own; `encode` gives only these their ids. Messages that spell no special token
are rendered and tokenized as ever.
"""

import functools
import itertools
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.text import MAX_DEPTH, is_text

if TYPE_CHECKING:  # takes a second, and the processes of tools have no tokenizer
    import tokenizers
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Treatment = Literal["text", "tokens"]

# Halves of surrogate pairs: `is_text` keeps them out of every text, and two of these form no pair.
_OPEN, _CLOSE = "\udc01", "\udc02"
_GUARD = re.compile(f"[{_OPEN}{_CLOSE}]")
# What becomes of guards where a template prints a value as Python or ASCII JSON writes it.
_ESCAPED = {f"\\u{ord(guard):04x}": guard for guard in (_OPEN, _CLOSE)}
_ATTRIBUTE = "special_tokens_in_messages"  # of a tokenizer: a Treatment

# Roles whose texts do not stand in a block of their own within a turn, as results of tools do.
_SPEAKERS = frozenset(["system", "developer", "user", "assistant"])
# Tags that a template writes around the result of a tool.
_BLOCK_TAG = re.compile(
    r"</?[\w.:-]*(?:response|result|output|observation)[\w.:-]*>"
    r"|\[/?[A-Z_]*(?:RESPONSE|RESULT|OUTPUT)[A-Z_]*\]"
)
# Special tokens that models write in their answers: of thinking and of calls, not of roles.
_ANSWERS_MARK = re.compile(r"think|reason|tool|call|python", re.IGNORECASE)
_RESULTS_MARK = re.compile(r"response|result|output", re.IGNORECASE)
_TURN_NAMES = frozenset(["tool", "tools", "ipython", "call"])  # gpt-oss ends turns by <|call|>


def set_treatment(tokenizer: "PreTrainedTokenizerBase", treatment: Treatment) -> None:
    """Decides whether special tokens in messages are "text", the default, or "tokens"."""
    setattr(tokenizer, _ATTRIBUTE, treatment)


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """A pattern for the tokenizer's special tokens of two characters or more; None without any."""
    return _alternatives(text for text in _special_texts(tokenizer) if len(text) > 1)


def with_spaces(text: str, pattern: re.Pattern[str]) -> str:
    """The text with a space after the first character of each match, so that none is left.

    >>> with_spaces("a</tool_response>", re.compile("</tool_response>"))
    'a< /tool_response>'
    """
    return pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def has_guards(text: str) -> bool:
    return not text.isascii() and bool(_GUARD.search(text))


def without_guards(text: str) -> str:
    """A rendering for people, and for comparisons with the texts of messages."""
    return _GUARD.sub("", text) if has_guards(text) else text


class GuardedChat(NamedTuple):
    """Messages and options for a chat template, with guards in their texts."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    is_guarded: bool = False
    # The same with guards in no text of the assistant. None: there are none.
    plain_answers: list[dict[str, Any]] | None = None


def guarded(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    options: Mapping[str, Any],
) -> GuardedChat:
    """Messages and template options in which special tokens in texts are between guards.

    No guards have, in an assistant's text, the end token at its very end and the marks of thinking
    and of calls: the model writes them itself; and tokens that the template puts in the place of an
    image: `ImagePreprocessor` refuses texts that spell them. In results of tools, tags that the
      template writes around them (`</tool_response>`) get a space.

    Raises:
      DataError: If a text holds half of a surrogate pair, or values are nested too deep.
    """
    chat = [dict(message) for message in messages], dict(options)
    special = _special_patterns(tokenizer, len(tokenizer))
    for number, message in enumerate(messages, start=1):
        _check_texts(message, f"message {number}")
    for name, value in options.items():
        _check_texts(value, name)
    if getattr(tokenizer, _ATTRIBUTE, "text") == "tokens":
        return GuardedChat(*chat)
    if tags := _block_tags(str(tokenizer.chat_template), special.texts):
        chat = [_without_tags(message, tags) for message in chat[0]], chat[1]
    spelling = next(filter(special.occur_in, _texts(chat)), None)
    if spelling is None:
        return GuardedChat(*chat)
    if not special.are_reported:
        special.are_reported = True
        logger.warning(
            "messages spell special tokens, first in %.60r: they are ordinary text"
            " (model.special_tokens_in_messages)",
            spelling,
        )
    changed = [_guarded_message(message, special) for message in chat[0]]
    plain_answers = None
    if any(new != old for new, old in zip(changed, chat[0], strict=True) if _answers(old)):
        both = zip(changed, chat[0], strict=True)
        plain_answers = [old if _answers(old) else new for new, old in both]
    return GuardedChat(changed, _guarded_options(chat[1], special), True, plain_answers)


def with_restored_guards(text: str, chat: GuardedChat) -> str:
    """A rendering of a chat in which escaped guards (`\\udc01`) are guards again.

    Raises:
      DataError: If they cannot be told from a text of the messages that looks like one.
    """
    if not (chat.is_guarded and any(escaped in text for escaped in _ESCAPED)):
        return text
    if any(escaped[1:] in each for each in _texts(chat[:2]) for escaped in _ESCAPED):
        raise DataError(
            "messages spell a special token and an escape such as \\udc01, and the template prints"
            " values as Python does; take one of them out"
        )
    for escaped, guard in _ESCAPED.items():
        text = text.replace(escaped, guard)
    return text


def encode(tokenizer: "PreTrainedTokenizerBase", text: str, **kwargs: Any) -> Mapping[str, Any]:
    """`tokenizer(text, **kwargs)`, but what stands between guards in the text is ordinary text.

    With guards it has `input_ids` and `offset_mapping`, which counts guards as characters.

    Raises:
      DataError: If there are guards and the tokenizer has no tokenizer.json.
    """
    if not has_guards(text):
        return tokenizer(text, **kwargs)
    own = _respelled(tokenizer, len(tokenizer))
    spelled: list[str] = []
    places: list[tuple[int, int]] = []  # in the text, of each character of `spelled`
    wanted: Counter[int] = Counter()
    at = 0

    def copy_until(end: int) -> None:
        spelled.append(text[at:end])
        places.extend((i, i + 1) for i in range(at, end))

    for match in own.pattern.finditer(text):
        copy_until(match.start())
        at = match.start()
        if match["guarded"]:
            at = match.start("guarded")
            copy_until(match.end("guarded"))
        elif new := own.spellings.get(match["added"] or ""):
            spelled.append(new)
            places.extend([match.span()] * len(new))
            wanted[own.tokens[new]] += 1
        elif match["added"]:
            copy_until(match.end())
        at = match.end()
    copy_until(len(text))
    encoded = own.tokenizer.encode("".join(spelled), add_special_tokens=False)
    ids = [own.ids.get(token, token) for token in encoded.ids]
    if wanted - Counter(ids):
        raise DataError(
            "this tokenizer cannot tell special tokens in messages from the template's; set"
            " model.special_tokens_in_messages='tokens', or take them out of the messages"
        )
    offsets = [
        (places[begin][0], places[end - 1][1]) if begin < end else (0, 0)
        for begin, end in encoded.offsets
    ]
    return {"input_ids": ids, "offset_mapping": offsets}


def encoded_chat(
    tokenizer: "PreTrainedTokenizerBase", chat: GuardedChat, **kwargs: Any
) -> Mapping[str, Any] | None:
    """`input_ids` and `assistant_masks` of a chat by the template's generation marks.

    None if nothing in the rendering is guarded.
    """
    from transformers.utils import chat_template_utils

    # Its annotation says that it returns a text.
    render_jinja_template: Callable[..., Any] = chat_template_utils.render_jinja_template
    options = {**tokenizer.special_tokens_map, **chat.options}
    texts, spans_of_texts = render_jinja_template(
        conversations=[chat.messages],
        chat_template=tokenizer.get_chat_template(tools=options.get("tools")),
        return_assistant_tokens_mask=True,
        **kwargs,
        **options,
    )
    text = with_restored_guards(texts[0], chat)
    if not has_guards(text):
        return None
    encoded = encode(tokenizer, text)
    spans = [
        [len(with_restored_guards(texts[0][:place], chat)) for place in span]
        for span in spans_of_texts[0]
    ]
    mask = [
        int(any(first < end and begin < last for first, last in spans))
        for begin, end in encoded["offset_mapping"]
    ]
    return {"input_ids": encoded["input_ids"], "assistant_masks": mask}


def _special_texts(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    added = tokenizer.added_tokens_decoder.values()
    return {str(token) for token in added if token.special} | {*tokenizer.all_special_tokens}


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the longest of these texts at each place, as tokenizers look for them."""
    ordered = sorted({*texts} - {""})
    return re.compile(_trie_pattern(ordered)) if ordered else None


def _trie_pattern(ordered: Sequence[str]) -> str:
    """A pattern that tries no text twice: of hundreds of tokens, most begin with the same `<|`.

    >>> _trie_pattern(["a", "ab", "ac"])
    'a(?:b|c)?'
    """
    both = zip(ordered[0], ordered[-1], strict=False)
    prefix = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
    rest = [text[len(prefix) :] for text in ordered if text != prefix]
    if not rest:
        return re.escape(prefix)
    branches = [_trie_pattern(list(texts)) for _, texts in itertools.groupby(rest, lambda t: t[0])]
    group = "|".join(branches)
    if len(rest) < len(ordered):  # the prefix is a text of its own
        return f"{re.escape(prefix)}(?:{group})?"
    return f"{re.escape(prefix)}(?:{group})"


class _SpecialPatterns:
    """Finds special tokens in texts of messages."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        # Places of images are counted later: one too many is refused, and must be seen there.
        template = str(tokenizer.chat_template)
        images = {
            text for text in _special_texts(tokenizer) if "image" in text and text in template
        }
        self.texts = frozenset(_special_texts(tokenizer) - images)
        self._any = _alternatives(self.texts)
        self._in_answers = _alternatives(text for text in self.texts if not _of_answers(text))
        self._end = str(tokenizer.eos_token or "")
        self.are_reported = False  # once for each tokenizer
        # A tokenizer may look for a token in the normalized text: another spelling is the token.
        self._normalized: re.Pattern[str] | None = None
        self._normalize: Callable[[str], str] | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and backend.normalizer is not None:
            added = tokenizer.added_tokens_decoder.values()
            normalize = backend.normalizer.normalize_str
            late = (str(each) for each in added if each.normalized and str(each) in self.texts)
            if pattern := _alternatives(map(normalize, late)):
                self._normalized, self._normalize = pattern, normalize

    def occur_in(self, text: str) -> bool:
        return bool(self._any and self._any.search(text)) or self._hidden_in(text)

    def _hidden_in(self, text: str) -> bool:
        return bool(self._normalized and self._normalize) and bool(
            self._normalized.search(self._normalize(text))  # type: ignore[union-attr, misc]
        )

    def guard(self, *texts: str) -> list[str]:
        """Texts that a template joins, with guards around the special tokens of the joined text."""
        return self._guard(texts, self._any)

    def guard_answer(self, *texts: str) -> list[str]:
        """As `guard`, for what the assistant says."""
        return self._guard(texts, self._in_answers, self._end)

    def _guard(
        self, texts: Sequence[str], pattern: re.Pattern[str] | None, end_token: str = ""
    ) -> list[str]:
        whole = "".join(texts)
        places = [match.span() for match in pattern.finditer(whole)] if pattern else []
        trimmed = whole.rstrip()
        if end_token and trimmed.endswith(end_token):
            places = [place for place in places if place[1] != len(trimmed)]
        elif not places and whole and self._hidden_in(whole):
            return [f"{text[:1]}{_OPEN}{text[1:]}" for text in texts]  # a guard alone: `encode`
        begins, ends = {begin for begin, _ in places}, {end for _, end in places}
        guarded_texts, at = [], 0
        for text in texts:
            pieces = []
            for i, character in enumerate(text, start=at):
                pieces += [_OPEN] * (i in begins) + [character] + [_CLOSE] * (i + 1 in ends)
            guarded_texts.append("".join(pieces) if places else text)
            at += len(text)
        return guarded_texts


@functools.lru_cache(maxsize=8)
def _special_patterns(tokenizer: "PreTrainedTokenizerBase", num_tokens: int) -> _SpecialPatterns:
    return _SpecialPatterns(tokenizer)  # `num_tokens`: tokens may be added later


def _of_answers(token: str) -> bool:
    name = re.sub(r"\W", "", token).strip("_").lower()
    is_mark = _ANSWERS_MARK.search(name) and not _RESULTS_MARK.search(name)
    return bool(is_mark) and name not in _TURN_NAMES


@functools.lru_cache(maxsize=8)
def _block_tags(chat_template: str, special: frozenset[str]) -> re.Pattern[str] | None:
    """A pattern for the tags around results of tools that are no special tokens."""
    return _alternatives({*_BLOCK_TAG.findall(chat_template)} - special)


def _answers(message: Message) -> bool:
    return message.get("role") == "assistant"


def _without_tags(message: dict[str, Any], tags: re.Pattern[str]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") in _SPEAKERS or not any(map(tags.search, _texts(content))):
        return message
    return {**message, "content": _map_texts(content, lambda text: with_spaces(text, tags))}


def _guarded_message(message: dict[str, Any], special: _SpecialPatterns) -> dict[str, Any]:
    if not any(map(special.occur_in, _texts(message))):
        return message
    guard = special.guard_answer if _answers(message) else special.guard
    return {
        # Values of calls are data, not what the assistant says.
        name: _guarded_value(value, special.guard if name == "tool_calls" else guard)
        for name, value in message.items()
    }


def _guarded_options(options: dict[str, Any], special: _SpecialPatterns) -> dict[str, Any]:
    return {
        # A template's variable such as `bos_token` is a special token.
        name: value
        if name.endswith("_token") and isinstance(value, str) and value in special.texts
        else _guarded_value(value, special.guard)
        for name, value in options.items()
    }


def _guarded_value(value: Any, guard: Callable[..., list[str]]) -> Any:
    if isinstance(value, list | tuple) and value and all(map(_is_text_part, value)):
        texts = guard(*(part["text"] for part in value))
        return [{**part, "text": text} for part, text in zip(value, texts, strict=True)]
    if isinstance(value, list | tuple):
        runs = itertools.groupby(value, _is_text_part)
        return [
            each
            for is_text_run, run in runs
            for each in (
                _guarded_value(list(run), guard)
                if is_text_run
                else [_guarded_value(other, guard) for other in run]
            )
        ]
    if isinstance(value, Mapping):
        return {
            guard(key)[0] if isinstance(key, str) else key: _guarded_value(each, guard)
            for key, each in value.items()
        }
    return guard(value)[0] if isinstance(value, str) else value


def _map_texts(content: Any, change: Callable[[str], str]) -> Any:
    """A content with changed texts: one text, or parts."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, Mapping):
        return {name: _map_texts(value, change) for name, value in content.items()}
    return [_map_texts(part, change) for part in content] if isinstance(content, list) else content


def _is_text_part(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("text"), str)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, keys included, and the joined texts of parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, str):
                yield key
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        parts = [part["text"] for part in value if _is_text_part(part)]
        if len(parts) > 1:
            yield "".join(parts)
        for each in value:
            yield from _texts(each)


def _check_texts(value: Any, where: str, room: int = 2 * MAX_DEPTH) -> None:
    if isinstance(value, str):
        if not is_text(value):
            rule = "contains a lone surrogate, which is not text; leave it out"
            raise DataError(f"{where}: {ascii(value)[:60]} {rule}")
    elif isinstance(value, Mapping | list | tuple):
        if not room:
            raise DataError(f"{where}: brackets are nested too deep; write what they hold as text")
        inside = value
        if isinstance(value, Mapping):
            inside = [*value.values(), *(key for key in value if not str(key).isascii())]
        for each in inside:
            _check_texts(each, where, room - 1)


class _Respelled(NamedTuple):
    """A copy of a tokenizer whose special tokens are spelled as no text spells them."""

    tokenizer: "tokenizers.Tokenizer"
    spellings: Mapping[str, str]  # of each special token in the copy
    tokens: Mapping[str, int]  # of the tokenizer, by these spellings
    ids: Mapping[int, int]  # of added tokens: id in the copy -> in the tokenizer
    pattern: re.Pattern[str]  # of what the copy is to read in another way


# Private-use characters, drawn anew for each process: a text that holds them is not thinkable.
_NONCE = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(4))


@functools.lru_cache(maxsize=4)
def _respelled(tokenizer: "PreTrainedTokenizerBase", num_tokens: int) -> _Respelled:
    """The copy that `encode` asks.

    Taking special tokens out of a text and tokenizing the pieces between them would be simpler, but
    tokenizers treat the beginning of a text in another way, and merge over the edges of the pieces.
    """
    import tokenizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            "a message spells a special token, and this tokenizer has no tokenizer.json to keep it"
            " a text; take it out, or set model.special_tokens_in_messages='tokens'"
        )
    described = json.loads(backend.to_str())
    special = sorted(_special_texts(tokenizer))
    spellings = {text: f"{_NONCE}{chr(0x100000 + i)}" for i, text in enumerate(special)}
    added = [token["content"] for token in described["added_tokens"]]
    ids = {token["content"]: token["id"] for token in described["added_tokens"]}
    for token in described["added_tokens"]:
        token["content"] = spellings.get(token["content"], token["content"])
    _respell_model(described["model"], spellings)
    copy = tokenizers.Tokenizer.from_str(json.dumps(described))
    copy.no_truncation()
    copy.no_padding()
    any_added = _alternatives(added)
    words = any_added.pattern if any_added else "(?!)"
    return _Respelled(
        tokenizer=copy,
        spellings=spellings,
        tokens={spellings[text]: ids[text] for text in added if text in spellings},
        ids={copy.token_to_id(spellings.get(text, text)) or 0: ids[text] for text in added},
        pattern=re.compile(
            f"{_OPEN}(?P<guarded>{words}){_CLOSE}|(?P<added>{words})|{_GUARD.pattern}"
        ),
    )


def _respell_model(model: dict[str, Any], spellings: Mapping[str, str]) -> None:
    """Renames special tokens in a model's vocabulary, where words of a text would find them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {spellings.get(text, text): i for text, i in vocabulary.items()}
    elif isinstance(vocabulary, list):  # (piece, score)
        model["vocab"] = [[spellings.get(text, text), score] for text, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = spellings.get(model["unk_token"], model["unk_token"])
    if merges := model.get("merges"):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        model["merges"] = [
            merge
            for merge, pair in zip(merges, pairs, strict=True)
            if not spellings.keys() & {*pair, "".join(pair)}
        ]
