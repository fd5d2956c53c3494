"""Reward for code: runs the program in the response against the row's tests, in a sandbox."""

import json
import re
from typing import Any

from jaxrl_llm.processes import supervisor
from jaxrl_llm.processes.sandbox import SandboxLimits, protections, run_python
from jaxrl_llm.rewards.functions import ExtraInfo
from jaxrl_llm.rewards.ground_truth import checks_truth

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_TESTS = 64
_STREAMS = ("inputs", "outputs")


def _tests(ground_truth: Any) -> list[tuple[str, str, str]]:
    """The (stdin, expected stdout, statements to run after the program) of each test."""
    rule = "code: ground_truth needs 'inputs' and 'outputs' of equal length, or 'tests'"
    try:
        fields = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        if statements := fields.get("tests"):
            # The repr of a list would be an expression, which every program passes.
            lines = [statements] if isinstance(statements, str) else list(statements)
            if not all(isinstance(line, str) for line in lines):
                raise ValueError("a test is no text")
            return [("", "", "\n".join(lines))]
        texts = [
            [_stream_text(value) for value in _checked_list(fields[name])] for name in _STREAMS
        ]
        pairs = list(zip(*texts, strict=True))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{rule}, got {ground_truth!r:.80} ({error})") from error
    if not pairs:
        raise ValueError(f"{rule}, got no test")
    return [(stdin, stdout, "") for stdin, stdout in pairs[:_MAX_TESTS]]


def _checked_list(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, dict)):
        raise ValueError(f"{type(value).__name__} in place of a list")
    return list(value)


def _stream_text(value: Any) -> str:
    """Text of stdin or stdout; a number stands for its text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{type(value).__name__} {value!r:.40} is not a text for stdin or stdout")
    return str(value)


@checks_truth(_tests)
def code(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo) -> dict:
    """1.0 as `score` if the last code block passes every test, else 0.0.

    `passed` is the share of tests before the first failure, `failure` the cause of that failure,
    `sandbox` the protections of this machine against the untrusted program.

    The ground truth is a mapping, or its JSON: `inputs` and `outputs`, texts for stdin and expected
    stdout (white space at the ends of lines and of the text is ignored); or `tests`, Python
    statements (a text or a list of them) that run after the program and fail by an exception.
    ValueError if it has no test. `extra_info` may have `timeout_s` per test (5) and `memory_gib`
    (1).
    """
    tests = _tests(ground_truth)
    blocks = _BLOCK.findall(solution_str)
    result = {"score": 0.0, "passed": 0.0, "failure": "", "sandbox": str(protections())}
    result["pred"] = blocks[-1] if blocks else ""
    if not blocks:
        return {**result, "failure": "no block of code"}
    timeout_s = float(extra_info.get("timeout_s", 5.0))
    memory_gib = float(extra_info.get("memory_gib", 1.0))
    limits = SandboxLimits(wall_s=timeout_s, cpu_s=timeout_s, memory_gib=memory_gib)
    for number, (stdin, expected, statements) in enumerate(tests):
        ended = run_python(f"{blocks[-1]}\n{statements}", stdin, limits)
        is_correct = statements or _lines(ended.output) == _lines(expected)
        if not (ended.succeeded and is_correct):
            last_error_line = ended.errors.strip().rpartition("\n")[
                2
            ] or supervisor.exit_description(ended.exit_code)
            cause = ended.failure or (last_error_line if ended.exit_code else "another output")
            return {**result, "passed": number / len(tests), "failure": cause[:200]}
    return {**result, "score": 1.0, "passed": 1.0}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]
