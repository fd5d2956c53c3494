r"""The final answer in a response, and the forms in which one answer may be written.

Nothing here computes: `final_answer` extracts the answer from a response, `parse_answer` separates
its value from fonts, spaces, units and a percent sign. `math.py` compares values.
docs/answers.md lists the forms with their verdicts.
"""

import dataclasses
import re
import unicodedata

MAX_ANSWER_CHARACTERS = 2000  # a longer "answer" is prose
_MAX_BOXES = 32  # more distinct boxes are guesses

_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)"
# In addition to the compatibility forms of Unicode (full-width digits), which NFKC normalizes.
_SYMBOLS = str.maketrans({
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{EM DASH}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ", "\N{DIVISION SIGN}": "/", "\N{DOT OPERATOR}": r"\cdot ",
    "\N{MIDDLE DOT}": r"\cdot ", "\N{DEGREE SIGN}": r"^{\circ}", "\N{INFINITY}": r"\infty ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ", "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{GREEK SMALL LETTER PI}": r"\pi ", "\N{UNION}": r"\cup ", "\N{EMPTY SET}": r"\emptyset ",
    "\N{PLUS-MINUS SIGN}": r"\pm ", "\N{FRACTION SLASH}": "/", "\N{DIVISION SLASH}": "/",
    "\N{NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " ",
})  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_FONTS = (
    "mathbf|mathrm|mathit|mathsf|mathtt|mathnormal|boldsymbol|bm|textbf|textit|textrm|textsf"
    "|texttt|textup|emph|underline|ensuremath|mbox|hbox|operatorname|text"
)
_MULTIPLES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
# Words after a number that are not units.
_NO_UNITS = frozenset({
    "or", "and", "not", "no", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "mod", "to",
    "if", "for", "when", "where", "then", *_MULTIPLES,
})  # fmt: skip
# Words of up to three letters that are not products of variables.
_SHORT_WORDS = frozenset({"yes", "no", "odd", "one", "two", "six", "ten", "red", "dne", "all"})
_SPACES = re.compile(
    r"\\(?:displaystyle|textstyle|limits|large|Large|small|bf|rm|it|quad|qquad)\b"
    r"|\\(?:thinspace|enspace|hfill|phantom\{[^{}]*\}|tag\{[^{}]*\})"
)
_NEGATION = re.compile(r"\b(?:no|not|never|none|cannot|unknown|neither|nor)\b|n't\b", re.IGNORECASE)
_PHRASE = re.compile(
    r"\b(?:answer|option|choice)\b[\s*_]*(?:(?:is|equals|would be|must be)\b[\s*_]*[:=]?|[:=])"
    r"[\s*_]*(?=\S)",
    re.IGNORECASE,
)
_CHOICE = re.compile(
    r"(?:option|choice|answer)?\s*[(\[]?\s*([A-Za-z])\s*(?:[)\]]\s*[.:,-]?|[.:,]|\s-)?(?=\s|$)(.*)",
    re.IGNORECASE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class FinalAnswer:
    """The answer of a response, verbatim."""

    text: str  # "": none
    boxed: bool = False


@dataclasses.dataclass(frozen=True)
class ParsedAnswer:
    """An answer, separated into its expression and its unit or percent sign."""

    expression: str  # LaTeX or plain
    unit: str = ""  # "cm^2", "apples"; "$" of dollars
    percent: bool = False

    @property
    def words(self) -> str:
        """The answer in lower case if it consists of words, else ""."""
        text = self.expression.replace("\\text{", "").replace("}", "").rstrip(".! ")
        if not re.fullmatch(r"[A-Za-z][A-Za-z' -]*", text):
            return ""
        words = text.lower().split()
        is_text = "\\text{" in self.expression and len(text.strip()) > 1
        are_words = is_text or any(len(word) > 3 or word in _SHORT_WORDS for word in words)
        return " ".join(words) if are_words else ""

    @property
    def choice(self) -> str:
        """The upper-case letter of a choice, of `C`, `(C)`, `C. red`, `C: red`; else ""."""
        text = self.expression.replace("\\text{", " ").replace("}", " ").strip()
        match = _CHOICE.fullmatch(text)
        if match is None:
            return ""
        letter, rest = match[1], match[2].strip()
        marked = bool(re.match(r"(?i)(?:option|choice|answer)?\s*[(\[]?\s*[a-z]\s*[)\]:.]", text))
        return letter.upper() if not rest or marked else ""


def final_answer(solution: str) -> FinalAnswer:
    r"""The final answer of a response, from the first of these sources that it has.

    The contents of boxes (several distinct ones form a list), `<answer>`, after `####`, after "the
    answer is"; else a formula or number at the end, in a sentence without a negation. The last
    occurrence counts. In a response with thinking, only the text after `</think>` counts.

    >>> final_answer(r"So \boxed {2} or \boxed{3}")
    FinalAnswer(text='2, 3', boxed=True)
    >>> final_answer("In 2024, there is no answer").text
    ''
    """
    after_thinking = solution.rpartition("</think>")[2]
    solution = after_thinking if after_thinking.strip() else solution
    boxes = [content.strip() for content in _boxed(solution)]
    if boxes:
        if boxes[-1] == _UNCLOSED:
            return FinalAnswer("")
        distinct = list(dict.fromkeys(box for box in boxes if box))
        if len(distinct) > _MAX_BOXES or max(map(len, distinct), default=0) > MAX_ANSWER_CHARACTERS:
            return FinalAnswer("")
        by_value = {parse_answer(box): box for box in distinct}
        return FinalAnswer(", ".join(by_value.values()), boxed=True)
    before, tag, _ = solution.rpartition("</answer>")
    if tag and "<answer>" in before:
        inner = before.rpartition("<answer>")[2].strip()
        return FinalAnswer(_after_phrase(inner) or inner)
    if marked := re.findall(r"####[ \t]*(\S[^\n]*)", solution):
        return FinalAnswer(marked[-1].strip())
    return FinalAnswer(_after_phrase(solution) or _at_end(solution))


_UNCLOSED = "\0"


_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*(?P<open>\{)?|\\.|[{}]", re.DOTALL)


def _boxed(text: str) -> list[str]:
    r"""The contents of `\boxed{...}` and `\fbox{...}`; of nested boxes the innermost.

    The last entry is `_UNCLOSED` if a box is not closed. One pass, whatever the nesting.
    """
    contents: list[str] = []
    starts: list[int] = []  # content start of each open brace; -1: not a box
    has_inner_box: list[bool] = []
    for token in _BOX.finditer(text):
        word = token[0]
        if word.startswith(("\\box", "\\fbox")):
            if token["open"]:
                has_inner_box = (
                    [True] * len(has_inner_box) if not all(has_inner_box) else has_inner_box
                )
                starts.append(token.end())
                has_inner_box.append(False)
            else:  # as in `\boxed 5`
                rest = text[token.end() : token.end() + 40]
                contents.append((re.match(r"\\?\w*", rest) or [""])[0])
        elif word == "{":
            starts.append(-1)
            has_inner_box.append(True)
        elif word == "}" and starts:
            start, has_inner = starts.pop(), has_inner_box.pop()
            if start >= 0 and not has_inner:
                contents.append(text[start : token.start()])
    is_unclosed = any(
        start >= 0 and not has_inner for start, has_inner in zip(starts, has_inner_box, strict=True)
    )
    return [*contents, _UNCLOSED] if is_unclosed else contents


def _after_phrase(text: str) -> str:
    """The text after the last "the answer is" or "Answer:", up to the end of its sentence."""
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return ""
    answer = text[matches[-1].end() :][:MAX_ANSWER_CHARACTERS]
    answer = re.split(r"\n|(?<=[^\s.])\.(?=\s|$)", answer, maxsplit=1)[0].strip().rstrip(".*_ ")
    if _NEGATION.match(answer):
        return answer if "not" not in answer.lower() else ""
    if formula := re.match(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", answer, re.DOTALL):
        after = answer[formula.end() :].strip().strip("*_.,")
        inner = next(part for part in formula.groups() if part)
        return f"{inner} {after}" if re.fullmatch(r"[A-Za-z]{0,20}|\\?%", after) else inner
    if number := re.match(rf"({_NUMBER})(?=,?\s+(?:because|since|as|which|so|and)\b)", answer):
        return number[1]
    if letter := re.match(r"([A-Z])(?=,?\s+(?:because|since|as|which|so)\b)", answer):
        return letter[1]
    return answer


_END = rf"((?:\$\s?)?{_NUMBER}(?:\s*/\s*\d+)?\s*(?:\\?%)?)"


def _at_end(text: str) -> str:
    """A formula or number at the end of the last sentence, with at most one word after it."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    line = line[-MAX_ANSWER_CHARACTERS:].strip().rstrip(".!*_ ")
    sentence = re.split(r"(?<=[a-z)])[.!?]\s", line)[-1]
    if _NEGATION.search(sentence):
        return ""
    formula = re.search(
        r"(?:\$+([^$]+)\$+|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\])\s*([A-Za-z]{0,20})$",
        sentence,
    )
    if formula:
        inner = next(part for part in formula.groups()[:3] if part)
        return f"{inner} {formula[4]}".strip()
    if "$" in sentence.replace("$ ", "").replace(r"\$", "") and sentence.rstrip().endswith("$"):
        return ""
    number = re.search(rf"(?:^|(?<=[\s=:(*])){_END}\)?(?:\s+([A-Za-z]{{1,20}}))?$", sentence)
    return f"{number[1]} {number[2] or ''}".strip() if number else ""


def parse_answer(text: str) -> ParsedAnswer:
    r"""Parses an answer into its expression, its unit, and whether it is a percentage.

    >>> parse_answer(r"12^{\text{th}}"), parse_answer(r"\color{red}{3}").expression
    (ParsedAnswer(expression='12', unit='', percent=False), '3')
    >>> parse_answer(r"$12\text{ cm}^2$."), parse_answer("28\\%").percent
    (ParsedAnswer(expression='12', unit='cm^2', percent=False), True)
    """
    text = _plain(text)
    text, unit = _split_unit(text)
    percent = False
    if match := re.fullmatch(
        r"(.*?\S)\s*(?:\\?%|\\text\{\s*percent\s*\}|percent)", text, re.DOTALL
    ):
        text, percent = match[1], True
    text = _plain_number(text)
    return ParsedAnswer(text.strip(), unit, percent)


def _plain(text: str) -> str:
    """The text without delimiters, fonts, colors and spacing."""
    text = re.sub("[⁻⁰¹²³⁴-⁹]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = text.translate(_SYMBOLS)
    text = "".join(unicodedata.normalize("NFKC", c) if c > "~" else c for c in text)
    text = text.replace("\N{FRACTION SLASH}", "/")
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"√\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\\(?:text)?color\s*\{[^{}]*\}", " ", text)
    text = text.replace(r"\!", "").replace("{,}", ",")
    text = re.sub(r"\\[,;: ]|~", " ", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    before = None
    while before != text:  # from the inside out
        before = text
        text = re.sub(rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}", _without_font, text)
        text = _unwrapped(text)
    return re.sub(r"\s+", " ", text).replace("\1", r"\text{").replace("\2", "}").strip()


def _without_font(match: re.Match[str]) -> str:
    """The content of a font command: words stay marked as text, other content loses the font."""
    content = match[1]
    if re.search(r"[A-Za-z]{2}", content) and not re.search(r"\\[a-z]", content):
        return f"\1{content}\2"
    if match[0].startswith(r"\text{") and re.fullmatch(r"\s*[a-z]\s*", content):
        return f"\1{content}\2"  # a unit
    return content


def _unwrapped(text: str) -> str:
    """The text without delimiters around all of it, and without punctuation after it."""
    text = text.strip()
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")):
        inner = text[len(left) : len(text) - len(right)]
        if text.startswith(left) and text.endswith(right) and inner and left not in inner:
            text = inner.strip()
    if text.startswith("{") and text.endswith("}") and _closes_at_end(text):
        text = text[1:-1].strip()
    if not text.endswith(("...", r"\.")):
        text = text.rstrip(".,;:") if len(text) > 1 else text
    return text


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return position == len(text) - 1
    return False


_WORD_UNIT = re.compile(
    rf"({_NUMBER}|{_NUMBER}\s*/\s*\d+|.*[0-9)}}])\s*"
    r"(?:\\text\{([^{}]*)\}|\s((?:[A-Za-z]+\.?)(?:[ /-][A-Za-z]+){0,3}))"
    r"(\s*\^\s*\{?\d\}?)?"
)


def _split_unit(text: str) -> tuple[str, str]:
    """The text before a unit, and the unit."""
    text = re.sub(
        r"(?<=\d)\s*(?:\^\s*)?\{?\s*(?:\\text\{\s*)?(st|nd|rd|th)\b\s*\}?\s*\}?$", "", text
    )
    if match := re.fullmatch(r"(-?)\s*(?:\\\$|\$|£|€)\s*(-?[\d.,]+.*)", text):
        return match[1] + match[2], "$"
    degrees = r"(.*\S)\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*)?([CFK]?)\s*\}?"
    if match := re.fullmatch(degrees, text):
        return match[1], f"degrees {match[2]}".strip()
    if match := _WORD_UNIT.fullmatch(text):
        number, unit = match[1].strip(), (match[2] or match[3] or "").strip()
        words = set(re.findall(r"[a-z]+", unit.lower()))
        is_fraction = number.endswith(("\\frac", "\\text"))
        if unit.lower() in ("percent", "per cent"):
            return f"{number}%", ""
        if unit and not words & _NO_UNITS and not is_fraction:
            power = re.sub(r"[\s{}]", "", match[4] or "")
            return number, unit + power
    return text, ""


def _plain_number(text: str) -> str:
    """The text with numbers in one notation: thousands, exponents, mixed numbers, multiples."""
    text = re.sub(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d/])", lambda m: m[0].replace(" ", ""), text)
    text = re.sub(r"(?<![A-Za-z\\])(\d+(?:\.\d+)?)[eE]([-+]?\d+)", _with_power, text)
    mixed = r"(-?)\s*(\d+)\s+(?:(\d+)\s*/\s*(\d+)|\\frac\s*\{(\d+)\}\s*\{(\d+)\})"
    if match := re.fullmatch(mixed, text):
        sign, whole, *parts = match.groups()
        above, below = (part for part in parts if part)
        return f"{sign}({whole}+\\frac{{{above}}}{{{below}}})"
    if match := re.fullmatch(rf"({_NUMBER})\s*(?:\\text\{{\s*)?([a-z]+)\s*\}}?", text):
        return rf"{match[1]}\times {_MULTIPLES[match[2]]}" if match[2] in _MULTIPLES else text
    return text


def _with_power(match: re.Match[str]) -> str:
    return rf"{match[1]}\times 10^{{{int(match[2])}}}"
