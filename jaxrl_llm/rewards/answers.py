r"""The final answer in a response, and the forms in which one answer may be written.

Nothing here computes: `final_answer` finds what a response gives as its answer, `read_answer` takes
away what does not belong to its value (fonts, spaces, units, a percent sign). `math.py` compares.
docs/answers.md lists the forms with their verdicts.
"""

import dataclasses
import re
import unicodedata

MAX_ANSWER_CHARACTERS = 2000  # a longer "answer" is a text
_MAX_BOXES = 32  # different ones are guesses

_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)"
# Beside compatibility forms (digits of full width), which have their own table in Unicode.
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
# Words that are no unit after a number.
_NO_UNITS = frozenset({
    "or", "and", "not", "no", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "mod", "to",
    "if", "for", "when", "where", "then", *_MULTIPLES,
})  # fmt: skip
# Words of fewer than four letters that are no product of variables.
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
    """What a response gives as its answer, as it is written there."""

    text: str  # "": none
    boxed: bool = False


@dataclasses.dataclass(frozen=True)
class Reading:
    """An answer without what does not belong to its value."""

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
        known = is_text or any(len(word) > 3 or word in _SHORT_WORDS for word in words)
        return " ".join(words) if known else ""

    @property
    def choice(self) -> str:
        """The letter of a choice, in upper case: of `C`, `(C)`, `C. red`, `C: red`; else ""."""
        text = self.expression.replace("\\text{", " ").replace("}", " ").strip()
        match = _CHOICE.fullmatch(text)
        if match is None:
            return ""
        letter, rest = match[1], match[2].strip()
        marked = bool(re.match(r"(?i)(?:option|choice|answer)?\s*[(\[]?\s*[a-z]\s*[)\]:.]", text))
        return letter.upper() if not rest or marked else ""


def final_answer(solution: str) -> FinalAnswer:
    r"""The answer of a response: the first of these that it has, of several the last.

    What is in boxes (different ones are one list), in `<answer>`, after `####`, after "the answer
    is"; a formula or number that the response ends with, in a sentence without a negation. Of a
    response with thoughts (`</think>`), what follows them counts.

    >>> final_answer(r"So \boxed {2} or \boxed{3}")
    FinalAnswer(text='2, 3', boxed=True)
    >>> final_answer("In 2024, there is no answer").text
    ''
    """
    after = solution.rpartition("</think>")[2]
    solution = after if after.strip() else solution
    boxes = [content.strip() for content in _boxed(solution)]
    if boxes:
        if boxes[-1] == _UNCLOSED:
            return FinalAnswer("")
        different = list(dict.fromkeys(box for box in boxes if box))
        if (
            len(different) > _MAX_BOXES
            or max(map(len, different), default=0) > MAX_ANSWER_CHARACTERS
        ):
            return FinalAnswer("")
        by_reading = {read_answer(box): box for box in different}
        return FinalAnswer(", ".join(by_reading.values()), boxed=True)
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
    r"""The contents of `\boxed{...}` and `\fbox{...}`; of a box within a box the inner one.

    The last is `_UNCLOSED` if its end is missing. One pass, however deep they are nested.
    """
    contents: list[str] = []
    starts: list[int] = []  # of each open brace, -1: of no box
    holds_box: list[bool] = []
    for token in _BOX.finditer(text):
        word = token[0]
        if word.startswith(("\\box", "\\fbox")):
            if token["open"]:
                holds_box = [True] * len(holds_box) if not all(holds_box) else holds_box
                starts.append(token.end())
                holds_box.append(False)
            else:  # as in `\boxed 5`
                rest = text[token.end() : token.end() + 40]
                contents.append((re.match(r"\\?\w*", rest) or [""])[0])
        elif word == "{":
            starts.append(-1)
            holds_box.append(True)
        elif word == "}" and starts:
            start, has_inner = starts.pop(), holds_box.pop()
            if start >= 0 and not has_inner:
                contents.append(text[start : token.start()])
    is_open = any(
        start >= 0 and not has_inner for start, has_inner in zip(starts, holds_box, strict=True)
    )
    return [*contents, _UNCLOSED] if is_open else contents


def _after_phrase(text: str) -> str:
    """What follows the last "the answer is" or "Answer:", up to the end of its sentence."""
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return ""
    said = text[matches[-1].end() :][:MAX_ANSWER_CHARACTERS]
    said = re.split(r"\n|(?<=[^\s.])\.(?=\s|$)", said, maxsplit=1)[0].strip().rstrip(".*_ ")
    if _NEGATION.match(said):
        return said if "not" not in said.lower() else ""
    if formula := re.match(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", said, re.DOTALL):
        after = said[formula.end() :].strip().strip("*_.,")
        inner = next(part for part in formula.groups() if part)
        return f"{inner} {after}" if re.fullmatch(r"[A-Za-z]{0,20}|\\?%", after) else inner
    if number := re.match(rf"({_NUMBER})(?=,?\s+(?:because|since|as|which|so|and)\b)", said):
        return number[1]
    if letter := re.match(r"([A-Z])(?=,?\s+(?:because|since|as|which|so)\b)", said):
        return letter[1]
    return said


_END = rf"((?:\$\s?)?{_NUMBER}(?:\s*/\s*\d+)?\s*(?:\\?%)?)"


def _at_end(text: str) -> str:
    """A formula or number at the end of the last sentence, with one word after it at most."""
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


def read_answer(text: str) -> Reading:
    r"""An answer as an expression, its unit, and whether it is in percent.

    >>> read_answer(r"12^{\text{th}}"), read_answer(r"\color{red}{3}").expression
    (Reading(expression='12', unit='', percent=False), '3')
    >>> read_answer(r"$12\text{ cm}^2$."), read_answer("28\\%").percent
    (Reading(expression='12', unit='cm^2', percent=False), True)
    """
    text = _plain(text)
    text, unit = _split_unit(text)
    percent = False
    if match := re.fullmatch(
        r"(.*?\S)\s*(?:\\?%|\\text\{\s*percent\s*\}|percent)", text, re.DOTALL
    ):
        text, percent = match[1], True
    text = _plain_number(text)
    return Reading(text.strip(), unit, percent)


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
    while before != text:  # from inside out
        before = text
        text = re.sub(rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}", _without_font, text)
        text = _unwrapped(text)
    return re.sub(r"\s+", " ", text).replace("\1", r"\text{").replace("\2", "}").strip()


def _without_font(match: re.Match[str]) -> str:
    """The content where it is no word, or a letter; a word stays text."""
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
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return place == len(text) - 1
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
    """Numbers in one notation: thousands, exponents, mixed numbers, multiples."""
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
