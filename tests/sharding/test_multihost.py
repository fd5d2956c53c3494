"""The watch over other processes, what is shared and compared; two real processes at the end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import multihost
from jaxrl_llm.sharding.multihost import (
    HEARTBEAT_TIMEOUT_S,
    DivergenceError,
    HeartbeatThread,
    compare_digests,
    digest,
    shard_digests,
)


class Board:
    """jax's coordination service in memory, which can break."""

    def __init__(self):
        self.words: dict[str, str] = {}
        self.broken = False

    def key_value_set(self, name, text, allow_overwrite):
        if self.broken:
            raise ConnectionError("connection refused")
        assert allow_overwrite
        self.words[name] = text

    def key_value_dir_get(self, folder):
        if self.broken:
            raise ConnectionError("connection refused")
        return [item for item in self.words.items() if item[0].startswith(folder)]


class Time:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def scene():
    """Three watches over one board, and the time that they see."""
    board, time = Board(), Time()
    watches = [HeartbeatThread(board, process, 3, pytest.fail, time) for process in range(3)]
    return board, time, watches


def later(time, watches, seconds=3.0):
    time.seconds += seconds
    return [watch.check() for watch in watches]


def test_nobody_ends_while_all_are_alive(scene):
    _, time, watches = scene
    for _ in range(50):
        assert later(time, watches) == ["", "", ""]


def test_silent_process_ends_the_others_and_is_named(scene):
    _, time, (first, second, third) = scene
    later(time, (first, second, third))
    quiet = time.seconds
    while not any(found := later(time, (first, third))):
        assert time.seconds - quiet < HEARTBEAT_TIMEOUT_S + 6
    for process, text in zip((0, 2), found, strict=True):
        if text:  # one of them may notice a period later
            assert text.startswith("process 1 gave no sign of life for 30 seconds\n")
            assert f"process {process} ends too" in text and "start the run again" in text
    assert any(later(time, (first, third)))


def test_process_that_never_started_counts_as_silent(scene):
    _, time, (first, _, _) = scene
    assert "process 1 gave no sign" in later(time, [first], HEARTBEAT_TIMEOUT_S)[0]


def test_failing_process_ends_the_others_at_once(scene):
    _, time, (first, second, third) = scene
    later(time, (first, second, third))
    third.stop_all("config.mesh: does not fit")
    for text in later(time, (first, second)):
        assert text.startswith("process 2 stopped: config.mesh: does not fit\nprocess ")


def test_finished_process_is_not_missed(scene):
    board, time, (first, second, third) = scene
    later(time, (first, second, third))
    third.leave()
    for _ in range(20):
        assert later(time, (first, second)) == ["", ""]
    third.check()
    assert board.words["jaxrl_llm/alive/2"] == "left"


def test_a_board_that_breaks_is_waited_for_and_then_process_0_is_named(scene):
    board, time, (first, second, third) = scene
    later(time, (first, second, third))
    board.broken = True
    assert later(time, [second]) == [""]
    board.broken = False
    assert later(time, (first, second, third)) == ["", "", ""]
    board.broken = True
    (text,) = later(time, [second], HEARTBEAT_TIMEOUT_S)
    assert text.startswith("process 0 cannot be reached: connection refused\nprocess 1 ends too")


def test_slow_liveness_checks_still_give_a_verdict(scene, monkeypatch):
    """Returns when all gave signs that are younger than the call; or else the silent one is named.

    A sign that was given before the call may come after it.
    """
    _, time, (first, second, third) = scene
    verdicts: list[str] = []

    def waits(others, seconds=7.0):
        def look(_):
            for watch in others:
                watch.check()
            verdicts.append(later(time, [first], seconds)[0])
            return bool(verdicts[-1])  # the watch ends the process

        with monkeypatch.context() as patch:
            patch.setattr(first._done, "wait", look)
            first.wait_for_heartbeats()

    later(time, (first, second, third))
    waits((second, third))
    assert verdicts == ["", ""]
    second.check()  # its last sign, which nobody has seen yet
    verdicts.clear()
    waits((third,))
    assert len(verdicts) * 7.0 > HEARTBEAT_TIMEOUT_S + 6 and set(verdicts[:-1]) == {""}
    assert verdicts[-1].startswith("process 1 gave no sign of life")


