"""Plans as text, JSON and charts."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.errors import Problem
from jaxrl_llm.planning import placement
from jaxrl_llm.planning.devices import GIB
from jaxrl_llm.planning.fit import Advice, Plan, axes
from jaxrl_llm.planning.setting import PARTS

_BAR = 48  # characters of a full device
_MARKS = dict(zip(PARTS, "WGOALCT", strict=True))


def headline(plan: Plan) -> str:
    """Returns in one line what runs where and whether it fits."""
    device, where = plan.device, axes(plan.setting.mesh)
    if len(plan.pools) > 1:
        where = "; ".join(f"{'+'.join(r)}: {axes(s.mesh)}" for r, s in plan.pools.items())
    verdict, room = ("fits", "free") if plan.fits else ("does not fit", "short")
    return (
        f"{plan.num_devices} x {device.name} ({where}):"
        f" {plan.peak / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB a device, {verdict},"
        f" {abs(plan.room) / GIB:.1f} GiB {room}"
    )


def _name_width(plan: Plan) -> int:
    return max(14, *(len(name) + 1 for name in plan.programs))


def table(plan: Plan, compiled: Mapping[str, Any]) -> str:
    """Returns GiB a device by program and part, and what the compiler says in `compiled`."""
    width = _name_width(plan)
    head = f"{'GiB a device':{width}}" + "".join(
        f"{name:>12}" for name in (*PARTS, "host", "total")
    )
    lines = [head + (f"{'compiler':>12}" if compiled else "")]
    for name, parts in plan.programs.items():
        cells = [*vars(parts).values(), parts.total]
        line = f"{name:{width}}" + "".join(f"{cell / GIB:12.2f}" for cell in cells)
        if name in compiled:
            found = compiled[name]
            line += f"{found / GIB:12.2f}" if isinstance(found, (int, float)) else f"  {found}"
        lines.append(line)
    return "\n".join(lines)


def bar_chart(plan: Plan) -> str:
    """Returns a bar a program, its parts by letter, on the scale of the device's memory."""
    top = max(plan.peak, plan.device.memory_bytes)
    width = _name_width(plan)
    limit = round(plan.device.memory_bytes / top * _BAR)
    lines = []
    for name, parts in plan.programs.items():
        bar, end = "", 0.0
        for part in PARTS:
            end += getattr(parts, part)
            bar += _MARKS[part] * (round(end / top * _BAR) - len(bar))
        bar = f"{bar:{_BAR}}"
        lines.append(f"{name:{width}}{bar[:limit]}|{bar[limit:]} {parts.total / GIB:6.1f}")
    legend = ", ".join(f"{mark} {part}" for part, mark in _MARKS.items())
    return "\n".join([*lines, f"{'':{width}}{legend}; | the device's memory"])


def times(plan: Plan, price: float) -> str:
    """Returns times, tokens/s, MFU, and dollars at a price a device and hour (0: unknown)."""
    speed = placement.speed(plan)
    lines = [f"{'a step':18}{'seconds':>10}{'TFLOP':>10}{'HBM GB':>10}{'link GB':>10}"]
    for name, cost in speed.phases.items():
        sizes = (cost.flops / 1e12, cost.memory_bytes / 1e9, cost.link_bytes / 1e9)
        lines.append(f"{name:18}{cost.seconds:10.2f}" + "".join(f"{n:10.1f}" for n in sizes))
    rate = f"{speed.tokens_per_s_per_device:.0f} tokens/s/device, MFU {speed.mfu:.1%}"
    lines.append(f"{'all':18}{speed.step_s:10.2f}   {rate}")
    if price:
        steps, dollars = plan.setting.config.trainer.num_steps, _dollars(plan, speed, price)
        lines.append(f"{steps} steps: {dollars:,.0f} dollars at {price} a device and hour")
    return "\n".join(lines)


def _dollars(plan: Plan, speed: placement.Speed, price: float) -> float:
    num_steps = plan.setting.config.trainer.num_steps
    return price * plan.num_devices * num_steps * speed.step_s / 3600


def to_json(plan: Plan, advice: Advice, price: float) -> dict[str, Any]:
    """Returns the plan as JSON holds it, in bytes and seconds."""
    found = {
        "device": dataclasses.asdict(plan.device),
        "num_devices": plan.num_devices,
        "mesh": dict(plan.setting.mesh),
        "pools": {"+".join(roles): dict(s.mesh) for roles, s in plan.pools.items()},
        "peak_bytes": plan.peak,
        "fits": plan.fits,
        "room_bytes": plan.room,
        "programs": {k: vars(parts) | {"total": parts.total} for k, parts in plan.programs.items()},
        "advice": {
            "changes": advice.changes,
            "device": advice.plan.device.name,
            "num_devices": advice.plan.num_devices,
            "peak_bytes": advice.plan.peak,
        },
    }
    if plan.device.flops and plan.job.learns_from_samples:
        speed = placement.speed(plan)
        found["speed"] = dataclasses.asdict(speed)
        if price:
            found["dollars"] = _dollars(plan, speed, price)
    return found


def chart_problems(path: str) -> Iterator[Problem]:
    if not path.endswith(".png"):
        yield "chart", f"{path} must end in .png"
    if not pathlib.Path(path).absolute().parent.is_dir():
        yield "chart", f"{path}: no such folder; make it first"


def save_chart(plan: Plan, path: str) -> None:
    """Writes the plan as a picture: a stacked bar a program, the device's memory a line."""
    # Of the extra [plot], which no other module needs.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    bars = figure.add_subplot()
    names = list(plan.programs)
    below = [0.0] * len(names)
    for part in PARTS:
        heights = [getattr(parts, part) / GIB for parts in plan.programs.values()]
        bars.bar(names, heights, bottom=below, label=part)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    bars.axhline(plan.device.memory_bytes / GIB, color="black", linestyle="--", label="device")
    bars.set_ylabel("GiB on each device")
    bars.set_title(headline(plan), fontsize=9)
    bars.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=150)
