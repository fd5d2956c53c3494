"""What an asynchronous run owes to the speed of its machine, as data: recorded, and replayed.

Which samples met which weights in which step follows from the config alone, but for questions whose
answer depends on time ("is the update ready?"). All of these are asked here. The answers of a step,
and the samples that met in it, are a line of `schedule.jsonl`:

    {"step": 3, "of": 9, "restored": false, "answers": "0001", "groups": [[8, 1, 2], [9, 2, 2]]}

A group is a prompt's number, and the versions of the oldest and newest weights of its tokens. `of`
is the number of steps for which prompts could begin, `restored`: the step began in a new process,
from a checkpoint.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxrl_llm.config import RLConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import hosts
from jaxrl_llm.text import split_lines

FILE = "schedule.jsonl"
Group = tuple[int, int, int]


class ScheduleError(UserError, RuntimeError):
    """A recorded schedule cannot be replayed: which file, which step, what differs."""


class Schedule:
    """Answers the questions of one run, all processes alike."""

    def __init__(
        self, mode: Literal["free", "record", "replay"], path: pathlib.Path, num_steps: int
    ):
        """Begins a run; `path` is written if it is recorded, and read if it is replayed.

        Raises:
          ScheduleError: If the file cannot be replayed.
        """
        self._mode, self._path = mode, path
        # Of the run; in a replay those of the one that was recorded, which may have had more.
        self.num_steps = num_steps
        self._steps = read(path) if mode == "replay" else {}
        self._step = 0  # 0: none is open
        self._answers: list[bool] = []
        self._groups: list[Group] = []
        self._restored = False
        self._given = iter(())

    @classmethod
    def of(cls, config: RLConfig, workdir: pathlib.Path) -> "Schedule":
        """Returns the schedule of a run in `workdir`; raises as the class."""
        trainer = config.trainer
        replays = trainer.schedule == "replay"
        path = pathlib.Path(trainer.schedule_file) if replays else workdir / FILE
        return cls(trainer.schedule, path, trainer.num_steps)

    def begin(self, step: int, restored: bool) -> bool:
        """Begins a step; returns whether one that was recorded began in a new process.

        `restored`: this one does.
        """
        self._step, self._restored, self._answers = step, restored, []
        if self._mode != "replay":
            return restored
        if step not in self._steps:
            message = f"has {len(self._steps)} steps, but this is step {step}"
            raise ScheduleError(f"{self._path}: {message}; replay at most as many steps")
        line = self._steps[step]
        self._given, self.num_steps = iter(line["answers"]), line["of"]
        return restored or line["restored"]

    def happened(self, is_so: Callable[[], bool]) -> bool:
        """Returns the answer to a question about time: process 0's, or that of the record."""
        if self._mode == "replay":
            if (given := next(self._given, "")) not in ("0", "1"):
                raise ScheduleError(
                    f"{self._path}: step {self._step} asks more than was recorded; replay with the"
                    " config, devices and versions of that run"
                )
            return given == "1"
        answer = hosts.told_by_first(is_so())
        self._answers.append(answer)
        return answer

    def meet(self, groups: Sequence[Group]) -> None:
        """Takes in which samples a step learns from; a replay's must be those of the record."""
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

    def end(self) -> None:
        """Ends the open step, if there is one: its line is written before it can be saved."""
        if self._mode == "record" and self._step and hosts.is_first():
            line = {
                "step": self._step,
                "of": self.num_steps,
                "restored": self._restored,
                "answers": "".join(str(int(answer)) for answer in self._answers),
                "groups": self._groups,
            }
            self._truncate(self._step)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._step = 0

    def _truncate(self, step: int) -> None:
        """Removes what a process wrote of this step and later ones before it was ended."""
        lines = []
        with contextlib.suppress(FileNotFoundError):
            lines = split_lines(self._path.read_text("utf-8"), keep_ends=True)
        kept = lines[: step - 1]
        if len(kept) < len(lines):
            self._path.write_text("".join(kept), "utf-8")


def read(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Returns the lines of a schedule by their steps, which are 1, 2, 3 and so on.

    Raises:
      ScheduleError: If it is no schedule.
    """
    try:
        lines = [json.loads(line) for line in split_lines(path.read_text("utf-8"))]
        found = {line["step"]: line for line in lines}
        whole = all({"of", "restored", "answers", "groups"} <= line.keys() for line in lines)
        if not whole or list(found) != list(range(1, len(lines) + 1)):
            raise ValueError("its lines are not those of steps 1, 2, 3, ...")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ScheduleError(
            f"config.trainer.schedule_file: {path}: no recorded schedule ({error}); name the"
            " schedule.jsonl in the folder of a run with trainer.schedule='record'"
        ) from error
    return found