def test_one_process_shares_with_itself():
    assert multihost.is_first()
    assert multihost.allgather({"a": 1}) == [{"a": 1}]
    assert multihost.run_on_all_hosts(lambda: (3, None)) == [[3, None]]
    assert list(multihost.local_rows(5)) == [0, 1, 2, 3, 4]
    multihost.abandon("nobody is there to hear it")
    with pytest.raises(UserError, match="mine"):
        multihost.run_on_all_hosts(failing)


def failing():
    raise UserError("mine")


@pytest.mark.parametrize("count, num_processes", [(0, 2), (1, 2), (7, 3), (8, 4), (2, 5)])
def test_parts_cover_all_rows_once(monkeypatch, count, num_processes):
    monkeypatch.setattr(multihost.jax, "process_count", lambda: num_processes)
    parts = []
    for process in range(num_processes):
        monkeypatch.setattr(multihost.jax, "process_index", lambda process=process: process)
        parts.append(list(multihost.local_rows(count)))
    assert [row for part in parts for row in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@dataclasses.dataclass
class Row:
    tokens: np.ndarray
    text: str


def test_a_digest_sees_every_kind_of_change():
    values = [
        Row(np.arange(3), "a"),
        Row(np.arange(3), "b"),
        Row(np.arange(3).astype(np.int32), "a"),
        Row(np.arange(3)[None], "a"),
        Row(np.array([0, 2, 1]), "a"),
        [1, "2"],
        ["1", 2],
        ["ab", "c"],
        ["a", "bc"],
        [["a"], "b"],
        [["a", "b"]],
        {"a": 1},
        {"a": True},
        {"b": 1},
        0.0,
        -0.0,
        "\ud800",  # half of a surrogate pair, as a tokenizer may give
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(Row(np.arange(3), "a")) == digest(Row(np.arange(3), "a"))


def test_the_first_item_that_differs_is_named_with_who_holds_what():
    same = {"config": "0", "tokens": "1", "rewards": "2"}
    compare_digests("step 1", [same, same, same])
    other = {**same, "rewards": "9", "tokens": "8"}
    text = r"step 2: .* first about tokens \(processes 0, 2: 1; process 1: 8\); look for a host"
    with pytest.raises(DivergenceError, match=text):
        compare_digests("step 2", [same, other, same])


def test_values_held_by_some_processes_are_compared_among_them():
    compare_digests("x", [{"a[0:1]": "1"}, {"a[1:2]": "2"}])
    with pytest.raises(DivergenceError, match=r"a\[0:1\] \(process 0: 1; process 2: 3\)"):
        compare_digests("x", [{"a[0:1]": "1"}, {"a[1:2]": "2"}, {"a[0:1]": "3"}])


@pytest.fixture(scope="module")
def mesh():
    return tiny.make_mesh(data=2, fsdp=2, tensor=2)


def test_every_part_has_one_digest_however_often_it_is_held(mesh):
    array = jax.device_put(
        np.arange(24.0).reshape(4, 6), NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    scalar = jax.device_put(np.int32(3), NamedSharding(mesh, PartitionSpec()))
    found = dict(shard_digests({"w": array, "n": scalar}))
    assert list(found) == ["['n'][]", "['w'][0:2,0:6]", "['w'][2:4,0:6]"]
    assert found["['n'][]"] == "00000003"
    assert len(set(found.values())) == 3


def test_a_copy_that_differs_within_a_process_is_found(mesh):
    sharding = NamedSharding(mesh, PartitionSpec())
    good = np.ones((2, 2), np.float32)
    pieces = [
        jax.device_put(good + (i == 5) * 1e-7, device) for i, device in enumerate(mesh.devices.flat)
    ]
    array = jax.make_array_from_single_device_arrays((2, 2), sharding, pieces)
    (item,) = shard_digests({"w": array})
    with pytest.raises(DivergenceError, match=r"about \['w'\]\[0:2,0:2\] \(process 0: unequal cop"):
        compare_digests("step 1", [dict([item])])


@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8"])
def test_one_changed_element_changes_an_arrays_digest(dtype, place):
    numbers = np.arange(12) % 2
    array = jnp.asarray(numbers, dtype)
    changed = jnp.asarray(np.where(np.arange(12) == place, 1 - numbers, numbers), dtype)
    assert multihost._array_digest(array) != multihost._array_digest(changed)


def test_two_elements_that_change_places_change_it_too():
    a = jnp.array([1.0, 2.0, 3.0])
    assert multihost._array_digest(a) != multihost._array_digest(a[jnp.array([1, 0, 2])])


PROGRAM = """
import os, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import cluster_detection, multihost

multihost.join(cluster_detection.detect_start())
me = jax.process_index()
values = multihost.allgather("x" * 5000 * (me + 1))
assert [len(value) for value in values] == [5000, 10000]

def action():
    if me == 1:
        raise UserError("no file here")
try:
    multihost.run_on_all_hosts(action)
except UserError as error:
    assert str(error) == ("no file here" if me == 1 else "process 1: no file here"), error
else:
    raise AssertionError

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "fsdp"))
whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "fsdp"))
def copies(odd):
    shape = (2, 4)
    def array(sharding, other):
        numbers = np.arange(8, dtype=np.float32).reshape(shape) + other * (me == 1)
        return jax.make_array_from_callback(shape, sharding, lambda index: numbers[index])
    return {"a": array(whole, 0.0), "b": array(split, odd), "c": array(whole, odd)}
multihost.assert_equal("before", {"tokens": np.arange(4), "state": copies(0.0)})
try:
    multihost.assert_equal("step 3", {"tokens": np.arange(4), "state": copies(0.5)})
except multihost.DivergenceError as error:
    text = "step 3: the processes disagree, first about state['b'][0:2,0:2] (process 0: "
    assert str(error).startswith(text), error
else:
    raise AssertionError
try:
    multihost.assert_equal("step 4", {"tokens": np.arange(4) + me, "rewards": me})
except multihost.DivergenceError as error:
    assert "first about tokens (process 0: " in str(error), error
else:
    raise AssertionError

numbers = np.arange(16, dtype=np.float32).reshape(4, 4)
for devices in (jax.devices(), [device for device in jax.devices() if device.process_index == 1]):
    for spec in (P(None, "data"), P("data"), P()):
        place = NamedSharding(Mesh(np.array(devices), "data"), spec)
        array = jax.make_array_from_callback((4, 4), place, lambda i: numbers[i], numbers.dtype)
        np.testing.assert_array_equal(multihost.allgather_array(array), numbers)
multihost.leave()
"""


@pytest.mark.multihost
def test_two_processes_share_gather_agree_and_find_what_differs(tmp_path):
    processes.run(["-c", PROGRAM], 2, 2, tmp_path)


@pytest.mark.multihost
@pytest.mark.parametrize("stopping", [0, 1])
def test_the_reason_of_the_one_that_stops_reaches_the_other(tmp_path, stopping):
    program = (
        "import jax, sys\n"
        "sys.argv = ['x']\n"
        "from jaxrl_llm import program\n"
        "from jaxrl_llm.errors import UserError\n"
        "from jaxrl_llm.sharding import multihost\n"
        "def main():\n"
        f"    if jax.process_index() == {stopping}:\n"
        "        raise UserError('the disk is full')\n"
        "    multihost.allgather(1)\n"
        "program.run(main)\n"
    )
    path = tmp_path / "program.py"
    path.write_text(program)
    both = processes.start([path], 2, 1, tmp_path)
    said = processes.finish(both, timeout_s=100)
    assert [process.returncode for process in both] == [1, 1], said
    assert "the disk is full" in said[stopping]
    assert f"process {stopping} stopped: the disk is full" in said[1 - stopping]
