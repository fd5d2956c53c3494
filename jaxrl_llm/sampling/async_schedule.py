"""Records and replays the timing-dependent decisions of an asynchronous run.

Which samples met which weights in which step follows from the config alone, except for questions
whose answer depends on timing ("is the update ready?"). All of them pass through here. The answers
of a step, and the groups it trained on, are a line of `schedule.jsonl`:

    {"step": 3, "of": 9, "restored": false, "answers": "0001", "groups": [[8, 1, 2], [9, 2, 2]]}

A group is a prompt's number and the oldest and newest weight versions of its tokens. `from_config`
is the number of steps for which prompts could be started; `restored` says that the step began in a
new process, from a checkpoint.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxrl_llm.config import RLConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import multihost
from jaxrl_llm.storage import files, line_log
from jaxrl_llm.text import split_lines

FILE_NAME = "schedule.jsonl"
GroupVersions = tuple[int, int, int]


class ScheduleError(UserError, RuntimeError):
    """A recorded schedule cannot be replayed: which file, which step, what differs."""


class AsyncSchedule:
    """Decides the timing-dependent questions of one run, the same on all processes."""

    def __init__(
        self, mode: Literal["free", "record", "replay"], path: pathlib.Path, num_steps: int
    ):
        """Opens the schedule; `path` is written in mode "record" and read in mode "replay".

        Raises:
          ScheduleError: If the file cannot be replayed.
        """
        self._mode, self._path = mode, path
        # Of this run; in a replay of the recorded run, which may have had more.
        self.num_steps = num_steps
        self._steps = read_schedule(path) if mode == "replay" else {}
        self._step = 0  # 0: no step is open
        self._answers: list[bool] = []
        self._groups: list[GroupVersions] = []
        self._restored = False
        self._recorded_answers = iter(())

    @classmethod
    def from_config(cls, config: RLConfig, workdir: pathlib.Path) -> "AsyncSchedule":
        """The schedule of a run in `workdir`; raises like the constructor."""
        trainer = config.trainer
        replays = trainer.schedule == "replay"
        path = files.run_path(trainer.schedule_file) if replays else workdir / FILE_NAME
        return cls(trainer.schedule, path, trainer.num_steps)

    def begin_step(self, step: int, restored: bool) -> bool:
        """Begins a step; returns whether it, or the recorded one, starts in a new process.

        `restored` says that this one does.
        """
        self._step, self._restored, self._answers = step, restored, []
        if self._mode != "replay":
            return restored
        if step not in self._steps:
            message = f"has {len(self._steps)} steps, but this is step {step}"
            raise ScheduleError(f"{self._path}: {message}; replay at most as many steps")
        line = self._steps[step]
        self._recorded_answers, self.num_steps = iter(line["answers"]), line["of"]
        return restored or line["restored"]

    def decide(self, question: Callable[[], bool]) -> bool:
        """Decides a timing-dependent question: by process 0, or by the record in a replay."""
        if self._mode == "replay":
            if (recorded := next(self._recorded_answers, "")) not in ("0", "1"):
                raise ScheduleError(
                    f"{self._path}: step {self._step} asks more than was recorded; replay with the"
                    " config, devices and versions of that run"
                )
            return recorded == "1"
        answer = multihost.broadcast_from_host0(question())
        self._answers.append(answer)
        return answer

    def record_groups(self, groups: Sequence[GroupVersions]) -> None:
        """Records the groups of a step; in a replay, checks them against the record."""
        self._groups = list(groups)
        if self._mode == "replay":
            recorded = [tuple(group) for group in self._steps[self._step]["groups"]]
            if recorded != self._groups:
                pairs = zip(recorded, self._groups, strict=False)
                then, now = next((a, b) for a, b in pairs if a != b)
                raise ScheduleError(
                    f"{self._path}: step {self._step} learned from prompt {then[0]} by versions"
                    f" {then[1]} to {then[2]}, now from prompt {now[0]} by {now[1]} to {now[2]};"
                    " replay with the config, devices and versions of that run"
                )

    def end_step(self) -> None:
        """Ends the open step, if any: its line is written before a checkpoint can hold it."""
        if self._mode == "record" and self._step and multihost.is_first():
            line = {
                "step": self._step,
                "of": self.num_steps,
                "restored": self._restored,
                "answers": "".join(str(int(answer)) for answer in self._answers),
                "groups": self._groups,
            }
            self._truncate(self._step)
            line_log.append_line(self._path, json.dumps(line))
        self._step = 0

    def _truncate(self, step: int) -> None:
        """Removes lines of this and later steps, written before the process was killed."""
        lines = []
        with contextlib.suppress(FileNotFoundError):
            text = line_log.read_log(self._path).decode("utf-8")
            lines = split_lines(text, keep_ends=True)
        earlier = lines[: step - 1]
        if len(earlier) < len(lines):
            line_log.replace_log(self._path, "".join(earlier).encode())


def read_schedule(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """The lines of a schedule by step, 1, 2, 3, ...

    Raises:
      ScheduleError: If the file is not a schedule.
    """
    try:
        text = line_log.read_log(path).decode("utf-8")
        lines = [json.loads(line) for line in split_lines(text)]
        steps = {line["step"]: line for line in lines}
        is_complete = all({"of", "restored", "answers", "groups"} <= line.keys() for line in lines)
        if not is_complete or list(steps) != list(range(1, len(lines) + 1)):
            raise ValueError("its lines are not those of steps 1, 2, 3, ...")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ScheduleError(
            f"config.trainer.schedule_file: {path}: no recorded schedule ({error}); name the"
            " schedule.jsonl in the folder of a run with trainer.schedule='record'"
        ) from error
    return steps
