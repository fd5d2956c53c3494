"""Plans as text, JSON and charts."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.errors import Problem
from jaxrl_llm.planning import pool_placement, step_time
from jaxrl_llm.planning.accelerators import GIB
from jaxrl_llm.planning.memory_plan import Advice, MemoryPlan, mesh_axes_text
from jaxrl_llm.planning.run_setting import DEVICE_PARTS

_SHORT_S = 1e-3  # programs whose places are not worth a table
_BAR = 48  # characters of a full device
_MARKS = dict(zip(DEVICE_PARTS, "WGOALCT", strict=True))


def headline(plan: MemoryPlan) -> str:
    """One line with devices, meshes, peak memory and whether the run fits."""
    device, mesh_text = plan.device, mesh_axes_text(plan.setting.mesh)
    if len(plan.pools) > 1:
        mesh_text = "; ".join(
            f"{'+'.join(r)}: {mesh_axes_text(s.mesh)}" for r, s in plan.pools.items()
        )
    verdict, room = ("fits", "free") if plan.fits else ("does not fit", "short")
    return (
        f"{plan.num_devices} x {device.name} ({mesh_text}):"
        f" {plan.peak_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB a device, {verdict},"
        f" {abs(plan.free_bytes) / GIB:.1f} GiB {room}"
    )


def _name_width(plan: MemoryPlan) -> int:
    return max(14, *(len(name) + 1 for name in plan.programs))


def memory_table(plan: MemoryPlan, compiled: Mapping[str, Any]) -> str:
    """Text table of GiB per device by program and part, with the compiler's report if any."""
    width = _name_width(plan)
    head = f"{'GiB a device':{width}}" + "".join(
        f"{name:>12}" for name in (*DEVICE_PARTS, "host", "total")
    )
    lines = [head + (f"{'compiler':>12}" if compiled else "")]
    for name, parts in plan.programs.items():
        cells = [*vars(parts).values(), parts.total]
        line = f"{name:{width}}" + "".join(f"{cell / GIB:12.2f}" for cell in cells)
        if name in compiled:
            program = compiled[name]
            line += (
                f"  {program.problem}" if program.problem else f"{program.total_bytes / GIB:12.2f}"
            )
        lines.append(line)
    return "\n".join(lines)


def bar_chart(plan: MemoryPlan) -> str:
    """Text bar chart: a bar per program, a letter per part, scaled to the device's memory."""
    scale_bytes = max(plan.peak_bytes, plan.device.memory_bytes)
    width = _name_width(plan)
    limit = round(plan.device.memory_bytes / scale_bytes * _BAR)
    lines = []
    for name, parts in plan.programs.items():
        bar, end = "", 0.0
        for part in DEVICE_PARTS:
            end += getattr(parts, part)
            bar += _MARKS[part] * (round(end / scale_bytes * _BAR) - len(bar))
        bar = f"{bar:{_BAR}}"
        lines.append(f"{name:{width}}{bar[:limit]}|{bar[limit:]} {parts.total / GIB:6.1f}")
    legend = ", ".join(f"{mark} {part}" for part, mark in _MARKS.items())
    return "\n".join([*lines, f"{'':{width}}{legend}; | the device's memory"])


def time_table(plan: MemoryPlan, price: float) -> str:
    """Text table of times, tokens/s, MFU, and dollars at `price` per device-hour (0: unknown)."""
    speed = pool_placement.step_speed(plan)
    lines = [f"{'a step':18}{'seconds':>10}{'TFLOP':>10}{'HBM GB':>10}{'link GB':>10}"]
    for name, cost in speed.phases.items():
        sizes = (cost.flops / 1e12, cost.memory_bytes / 1e9, cost.link_bytes / 1e9)
        lines.append(f"{name:18}{cost.seconds:10.2f}" + "".join(f"{n:10.1f}" for n in sizes))
    throughput = f"{speed.tokens_per_s_per_device:.0f} tokens/s/device, MFU {speed.mfu:.1%}"
    lines.append(f"{'all':18}{speed.step_s:10.2f}   {throughput}")
    if price:
        steps, dollars = plan.setting.config.trainer.num_steps, _dollars(plan, speed, price)
        lines.append(f"{steps} steps: {dollars:,.0f} dollars at {price} a device and hour")
    return "\n".join(lines)


def _dollars(plan: MemoryPlan, speed: pool_placement.StepSpeed, price: float) -> float:
    num_steps = plan.setting.config.trainer.num_steps
    return price * plan.num_devices * num_steps * speed.step_s / 3600


