"""The pool survives what reward functions do to their process, and says what they did."""

import datetime
import decimal
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxrl_llm.config import RewardsConfig
from jaxrl_llm.rewards.reward_pool import RewardCall, RewardError, RewardPool

ONE = RewardsConfig(num_workers=1)
# `solution_str` says what the function shall do.
USER_FILE = """
import asyncio, ctypes, os, subprocess, sys, time
import numpy as np

def misbehave(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "hang with child":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open(extra_info["pids"], "w").write(f"{os.getpid()} {child.pid}")
        child.wait()
    if solution_str.startswith("flee"):
        seconds = 1_000_000 + os.getpid()
        for _ in range(50):  # in sessions of their own, with and without a parent
            command = f"setsid sleep {seconds} & sleep {seconds}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)
        open(extra_info["pids"], "w").write(f"sleep {seconds}")
        while subprocess.run(["pgrep", "-cfx", f"sleep {seconds}"], stdout=-1).stdout != b"100\\n":
            time.sleep(0.01)
        if solution_str == "flee and die":
            os.kill(os.getpid(), 9)
    if solution_str == "raise":
        raise KeyError("the user's own mistake")
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "leave":
        os._exit(3)
    if solution_str == "crash":
        ctypes.string_at(0)
    if solution_str.startswith("sleep"):
        time.sleep(float(solution_str.split()[1]))
    if solution_str == "hog":
        return float(len(bytearray(8 << 30)))
    if solution_str == "talk":
        os.write(1, b"word " * 100_000)
        return 1.0
    if solution_str == "forge":
        for fd in range(3, 512):
            try:
                os.write(fd, b"\\xff" * 64)
            except OSError:
                pass
    if solution_str == "environment":
        return {"score": 0.0, "names": sorted(os.environ)}
    if solution_str == "echo":
        return {"score": 0.0, "truth": repr(ground_truth), "info": repr(extra_info)}
    if solution_str == "modules":
        return {"score": 0.0, "jax": "jax" in sys.modules, "pid": os.getpid(),
                "platforms": os.environ["JAX_PLATFORMS"]}
    if solution_str.startswith("return "):
        return eval(solution_str.removeprefix("return "))
    return float(len(solution_str))

def nested(depth):
    return [nested(depth - 1)] if depth else []

async def patient(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return {"score": 4, "truth": ground_truth, "source": data_source, **extra_info}
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "user.py"
    path.write_text(USER_FILE)
    return str(path)


@pytest.fixture(scope="module")
def forgiving(user_file):
    functions = [f"{user_file}:misbehave", f"{user_file}:patient", "math"]
    config = RewardsConfig(timeout_s=3.0, on_failure="score", failure_score=-7.0, memory_gib=4.0)
    with RewardPool(functions, config) as pool:
        yield pool


def calls(function, *solutions, truth="", extra_info=()):
    return [
        RewardCall(function, row, "here", solution, truth, dict(extra_info))
        for row, solution in enumerate(solutions)
    ]


def alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_outcomes_keep_the_order_of_the_calls(forgiving, user_file):
    solutions = ["sleep 0.3", *("x" * n for n in range(20)), "sleep 0.1"]
    outcomes = forgiving.run(calls(f"{user_file}:misbehave", *solutions))
    assert [outcome.score for outcome in outcomes] == [float(len(s)) for s in solutions]
    assert not any(outcome.failure for outcome in outcomes)


def test_no_calls_give_no_results(forgiving):
    assert forgiving.run([]) == []


def test_async_function_and_details(forgiving, user_file):
    (outcome,) = forgiving.run(
        calls(f"{user_file}:patient", "x", truth=[1, 2], extra_info={"index": np.int64(5)})
    )
    assert outcome.score == 4.0
    assert outcome.details == {"truth": [1, 2], "source": "here", "index": 5}


@pytest.mark.parametrize(
    "solution, cause",
    [
        ("hang", "no answer within rewards.timeout_s=3 seconds"),
        ("raise", 'KeyError: "the user\'s own mistake"'),
        ("exit", "SystemExit: 3"),
        ("leave", "its process ended with exit code 3"),
        ("crash", "its process ended with signal SIGSEGV"),
        ("hog", "MemoryError"),
        ("forge", "its process ended with"),
        ("return {'score': 1.0, 'x': 'x' * (1 << 21)}", "bytes beside the score; at most 1048576"),
        ("return float('nan')", "returned nan; a reward function returns a finite number"),
        ("return -float('inf')", "returned -inf"),
        ("return 1e300", "returned 1e+300"),
        ("return 10**400", "returned 1000"),
        ("return None", "returned NoneType None"),
        ("return '1.0'", "returned str '1.0'"),
        ("return [1.0]", "returned list [1.0]"),
        ("return {'acc': 1.0}", "returned a dict without 'score' (keys: ['acc'])"),
        ("return {'score': None}", "returned NoneType None"),
        ("return {'score': 1.0, 'x': object()}", "returned a dict with a object"),
        ("return {'score': 1.0, 'x': nested(900)}", "brackets are nested deeper than 64"),
    ],
)
def test_a_failure_costs_its_own_call_only(forgiving, user_file, solution, cause):
    outcomes = forgiving.run(calls(f"{user_file}:misbehave", "xx", solution, "xxx", "xxxx"))
    assert [outcome.score for outcome in outcomes] == [2.0, -7.0, 3.0, 4.0]
    assert [bool(outcome.failure) for outcome in outcomes] == [False, True, False, False]
    assert cause in outcomes[1].failure


@pytest.mark.parametrize(
    "result, score",
    [("True", 1.0), ("np.float32(0.5)", 0.5), ("np.bool_(True)", 1.0), ("np.array(2)", 2.0)],
)
def test_numbers_of_every_kind_are_scores(forgiving, user_file, result, score):
    (outcome,) = forgiving.run(calls(f"{user_file}:misbehave", f"return {result}"))
    assert (outcome.score, outcome.failure) == (score, "")


def test_halves_of_characters_are_replaced(forgiving, user_file):
    details = r"{'score': 1.0, 'a\ud83d': ['\udc00', np.array(['b\ud83d'])]}"
    broken = r"return {}['\ud83d']"
    outcomes = forgiving.run(calls(f"{user_file}:misbehave", f"return {details}", broken))
    assert outcomes[0].details == {"a\ufffd": ["\ufffd", ["b\ufffd"]]}
    assert "KeyError" in outcomes[1].failure and outcomes[1].failure.encode()


def test_worker_traceback_is_reported(forgiving, user_file):
    (outcome,) = forgiving.run(calls(f"{user_file}:misbehave", "raise"))
    assert f'File "{user_file}"' in outcome.failure
    assert 'raise KeyError("the user\'s own mistake")' in outcome.failure


def test_failures_are_logged_once_a_run(forgiving, user_file, caplog):
    forgiving.run(calls(f"{user_file}:misbehave", "x", "raise", "raise"))
    (record,) = caplog.records
    assert "2 of 3 reward calls failed and score -7; the first:" in record.getMessage()
    assert "row 1, data source 'here': KeyError" in record.getMessage()


def test_math_works_in_the_worker(forgiving):
    outcomes = forgiving.run(calls("math", r"\boxed{1/2}", r"\boxed{2}", truth="0.5"))
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0]
    assert not any(outcome.failure for outcome in outcomes)


def test_workers_are_other_processes_without_jax(forgiving, user_file):
    (outcome,) = forgiving.run(calls(f"{user_file}:misbehave", "modules"))
    assert outcome.details["jax"] is False
    assert outcome.details["platforms"] == "cpu"
    assert outcome.details["pid"] != os.getpid()


def test_workers_do_not_see_the_run_s_environment(user_file, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "shared")
    name = f"{user_file}:misbehave"
    with RewardPool([name], RewardsConfig(num_workers=1, environment=("JUDGE_KEY",))) as pool:
        (outcome,) = pool.run(calls(name, "environment"))
    assert "JUDGE_KEY" in outcome.details["names"]
    assert "WANDB_API_KEY" not in outcome.details["names"]


def test_worker_output_is_bounded(user_file, capfd):
    name = f"{user_file}:misbehave"
    with RewardPool([name], ONE) as pool:
        assert [o.score for o in pool.run(calls(name, "talk", "talk"))] == [1.0, 1.0]
    shown = capfd.readouterr().err
    assert 60_000 < len(shown) < 70_000 and "bytes: dropped" in shown


def test_every_json_value_reaches_the_reward_function(forgiving, user_file):
    truth = [b"\xff", datetime.datetime(2024, 1, 2, 3), decimal.Decimal("0.10"), None, 10**30]
    info = {"day": datetime.date(2024, 1, 2), "nan": float("nan"), "by": {1: "one", "2": "two"}}
    (outcome,) = forgiving.run(
        calls(f"{user_file}:misbehave", "echo", truth=truth, extra_info=info)
    )
    assert (outcome.details["truth"], outcome.details["info"]) == (repr(truth), repr(info))


def test_a_hanging_call_is_killed_with_its_children(forgiving, user_file, tmp_path):
    pids = tmp_path / "pids"
    started = time.monotonic()
    (outcome,) = forgiving.run(
        calls(f"{user_file}:misbehave", "hang with child", extra_info={"pids": str(pids)})
    )
    assert "no answer" in outcome.failure
    assert time.monotonic() - started < 20.0
    assert not any(alive(pid) for pid in pids.read_text().split())


@pytest.mark.parametrize("solution", ["flee", "flee and die"])
def test_nothing_that_a_call_has_started_outlives_its_worker(user_file, tmp_path, solution):
    pids, name = tmp_path / "pids", f"{user_file}:misbehave"
    config = RewardsConfig(num_workers=1, timeout_s=60.0, on_failure="score")
    with RewardPool([name], config) as pool:
        (outcome,) = pool.run(calls(name, solution, extra_info={"pids": str(pids)}))
        assert ("ended with signal SIGKILL" in outcome.failure) == (solution == "flee and die")
    assert subprocess.run(["pgrep", "-fx", pids.read_text()], check=False).returncode == 1


def test_stop_names_function_row_source_and_cause_and_the_pool_goes_on(user_file):
    name = f"{user_file}:misbehave"
    with RewardPool([name], RewardsConfig(timeout_s=100.0)) as pool:
        started = time.monotonic()
        with pytest.raises(RewardError) as error:
            pool.run(calls(name, "sleep 90", "raise", "sleep 90"))
        assert time.monotonic() - started < 20.0  # without waiting for the others
        for part in (name, "row 1", "data source 'here'", "KeyError", "rewards.on_failure='score'"):
            assert part in str(error.value)
        # No answer of the stopped run is taken for one of this run.
        outcomes = pool.run(calls(name, *("x" * n for n in range(8))))
        assert [outcome.score for outcome in outcomes] == [float(n) for n in range(8)]


@pytest.mark.parametrize("already_dead", [False, True])
def test_a_worker_that_died_before_it_read_a_call_is_replaced(user_file, already_dead):
    name = f"{user_file}:misbehave"
    with RewardPool([name], ONE) as pool:
        (first,) = pool.run(calls(name, "modules"))
        pid = first.details["pid"]
        # A stopped process reads nothing: it dies with the call in its socket.
        os.kill(pid, signal.SIGKILL if already_dead else signal.SIGSTOP)
        killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        if not already_dead:
            killer.start()
        (second,) = pool.run(calls(name, "modules"))
        assert second.details["pid"] != pid
    assert not alive(second.details["pid"])


def test_close_ends_the_processes_and_the_pool(user_file):
    name = f"{user_file}:misbehave"
    with RewardPool([name], ONE) as pool:
        (outcome,) = pool.run(calls(name, "modules"))
        assert alive(outcome.details["pid"])
    assert not alive(outcome.details["pid"])
    with pytest.raises(RewardError, match="closed"):
        pool.run(calls(name, "x"))
    pool.close()


def test_a_function_that_cannot_be_found_stops_the_start(tmp_path):
    with pytest.raises(RewardError, match="unknown reward function 'nothing'; known: arithmetic"):
        RewardPool(["arithmetic", "nothing"], ONE)
    (tmp_path / "broken.py").write_text("import absent_module\n")
    with pytest.raises(RewardError, match="ModuleNotFoundError: No module named 'absent_module'"):
        RewardPool([f"{tmp_path}/broken.py:f"], ONE)
    (tmp_path / "dies.py").write_text("import os; os._exit(9)\n")
    with pytest.raises(RewardError, match="its process ended with exit code 9"):
        RewardPool([f"{tmp_path}/dies.py:f"], ONE)


def test_a_row_that_no_process_can_be_sent_is_named(forgiving, user_file):
    with pytest.raises(RewardError, match="row 0, data source 'here': ground_truth or extra_info"):
        forgiving.run(calls(f"{user_file}:misbehave", "x", truth=lambda: 0))
    assert forgiving.run(calls(f"{user_file}:misbehave", "x"))[0].score == 1.0


def test_workers_leave_when_their_run_is_killed(user_file, tmp_path):
    pids = tmp_path / "pids"
    # A script without a main guard: workers do not import it.
    script = tmp_path / "run.py"
    script.write_text(
        "from jaxrl_llm.config import RewardsConfig\n"
        "from jaxrl_llm.rewards.reward_pool import RewardCall, RewardPool\n"
        f"name = {user_file + ':misbehave'!r}\n"
        f"info = {{'pids': {str(pids)!r}}}\n"
        "pool = RewardPool([name], RewardsConfig(num_workers=1, timeout_s=100))\n"
        "pool.run([RewardCall(name, 0, '', 'hang with child', '', info)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, script], env=environment)
    try:
        wait_until(lambda: pids.is_file() and len(pids.read_text().split()) == 2)
    finally:
        run.kill()
        run.wait()
    worker, child = pids.read_text().split()
    wait_until(lambda: not alive(worker) and not alive(child))


def wait_until(condition):
    deadline = time.monotonic() + 100.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
