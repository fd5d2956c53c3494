"""Structured outputs: JSON schemas, regular expressions, choices and Lark grammars, compiled.

A constraint is a grammar of llguidance (2025, github.com/guidance-ai/llguidance), which follows it
token by token: an Earley parser over a lexer of regular expressions, and a trie of the vocabulary.
`engine/grammars.py` has the compiled form.
"""

import collections
import concurrent.futures
import dataclasses
import importlib.util
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.encoding import special_tokens
from jaxrl_llm.data.token_names import TokenNames
from jaxrl_llm.rollout.engine.grammars import Grammar, GrammarError, problem_of

# Of a grammar as text: schemas of requests have a few kilobytes. One of this size that is made to
# be costly takes seconds and a hundred megabytes, and its rules name each other to a depth of
# thousands.
MAX_GRAMMAR_BYTES = 2**17
_CACHED_BYTES = 2**19  # of the texts of grammars that are kept

# A quarter of llguidance's own limits, with which a regular expression may take five seconds: a
# token then takes up to 10 ms on one core.
_LEXER_FUEL, _LEXER_STATES = 250_000, 60_000
_STACK_BYTES = 2**29  # address space; a page of it becomes memory when it is used
_STACK_LOCK = threading.Lock()

_T = TypeVar("_T")

# One grammar of llguidance: {"json_schema": ...} or {"lark_grammar": ...}.
GrammarPart = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class GrammarSource:
    """A constraint before it is compiled: a Lark grammar that may name others as `@name`."""

    lark: str
    parts: tuple[tuple[str, str], ...] = ()  # (name, JSON of a `GrammarPart`)
    setting: str = "grammar"  # where it comes from, for errors

    @property
    def text(self) -> str:
        """The grammar in llguidance's JSON."""
        named = ({"name": name, **json.loads(part)} for name, part in self.parts)
        return json.dumps({"grammars": [{"lark_grammar": self.lark}, *named]})


def source_of(part: GrammarPart, setting: str, prefix: str = "") -> GrammarSource:
    """The constraint that a text is one of `part`, after a text of the Lark expression `prefix`."""
    lark = f"start: {prefix} @answer" if prefix else "start: @answer"
    return GrammarSource(lark, (("answer", json.dumps(part)),), setting)


def json_part(schema: Mapping[str, Any] | bool, whitespace_pattern: str = "") -> GrammarPart:
    """JSON texts that are valid by a schema (draft 2020-12 where llguidance has it).

    White space between tokens of JSON is the model's choice, or follows `whitespace_pattern`.
    """
    if whitespace_pattern and isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {"whitespace_pattern": whitespace_pattern}}
    return {"json_schema": schema}


def regex_part(pattern: str) -> GrammarPart:
    """Texts that a regular expression matches as a whole (syntax of Rust's crate `regex`)."""
    escaped = pattern.replace("\n", "\\n").replace("\r", "\\r")
    return {"lark_grammar": f"start: REGEX\nREGEX: /{_escape_slashes(escaped)}/"}


def choice_part(choices: Sequence[str]) -> GrammarPart:
    """One of these texts."""
    return {"lark_grammar": "start: " + " | ".join(map(lark_literal, choices))}


def lark_part(grammar: str, setting: str = "grammar") -> GrammarPart:
    """Texts of a Lark grammar in llguidance's dialect, or of a GBNF grammar, by their syntax."""
    _check_llguidance(setting)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(grammar)}
    except Exception as error:  # the converter raises what its parser meets
        raise GrammarError(f"{setting}: the GBNF grammar cannot be read: {error}") from error


