"""Built-in reward functions by hand value, and how names are resolved."""

import subprocess
import sys

import pytest

from jaxrl_llm.config.rollout_data import RewardFunctionConfig, RewardsConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.rewards import base
from jaxrl_llm.rewards.functions import gsm8k, resolve


def score(name, solution, truth="", extra_info=()):
    found = resolve(name)("source", solution, truth, dict(extra_info))
    return found["score"] if isinstance(found, dict) else found


@pytest.mark.parametrize(
    "solution, expected",
    [
        ("3+4=7,7+2=9#9", 1.0),
        ("#9", 1.0),
        ("# 9\n", 1.0),
        ("9", 0.0),  # no marker
        ("#8#9", 0.0),  # a second guess does not count
        ("#9#9", 0.0),
        ("#9,9+1=10", 0.0),  # goes on after the answer
        ("#09", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_reward(solution, expected):
    assert score("arithmetic", solution, "9") == expected


@pytest.mark.parametrize(("last", "expected"), [("#9", 1.0), ("#8#9", 0.0), ("", 0.0)])
def test_arithmetic_of_an_episode_is_about_its_last_turn(last, expected):
    said = [("assistant", "#7"), ("tool", "#9"), ("assistant", last)]
    messages = [{"role": role, "content": content} for role, content in said]
    assert score("arithmetic", f"#7#9{last}", "9", {"messages": messages}) == expected


@pytest.mark.parametrize(
    "solution, truth, expected",
    [
        ("so #### 72", "72", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 1 and then #### 2", "2", 1.0),  # the last one counts
        ("#### 1 and then #### 2", "1", 0.0),
        ("####72", "72", 0.0),  # strict: one space
        ("#### $72", "72", 0.0),
        ("#### 72.", "72", 0.0),  # the period belongs to the match
        ("#### 72.0", "72", 0.0),  # texts are compared, not values
        ("72", "72", 0.0),
        ("", "72", 0.0),
        ("#### 72" + "x" * 293, "72", 1.0),  # 7 characters + 293: just within the last 300
        ("#### 72" + "x" * 294, "72", 0.0),
    ],
)
def test_gsm8k_reward(solution, truth, expected):
    assert score("gsm8k", solution, truth) == expected


@pytest.mark.parametrize(
    "solution, truth, expected",
    [
        ("<answer>The  Eiffel Tower.</answer>", "eiffel tower", 1.0),
        ("<answer>Rome</answer> no <answer> Paris</answer>", ["Lyon", "PARIS"], 1.0),
        ("<answer>Rome</answer>", {"target": ["rome", "Roma"]}, 1.0),
        ("<answer>Rome or Paris</answer>", "Paris", 0.0),
        ("<answer>the</answer>", "a", 0.0),  # nothing is left of either
        ("Paris", "Paris", 0.0),
        ("<answer>Paris</answer>", None, 0.0),
    ],
)
def test_exact_match_reward(solution, truth, expected):
    assert score("exact_match", solution, truth) == expected


@pytest.mark.parametrize(
    "solution, truth, expected",
    [
        (r"so it is \boxed{\frac12}", "0.5", 1.0),
        ("The final answer is 1,234.", "1234", 1.0),
        (r"\boxed{x^2+1}", "1+x^2", 1.0),
        (r"\boxed{4}. So the answer is \boxed{4}", "4", 1.0),
        (r"first \boxed{3}, no: \boxed{4}", "4", 0.0),  # the set of both
        (r"either \boxed{4} or \boxed{3}", r"\{3, 4\}", 1.0),
        (r"\boxed{5}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math_reward(solution, truth, expected):
    assert score("math", solution, truth) == expected


@pytest.mark.parametrize(
    "name, solution, answer",
    [
        ("arithmetic", "3+4=7 # 7\n", "7"),
        ("arithmetic", "3+4=7", ""),
        ("gsm8k", "#### 1 and #### 1,234 it is", "1234"),
        ("gsm8k", "no idea", ""),
        ("math", r"so it is \boxed{\frac12}", "1/2"),
        ("math", r"half of it, \boxed{\frac{2}{4}}", "1/2"),
        ("math", "no idea", ""),
        ("code", "```python\nprint(1)\n```", "print(1)\n"),
        ("code", "print(1)", ""),
    ],
)
def test_extracted_answer_is_reported(name, solution, answer):
    truth = {"tests": "pass"} if name == "code" else "7"
    assert resolve(name)("source", solution, truth, {})["pred"] == answer


def test_math_refuses_a_ground_truth_that_is_none():
    with pytest.raises(ValueError, match="ground truth ''"):
        score("math", r"\boxed{4}", "")


def test_format_reward():
    assert score("format", "so\n#### 4") == 1.0
    assert score("format", "so 4") == 0.0
    tags = {"format_regex": r"^<think>.*</think>\d+$"}
    assert score("format", "<think>a\nb</think>4", extra_info=tags) == 1.0
    assert score("format", "4", extra_info=tags) == 0.0


def test_length_penalty_is_a_ramp():
    limits = {"max_characters": 10, "buffer_characters": 4}
    penalties = [score("length", "x" * n, extra_info=limits) for n in (0, 10, 11, 13, 14, 99)]
    assert penalties == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert score("length", "x" * 1536) == -0.5  # 1024 allowed, 1024 to the bottom


def test_a_function_from_a_file_and_from_a_module(tmp_path, monkeypatch):
    body = "def f(data_source, solution_str, ground_truth, extra_info):\n    return {}\n"
    (tmp_path / "scores.py").write_text(body.format(2.0))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "scores.py").write_text(body.format(3.0))
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ("source", "", "", {})
    assert resolve(f"{tmp_path}/scores.py:f")(*arguments) == 2.0
    assert resolve(f"{tmp_path}/other/scores.py:f")(*arguments) == 3.0  # same name, other file
    assert resolve("scores:f")(*arguments) == 2.0
    assert resolve("gsm8k") is gsm8k


def test_optional_imports_happen_at_lookup():
    program = (
        "import sys\n"
        "from jaxrl_llm.rewards.functions import REWARD_FUNCTIONS, resolve\n"
        "loaded = lambda: 'math_verify' in sys.modules\n"
        "found = [('math' in REWARD_FUNCTIONS and loaded()), (resolve('math') and loaded())]\n"
        "assert found == [False, True], found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_math_without_its_extra_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    message = r"the reward function 'math' needs the package math_verify .*jaxrl_llm\[math\]"
    with pytest.raises(ConfigError, match=message):
        resolve("math")
    terms = {"answer": RewardFunctionConfig(function="math")}
    with pytest.raises(ConfigError, match=message):
        base.check_rewards(RewardsConfig(functions=terms))
    base.check_rewards(RewardsConfig(functions={"answer": RewardFunctionConfig(function="gsm8k")}))


@pytest.mark.parametrize(
    "name, message",
    [
        ("gsm9k", "unknown reward function 'gsm9k'; known: arithmetic, gsm8k"),
        ("no.such.module:f", "cannot be used: ModuleNotFoundError.*no.such.module"),
        ("{folder}/absent.py:f", "cannot be used: FileNotFoundError.*absent.py"),
        ("{folder}/scores.py:g", "scores.py has no 'g'"),
        ("{folder}/scores.py:number", "number' is a int, not a function"),
        ("{folder}/scores.py:short", "must take data_source, solution_str"),
        ("{folder}/broken.py:f", "broken.py:f' cannot be used: SyntaxError"),
        ("{folder}/leaves.py:f", "leaves.py:f' cannot be used: SystemExit"),
        ("{folder}/scores.py:", "unknown reward function"),
    ],
)
def test_unresolvable_functions_are_named(name, message, tmp_path):
    (tmp_path / "scores.py").write_text("number = 1\ndef short(a, b): return 0\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit()\n")
    with pytest.raises(ValueError, match=message):
        resolve(name.format(folder=tmp_path))