def compiler_time_table(plan: MemoryPlan, compiled: Mapping[str, Any], num_places: int = 10) -> str:
    """Text table of the compiler's times: of one call of each program, and where they go.

    "limit" is the share of the time that the arithmetic, or for decoding the memory traffic, takes
    at the device's peak (`step_time.call_limits`).
    """
    limits = step_time.call_limits(plan.setting, plan.device)
    kinds = ("compute", "kernel", "collective", "copy")
    lines = [f"{'one call':18}{'seconds':>10}{'limit':>8}" + "".join(f"{k:>12}" for k in kinds)]
    for name, program in compiled.items():
        if (time := program.time) is None:
            continue
        shares = [time.by_kind.get(kind, 0.0) / max(time.cycles, 1.0) for kind in kinds]
        limit = f"{limits[name] / time.seconds:8.1%}" if name in limits else f"{'':8}"
        lines.append(
            f"{name:18}{time.seconds:10.4f}{limit}" + "".join(f"{s:12.1%}" for s in shares)
        )
        if time.unknown_kernels:
            lines.append(f"  {time.unknown_kernels} kernels without an estimate are not counted")
        if time.unknown_loops:
            lines.append(f"  {time.unknown_loops} loops of unknown length are counted once")
    for name, program in compiled.items():
        if program.time is None or program.time.seconds < _SHORT_S:
            continue
        lines += ["", f"{name}, costliest places"]
        for place, share in program.time.costliest(num_places):
            source = place.source.rpartition("jaxrl_llm/")[2] or "compiler"
            lines.append(f"{share:8.1%}  {source:44} {place.operation[-60:]}")
    return "\n".join(lines)


def compiled_to_json(plan: MemoryPlan, compiled: Mapping[str, Any]) -> dict[str, Any]:
    """The compiler's figures as JSON: bytes or a message by program, and times of a call."""
    limits = step_time.call_limits(plan.setting, plan.device)
    times = {}
    for name, program in compiled.items():
        if program.time is not None:
            times[name] = {
                "seconds": program.time.seconds,
                "limit_seconds": limits.get(name),
                "cycles": dict(program.time.by_kind),
                "places": [[*place, share] for place, share in program.time.costliest(10)],
            }
    return {
        "compiled": {name: p.problem or p.total_bytes for name, p in compiled.items()},
        "compiled_times": times,
    }


def to_json(plan: MemoryPlan, advice: Advice, price: float) -> dict[str, Any]:
    """The plan as a JSON document, in bytes and seconds."""
    document = {
        "device": dataclasses.asdict(plan.device),
        "num_devices": plan.num_devices,
        "mesh": dict(plan.setting.mesh),
        "pools": {"+".join(roles): dict(s.mesh) for roles, s in plan.pools.items()},
        "peak_bytes": plan.peak_bytes,
        "fits": plan.fits,
        "room_bytes": plan.free_bytes,
        "programs": {k: vars(parts) | {"total": parts.total} for k, parts in plan.programs.items()},
        "advice": {
            "changes": advice.changes,
            "device": advice.plan.device.name,
            "num_devices": advice.plan.num_devices,
            "peak_bytes": advice.plan.peak_bytes,
        },
    }
    if plan.device.flops and plan.job.learns_from_samples:
        speed = pool_placement.step_speed(plan)
        document["speed"] = dataclasses.asdict(speed)
        if price:
            document["dollars"] = _dollars(plan, speed, price)
    return document


def chart_problems(path: str) -> Iterator[Problem]:
    """Yields problems with the path of a chart."""
    if not path.endswith(".png"):
        yield "chart", f"{path} must end in .png"
    if not pathlib.Path(path).absolute().parent.is_dir():
        yield "chart", f"{path}: no such folder; make it first"


def save_chart(plan: MemoryPlan, path: str) -> None:
    """Writes the plan as a PNG: a stacked bar per program, a line at the device's memory."""
    # Imported here: matplotlib comes with the extra [plot], which no other module needs.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    bars = figure.add_subplot()
    names = list(plan.programs)
    bottoms = [0.0] * len(names)
    for part in DEVICE_PARTS:
        heights = [getattr(parts, part) / GIB for parts in plan.programs.values()]
        bars.bar(names, heights, bottom=bottoms, label=part)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    bars.axhline(plan.device.memory_bytes / GIB, color="black", linestyle="--", label="device")
    bars.set_ylabel("GiB on each device")
    bars.set_title(headline(plan), fontsize=9)
    bars.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=150)