def lark_literal(text: str) -> str:
    """A text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _escape_slashes(pattern: str) -> str:
    """A pattern between slashes: those that are not escaped already get a backslash."""
    escaped, is_escape = "", False
    for character in pattern:
        escaped += "\\/" if character == "/" and not is_escape else character
        is_escape = character == "\\" and not is_escape
    return escaped


class GrammarCompiler:
    """Compiles constraints for the vocabulary of one model; called from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        """`vocab_size` is the model's, which may be padded beyond the tokenizer's."""
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens(tokenizer)
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # llguidance's tokenizer, made with the first grammar
        self._cache: collections.OrderedDict[str, Grammar] = collections.OrderedDict()

    def literal(self, text: str) -> str:
        """A text as a Lark expression; special tokens in it are the tokens."""
        pieces, at = [], 0
        for match in self._special_tokens.finditer(text) if self._special_tokens else ():
            token = self._tokenizer.convert_tokens_to_ids(match[0])
            if not self._vocabulary_of_model().is_special_token(token):
                continue  # llguidance reads it as text
            pieces += [lark_literal(text[at : match.start()])] if match.start() > at else []
            pieces.append(f"<[{token}]>")
            at = match.end()
        pieces += [lark_literal(text[at:])] if at < len(text) or not pieces else []
        return " ".join(pieces)

    def token_text(self, token: int) -> str:
        """A token as templates write it."""
        return str(self._tokenizer.convert_ids_to_tokens(token))

    def compile(self, source: GrammarSource) -> Grammar:
        """The grammar of a constraint; the last ones are kept.

        Raises:
          GrammarError: If llguidance does not accept it, with its reason, or is not installed.
        """
        return self.compile_text(source.text, source.setting)

    def compile_text(self, text: str, setting: str = "grammar") -> Grammar:
        """As `compile`, of a grammar in llguidance's JSON."""
        _check_llguidance(setting)
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            limit = f"at most {MAX_GRAMMAR_BYTES} are compiled"
            raise GrammarError(f"{setting}: a grammar of {size} bytes; {limit}")
        with self._lock:
            if text in self._cache:
                self._cache.move_to_end(text)
                return self._cache[text]
        grammar = self._compile(text, setting)
        with self._lock:
            self._cache[text] = grammar
            while sum(map(len, self._cache)) > _CACHED_BYTES:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, text: str, setting: str) -> Grammar:
        import llguidance

        vocabulary = self._vocabulary_of_model()

        def compiled() -> tuple[Any, str]:
            limits = llguidance.LLParserLimits(
                initial_lexer_fuel=_LEXER_FUEL,
                step_lexer_fuel=_LEXER_FUEL // 5,
                max_lexer_states=_LEXER_STATES,
            )
            matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
            matcher.compute_bitmask()  # whose lexer's work the copies share
            return matcher, problem_of(matcher)

        matcher, problem = _on_deep_stack(compiled)
        if problem:
            raise GrammarError(f"{setting}: {problem}")
        return Grammar(matcher, vocabulary.eos_token, vocabulary.vocab_size, text)

    def _vocabulary_of_model(self) -> Any:
        _check_llguidance("structured outputs")
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _llguidance_vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary


class _TokenBytes:
    """A tokenizer for llguidance: the bytes of its tokens, and texts cut into the longest ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        names = TokenNames(tokenizer)
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, None
        self.tokens = [names.bytes(token) for token in range(vocab_size)]
        # Rows of the embedding without a token belong to no text either.
        unused = [token for token, name in enumerate(self.tokens) if not name]
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *unused})
        special = set(self.special_token_ids)
        self._ids = {name: i for i, name in enumerate(self.tokens) if i not in special}
        self._longest = max(map(len, self._ids))
        for token in unused:
            self.tokens[token] = f"<unused {token}>".encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text; it ends where no token goes on."""
        rest = text if isinstance(text, bytes) else text.encode()
        tokens = []
        while rest:
            sizes = range(min(self._longest, len(rest)), 0, -1)
            size = next((size for size in sizes if rest[:size] in self._ids), 0)
            if not size:
                break
            tokens.append(self._ids[rest[:size]])
            rest = rest[size:]
        return tokens


def _llguidance_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Any:
    """The tokens of a model as llguidance reads them."""
    import llguidance.hf

    if tokenizer.eos_token_id is None:
        raise GrammarError(
            "structured outputs need a tokenizer with an EOS token; name one in its"
            " tokenizer_config.json"
        )
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size)  # type: ignore[arg-type]
    except ValueError:  # neither bytes nor sentencepiece, or no tokenizer of the library tokenizers
        wrapper = llguidance.TokenizerWrapper(_TokenBytes(tokenizer, vocab_size))
        return llguidance.LLTokenizer(wrapper)


def _on_deep_stack(function: Callable[[], _T]) -> _T:
    """The result of a function that recurses as deep as a grammar's rules name each other.

    An overflow of the stack would end the process, whose other requests are not at fault.
    """
    executor = concurrent.futures.ThreadPoolExecutor(1, "grammar")
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            future = executor.submit(function)  # starts the thread
        finally:
            threading.stack_size(before)
    executor.shutdown(wait=False)
    return future.result()


def _check_llguidance(setting: str) -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise GrammarError(
            f"{setting}: needs the package llguidance; pip install 'jaxrl_llm[serve]' where the"
            " model is served"
        )
