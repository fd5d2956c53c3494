"""A program in the response, run against the tests of its row in a sandbox."""

import json
import re
from typing import Any

from jaxrl_llm.processes import supervisor
from jaxrl_llm.processes.sandbox import Limits, protections, run_python
from jaxrl_llm.rewards.functions import Info
from jaxrl_llm.rewards.ground_truth import checks_truth

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_TESTS = 64
_STREAMS = ("inputs", "outputs")


def _tests(ground_truth: Any) -> list[tuple[str, str, str]]:
    """Returns stdin, wanted stdout and statements to run after the program, of each test."""
    rule = "code: ground_truth needs 'inputs' and 'outputs' of equal length, or 'tests'"
    try:
        given = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        if statements := given.get("tests"):
            # A list printed as such would be an expression, which every program passes.
            lines = [statements] if isinstance(statements, str) else list(statements)
            if not all(isinstance(line, str) for line in lines):
                raise ValueError("a test is no text")
            return [("", "", "\n".join(lines))]
        texts = [[_of_stream(each) for each in _list(given[name])] for name in _STREAMS]
        pairs = list(zip(*texts, strict=True))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{rule}, got {ground_truth!r:.80} ({error})") from error
    if not pairs:
        raise ValueError(f"{rule}, got no test")
    return [(stdin, stdout, "") for stdin, stdout in pairs[:_MAX_TESTS]]


def _list(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, dict)):
        raise ValueError(f"{type(value).__name__} in place of a list")
    return list(value)


def _of_stream(value: Any) -> str:
    """What a program reads or writes: a text, or a number that stands for its text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{type(value).__name__} {value!r:.40} is no text of stdin or stdout")
    return str(value)


@checks_truth(_tests)
def code(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info) -> dict:
    """Returns 1.0 as `score` if the last block of code passes every test, else 0.0.

    `passed` is the share of tests that it passes before the first that fails, `failure` how that
    one ended, `sandbox` which protections this machine has against the untrusted program.

    The ground truth is a mapping, or its JSON: `inputs` and `outputs`, texts for stdin and what
    stdout must be but for white space at its ends and those of its lines; or `tests`, Python
    statements (a text or a list of them) that run after the program and fail by an exception.
    ValueError if it holds no test. `extra_info` may have `timeout_s` of one test (5) and
    `memory_gib` (1).
    """
    tests = _tests(ground_truth)
    blocks = _BLOCK.findall(solution_str)
    found = {"score": 0.0, "passed": 0.0, "failure": "", "sandbox": str(protections())}
    found["pred"] = blocks[-1] if blocks else ""
    if not blocks:
        return {**found, "failure": "no block of code"}
    seconds = float(extra_info.get("timeout_s", 5.0))
    memory_gib = float(extra_info.get("memory_gib", 1.0))
    limits = Limits(wall_s=seconds, cpu_s=seconds, memory_gib=memory_gib)
    for number, (stdin, expected, after) in enumerate(tests):
        ended = run_python(f"{blocks[-1]}\n{after}", stdin, limits)
        right = after or _lines(ended.output) == _lines(expected)
        if not (ended.succeeded and right):
            last = ended.errors.strip().rpartition("\n")[2] or supervisor.ending(ended.exit_code)
            why = ended.failure or (last if ended.exit_code else "another output")
            return {**found, "passed": number / len(tests), "failure": why[:200]}
    return {**found, "score": 1.0, "passed": 1.0}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]
