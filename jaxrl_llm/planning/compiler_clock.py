"""Time of a program on a TPU that is not attached, from its compiler's own estimates.

The TPU's compiler writes the cycles that it expects beside every operation that it schedules
itself. `program_time` walks through the scheduled program and adds them up, loops by their trips.
Three kinds of operations have no cycles there, and are timed by bytes and operations over the
rates of the device:

- copies between memories and collectives that run beside the compute (`-start` ... `-done`): they
  cost what is left of them when their result is needed;
- collectives that the program waits for;
- Pallas kernels, by the cost estimates of their authors.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from jaxrl_llm.planning.accelerators import Device
from jaxrl_llm.sharding import reshard

Kind = Literal["compute", "kernel", "collective", "copy"]

# Operations of a matrix unit in a cycle, for all units of a core: with the table's peak they give
# the clock rate. (A v4 chip is one device with two cores; the compiler counts those of one.)
_PEAK_OPERATIONS = {"v4": 131_072 * 2, "v5e": 131_072, "v5p": 262_144, "v6e": 524_288}
_HOST_BANDWIDTH = 16e9  # bytes/s between a chip and its host: half a direction of PCIe 4 x16

_NAME = r"%?([\w.\-~]+)"
_INSTRUCTION = re.compile(rf"\s*(ROOT )?{_NAME} = (.*)")
# The result's type ends before the operation's name: `(f32[2]{{0}}, u32[]) copy-start(`.
_OPERATION = re.compile(r"(?P<type>\(.*?\)|\S+) (?P<name>[\w\-]+)\((?P<operands>[^)]*)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\](?:\{[^}]*?(S\((\d)\))?\})?")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_COST = re.compile(r'"cost_estimate":\{([^}]*)\}')
_COST_PART = re.compile(r'"(flops|bytes_accessed|transcendentals)":"?(\d+)"?')
_HOST_SPACE = "5"


@dataclasses.dataclass(frozen=True)
class TpuRates:
    """Peak work of a TPU in a cycle."""

    cycles_per_s: float
    operations: float  # 16-bit multiplications and additions, at the peak
    memory_bytes: float
    link_bytes: float  # over all links of the device in one direction
    host_bytes: float


def tpu_rates(device: Device) -> TpuRates | None:
    """The rates of a device, or None if its compiler writes no cycles that are known."""
    if device.name not in _PEAK_OPERATIONS:
        return None
    clock = device.flops / _PEAK_OPERATIONS[device.name]
    return TpuRates(
        cycles_per_s=clock,
        operations=_PEAK_OPERATIONS[device.name],
        memory_bytes=device.memory_bandwidth / clock,
        link_bytes=device.link_bandwidth / clock,
        host_bytes=_HOST_BANDWIDTH / clock,
    )


class Place(NamedTuple):
    """A place of the source that operations come from."""

    source: str  # file:line; "": the compiler's own
    operation: str  # as JAX names it


@dataclasses.dataclass(frozen=True)
class ProgramTime:
    """Cycles of one call of a program on each device.

    Waits count as the kind that is waited for, so the kinds add up to the total.
    """

    rates: TpuRates
    by_kind: Mapping[Kind, float]
    by_place: Mapping[Place, float]
    unknown_kernels: int  # Pallas kernels without a cost estimate, counted as free
    unknown_loops: int  # loops inside loops of open length, counted once

    @property
    def cycles(self) -> float:
        return sum(self.by_kind.values())

    @property
    def seconds(self) -> float:
        return self.cycles / self.rates.cycles_per_s

    def costliest(self, count: int) -> list[tuple[Place, float]]:
        """The places with most cycles, each with its share of all."""
        ordered = sorted(self.by_place.items(), key=lambda item: -item[1])[:count]
        return [(place, cycles / max(self.cycles, 1.0)) for place, cycles in ordered]


def program_time(text: str, rates: TpuRates, open_trips: int = 1) -> ProgramTime:
    """The time of a compiled program, from its text (`Compiled.as_text`).

    Args:
      open_trips: How often loops run whose length is not in the program, but in its inputs.

    Raises:
      ValueError: If it is not the text of a scheduled TPU program.
    """
    if "is_scheduled=true" not in text or "ENTRY" not in text:
        raise ValueError("the text is not that of a scheduled program")
    walk = _ScheduleWalk(_Program.parse(text), rates, open_trips)
    walk.run()
    return ProgramTime(
        rates, dict(walk.by_kind), dict(walk.by_place), walk.unknown_kernels, walk.unknown_loops
    )


class _Instruction(NamedTuple):
    name: str
    result: str  # its type
    operation: str
    operands: str
    line: str
    is_root: bool


@dataclasses.dataclass(frozen=True)
class _Program:
    """The computations of a compiled program, and the source lines of its stack frames."""

    entry: str
    computations: Mapping[str, Sequence[_Instruction]]
    frames: Mapping[str, str]  # id -> file:line
    num_devices: int

    @classmethod
    def parse(cls, text: str) -> "_Program":
        computations: dict[str, list[_Instruction]] = {}
        entry = current = ""
        for line in text.splitlines():
            if not current:
                if line.endswith("{") and "->" in line and not line.startswith(" "):
                    match = re.match(rf"(ENTRY )?{_NAME}", line)
                    assert match is not None
                    current = match.group(2)
                    computations[current] = []
                    entry = current if match.group(1) else entry
            elif line == "}":
                current = ""
            elif instruction := _parse_instruction(line):
                computations[current].append(instruction)
        partitions = re.search(r"num_partitions=(\d+)", text)
        num_devices = int(partitions.group(1)) if partitions else 1
        return cls(entry, computations, _source_lines(text), num_devices)

    def place(self, instruction: _Instruction) -> Place:
        frame = re.search(r"stack_frame_id=(\d+)", instruction.line)
        name = re.search(r'op_name="([^"]*)"', instruction.line)
        source = self.frames.get(frame.group(1), "") if frame else ""
        return Place(source, name.group(1) if name else instruction.operation)

    def trips(self, loop: _Instruction, condition: str, body: str) -> int | None:
        """How often a loop runs: the bound of its counter over the counter's step.

        None: its condition is not that a counter is below a constant.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
            return int(known.group(1))
        tests = self.computations[condition]
        root = next(each for each in tests if each.is_root)
        if root.operation != "compare":
            return None
        counter, bound = (part.strip().lstrip("%") for part in root.operands.split(",")[:2])
        number = self._constant(tests, bound)
        if number is None:
            return None
        index = re.search(r"#(\d+)$", counter) or re.search(
            r"index=(\d+)", _definition(tests, counter)
        )
        return -(-number // (self._step(body, int(index.group(1))) if index else 1))

    def _step(self, body: str, index: int) -> int:
        """By how much a loop's body moves element `index` of what it carries."""
        instructions = self.computations[body]
        root = next(each for each in instructions if each.is_root)
        operands = re.sub(r"/\*.*?\*/", "", root.operands).split(",")
        if root.operation != "tuple" or index >= len(operands):
            return 1
        add = re.search(
            rf"add\({_NAME}(?:#\d+)?, {_NAME}(?:#\d+)?\)",
            _definition(instructions, operands[index].strip().lstrip("%")),
        )
        return (self._constant(instructions, add.group(2)) if add else None) or 1

    @staticmethod
    def _constant(instructions: Sequence[_Instruction], name: str) -> int | None:
        match = re.search(r"[su]32\[\]\S* constant\((\d+)\)", _definition(instructions, name))
        return int(match.group(1)) if match else None


def _parse_instruction(line: str) -> _Instruction | None:
    match = _INSTRUCTION.match(line)
    parts = match and _OPERATION.match(match.group(3))
    if not (match and parts):
        return None
    return _Instruction(
        match.group(2),
        parts["type"],
        parts["name"],
        parts["operands"],
        line,
        bool(match.group(1)),
    )


def _definition(instructions: Sequence[_Instruction], name: str) -> str:
    return next((each.line for each in instructions if each.name == name), "")


def _source_lines(text: str) -> dict[str, str]:
    """The innermost line of each stack frame, from the tables at the head of a program."""
    files = dict(re.findall(r'^(\d+) "([^"]*)"$', text.partition("FunctionNames")[0], re.M))
    locations = {
        number: f"{files.get(file, '')}:{line}"
        for number, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", text, re.M
        )
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", text, re.M)
    return {number: locations.get(location, "") for number, location in frames}


@dataclasses.dataclass
class _Transfer:
    """A copy or collective that runs beside the compute."""

    kind: Kind
    end: float  # cycles since the start of the computation
    place: Place


class _ScheduleWalk:
    """Runs through a program in the order of its schedule, with a clock."""

    def __init__(self, program: _Program, rates: TpuRates, open_trips: int):
        self._program, self._rates, self._open_trips = program, rates, open_trips
        self.by_kind: collections.Counter[Kind] = collections.Counter()
        self.by_place: collections.Counter[Place] = collections.Counter()
        self.unknown_kernels = self.unknown_loops = 0

    def run(self) -> float:
        """Walks through the program; returns its cycles."""
        return self._walk(self._program.entry, 1.0)

    def _walk(self, computation: str, times: float) -> float:
        """Cycles of one run of a computation, which is counted `times`."""
        now = 0.0
        busy_until: dict[Kind, float] = {"copy": 0.0, "collective": 0.0}
        transfers: dict[str, _Transfer] = {}
        for instruction in self._program.computations.get(computation, ()):
            operation = instruction.operation
            if nested := self._nested_cycles(instruction, times):
                now += nested
            elif operation.endswith("-start"):
                kind, cycles = self._transfer_cost(instruction)
                end = max(now, busy_until[kind]) + cycles
                busy_until[kind] = end
                place = self._program.place(instruction)
                transfers[instruction.name] = _Transfer(kind, end, place)
            elif operation.endswith("-done"):
                # Started outside, as in an earlier trip of a loop: taken as done.
                transfer = transfers.get(instruction.operands.split(",")[0].strip().lstrip("%"))
                if transfer is not None:
                    now += self._count(
                        transfer.kind, transfer.place, max(0.0, transfer.end - now), times
                    )
            else:
                kind, cycles = self._cost(instruction)
                now += self._count(kind, self._program.place(instruction), cycles, times)
        return now

    def _nested_cycles(self, instruction: _Instruction, times: float) -> float:
        """Cycles of an instruction that runs other computations; 0 for all others."""
        line = instruction.line
        if instruction.operation == "while":
            match = re.search(rf"condition={_NAME}, body={_NAME}", line)
            assert match is not None
            trips = self._program.trips(instruction, *match.groups())
            if trips is not None:
                return trips * self._walk(match.group(2), times * trips)
            self.unknown_loops += self._open_trips == 0
            trips, self._open_trips = self._open_trips, 0  # not for loops inside
            cycles = (trips or 1) * self._walk(match.group(2), times * (trips or 1))
            self._open_trips = trips
            return cycles
        if instruction.operation == "conditional":
            match = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = match.group(1).split(",") if match else []
            if not names:
                names = re.findall(r"(?:true|false)_computation=([^,\s]+)", line)
            return self._costliest_branch([name.strip().lstrip("%") for name in names], times)
        if instruction.operation == "call":
            match = re.search(rf"to_apply={_NAME}", line)
            return self._walk(match.group(1), times) if match else 0.0
        return 0.0

    def _costliest_branch(self, names: Sequence[str], times: float) -> float:
        """Counts the branch with most cycles alone."""
        walks = []
        for name in names:
            walk = _ScheduleWalk(self._program, self._rates, self._open_trips)
            walks.append((walk._walk(name, times), walk))
        if not walks:
            return 0.0
        cycles, walk = max(walks, key=lambda pair: pair[0])
        self.by_kind += walk.by_kind
        self.by_place += walk.by_place
        self.unknown_kernels += walk.unknown_kernels
        self.unknown_loops += walk.unknown_loops
        return cycles

    def _count(self, kind: Kind, place: Place, cycles: float, times: float) -> float:
        if cycles:
            self.by_kind[kind] += cycles * times  # type: ignore[assignment]
            self.by_place[place] += cycles * times  # type: ignore[assignment]
        return cycles

    def _cost(self, instruction: _Instruction) -> tuple[Kind, float]:
        """Kind and cycles of an operation that the next one waits for."""
        if match := _CYCLES.search(instruction.line):
            return "compute", float(match.group(1))
        if "tpu_custom_call" in instruction.line:
            return "kernel", self._kernel_cycles(instruction)
        if received := self._received_bytes(instruction):
            return "collective", received / self._rates.link_bytes
        return "compute", 0.0

    def _received_bytes(self, instruction: _Instruction) -> float:
        """Bytes that a device receives in a collective; 0 for other operations."""
        found = reshard.collectives(instruction.line, self._program.num_devices)
        return float(sum(collective.received_bytes for collective in found))

    def _kernel_cycles(self, instruction: _Instruction) -> float:
        cost = _COST.search(instruction.line)
        if cost is None:
            self.unknown_kernels += 1
            return 0.0
        parts = {name: float(number) for name, number in _COST_PART.findall(cost.group(1))}
        return max(
            parts.get("flops", 0.0) / self._rates.operations,
            parts.get("bytes_accessed", 0.0) / self._rates.memory_bytes,
        )

    def _transfer_cost(self, instruction: _Instruction) -> tuple[Kind, float]:
        """Kind and cycles of what a `-start` begins."""
        match = re.search(rf"calls={_NAME}", instruction.line)
        # An `async-start` names a computation of one operation.
        called = self._program.computations.get(match.group(1), ()) if match else ()
        if received := sum(map(self._received_bytes, (instruction, *called))):
            return "collective", received / self._rates.link_bytes
        sizes = list(_array_bytes(instruction.result))
        arrays = [size for size, _ in sizes]
        is_host = any(space == _HOST_SPACE for _, space in sizes)
        rate = self._rates.host_bytes if is_host else self._rates.memory_bytes
        # The result holds the target and the source: what is moved is the smaller of them.
        moved = min(arrays[:2]) if arrays else 0.0
        return "copy", moved / rate


def _array_bytes(types: str) -> Iterator[tuple[float, str]]:
    """Bytes and memory space of the arrays in a type, but for single numbers."""
    for kind, bits, dims, _, space in _ARRAY.findall(types):
        sizes = [int(size) for size in dims.split(",") if size]
        if sizes:
            yield math.prod(sizes) * (1.0 if kind == "pred" else int(bits) / 8), space
