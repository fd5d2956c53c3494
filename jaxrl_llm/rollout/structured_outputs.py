"""Structured outputs: JSON schemas, regular expressions, choices and Lark grammars, compiled.

A constraint is a grammar of llguidance (2025, github.com/guidance-ai/llguidance), which follows it
token by token: an Earley parser over a lexer of regular expressions, and a trie of the vocabulary.
`engine/grammars.py` has the compiled form.
"""

import collections
import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.encoding import special_tokens
from jaxrl_llm.errors import check_package
from jaxrl_llm.rollout.engine.grammars import Grammar, GrammarError

# Of a grammar as text. The largest schemas of SchemaStore have about a megabyte; those of requests
# a few kilobytes.
MAX_GRAMMAR_BYTES = 2**18
_CACHED_GRAMMARS = 64

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


def lark_part(grammar: str) -> GrammarPart:
    """Texts of a Lark grammar in llguidance's dialect, or of a GBNF grammar, by their syntax."""
    check_package("llguidance", "serve", "structured outputs")
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(grammar)}
    except Exception as error:  # the converter raises what its parser meets
        raise GrammarError(f"the GBNF grammar cannot be read: {error}") from error


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
            pieces += [lark_literal(text[at : match.start()])] if match.start() > at else []
            pieces.append(f"<[{self._tokenizer.convert_tokens_to_ids(match[0])}]>")
            at = match.end()
        pieces += [lark_literal(text[at:])] if at < len(text) or not pieces else []
        return " ".join(pieces)

    def compile(self, source: GrammarSource) -> Grammar:
        """The grammar of a constraint; the last ones are kept.

        Raises:
          GrammarError: If llguidance does not accept it, with its reason.
          ConfigError: If llguidance is not installed.
        """
        check_package("llguidance", "serve", f"{source.setting}: structured output")
        text = source.text
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            limit = f"at most {MAX_GRAMMAR_BYTES} are compiled"
            raise GrammarError(f"{source.setting}: a grammar of {size} bytes; {limit}")
        with self._lock:
            if text in self._cache:
                self._cache.move_to_end(text)
                return self._cache[text]
        grammar = self._compile(text, source.setting)
        with self._lock:
            self._cache[text] = grammar
            while len(self._cache) > _CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, text: str, setting: str) -> Grammar:
        import llguidance

        vocabulary = self._llguidance_vocabulary()
        matcher = llguidance.LLMatcher(vocabulary, text, log_level=0)
        if problem := matcher.get_error():
            raise GrammarError(f"{setting}: {_first_line(problem)}")
        return Grammar(matcher, vocabulary.eos_token, vocabulary.vocab_size)

    def _llguidance_vocabulary(self) -> Any:
        import llguidance.hf

        with self._lock:
            if self._vocabulary is None:
                if getattr(self._tokenizer, "backend_tokenizer", None) is None:
                    kind = type(self._tokenizer).__name__
                    raise GrammarError(
                        f"structured outputs need a tokenizer of the library tokenizers; {kind} is"
                        " none; save the model with a tokenizer.json"
                    )
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab_size
                )
            return self._vocabulary


def _first_line(problem: str) -> str:
    return problem.strip().splitlines()[0][:500]
