"""What the devices did, and when, by the trace that `profiler.*` leaves in a run's folder."""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True)
class Busy:
    """One run of a program on one device, from its first operation to its last."""

    program: str
    device: int
    begin_s: float
    end_s: float


def busy(workdir: pathlib.Path) -> list[list[Busy]]:
    """Returns, for each process of a run, when its devices ran which program."""
    files = sorted((workdir / "profile").rglob("*.xplane.pb"))
    return [_busy(ProfileData.from_file(str(path))) for path in files]


def _busy(profile: ProfileData) -> list[Busy]:
    operations = collections.defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                of = dict(event.stats)
                if "hlo_module" in of:
                    run = of["hlo_module"], of["device_ordinal"], of["run_id"]
                    operations[run].append((event.start_ns / 1e9, event.end_ns / 1e9))
    return [
        Busy(program, device, min(begin for begin, _ in times), max(end for _, end in times))
        for (program, device, _), times in operations.items()
    ]


def together(some: Sequence[Busy], others: Sequence[Busy]) -> float:
    """Returns the share of their time in which `some` ran while one of `others` did.

    Each sequence is of one device, whose runs follow each other.
    """
    both = sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.begin_s, b.begin_s)) for a in some for b in others
    )
    return both / sum(run.end_s - run.begin_s for run in some)
