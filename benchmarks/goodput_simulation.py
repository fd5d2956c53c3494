"""Simulates the goodput of long runs on many chips, with one, two and three tiers of saved state.

    python benchmarks/goodput_simulation.py                    # prints a table
    python benchmarks/goodput_simulation.py --step_s=12 --restart_s=300

Tiers: 1, durable checkpoints; 2, also copies in the memory of each host, which a crashed process
finds again; 3, also copies on a partner's host, which outlive a host (`checkpoint.memory_every`).

Failures are those of Llama 3's pre-training (arXiv:2407.21783, Sec. 3.3.4 and Table 5): 419
unexpected interruptions in 54 days on 16,384 GPUs, 78 % of them by hardware, which is taken as the
loss of a host's memory. The trace with bursts
has as many failures, but a third of them follow another within ten minutes, on the same or another
host. The seconds of the parts are arguments: take them from
`goodput.jsonl` of a run like yours.
"""

import argparse
import dataclasses
import math
import random
from collections.abc import Iterator

FAILURES_PER_CHIP_HOUR = 419 / (54 * 24 * 16_384)
HOST_LOST = 0.78  # share of failures
TIERS = {1: "durable", 2: "+ memory", 3: "+ partner"}


@dataclasses.dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a run."""

    step: float = 30.0
    restart: float = 120.0  # until all processes have started, without reading the state
    notice: float = 30.0  # until a dead process is noticed
    save: float = 10.0  # that the loop waits for a durable save
    save_behind: float = 120.0  # until it is complete
    read: float = 120.0  # of a durable checkpoint
    copy: float = 0.3  # that the loop waits for a copy in memory, after each step
    read_memory: float = 10.0
    read_partner: float = 30.0


@dataclasses.dataclass(frozen=True)
class Failure:
    at: float  # seconds since the begin
    loses_host: bool
    loses_partner: bool  # before another copy was made


def failures(
    num_chips: int, seconds: float, parts: Parts, seed: int, bursts: bool, chips_per_host: int = 8
) -> Iterator[Failure]:
    """Failures at the published rate; with `bursts` a third of them follow another at once."""
    draw = random.Random(seed)
    rate = FAILURES_PER_CHIP_HOUR / 3600 * num_chips / (1.5 if bursts else 1)
    num_hosts = num_chips // chips_per_host
    # Until the replacement has its own copies again, one host holds the only one.
    alone_s = parts.notice + parts.restart + parts.read_partner + 2 * parts.step
    partner = rate * alone_s / num_hosts * HOST_LOST
    now = draw.expovariate(rate)
    while now < seconds:
        yield Failure(now, draw.random() < HOST_LOST, draw.random() < partner)
        if bursts and draw.random() < 0.5:
            echo = now + draw.uniform(0, 600)
            loses_host = draw.random() < HOST_LOST
            yield Failure(echo, loses_host, loses_host and draw.random() < 1 / num_hosts)
        now += draw.expovariate(rate)


def best_interval(cost_s: float, failures_per_s: float, parts: Parts) -> int:
    """Steps between saves that cost `cost_s`, of least waiting and loss (Young 1974, Eq. 3)."""
    return max(1, round(math.sqrt(2 * cost_s / failures_per_s) / parts.step))


def intervals(num_chips: int, tiers: int, parts: Parts) -> tuple[int, int]:
    """Steps between durable saves, and between copies in memory (0: none).

    Durable saves count only for the failures from which copies do not help.
    """
    rate = FAILURES_PER_CHIP_HOUR / 3600 * num_chips
    needed = {1: 1.0, 2: HOST_LOST, 3: 0.01}[tiers]
    one_at_a_time = math.ceil(parts.save_behind / parts.step)
    durable = max(one_at_a_time, best_interval(parts.save, rate * needed, parts))
    return durable, best_interval(parts.copy, rate, parts) if tiers > 1 else 0


def goodput(
    num_chips: int, tiers: int, days: float, parts: Parts, seed: int, bursts: bool
) -> float:
    """The share of time in steps that counted, without waits for saves and copies."""
    seconds, (every, copy_every) = days * 86_400, intervals(num_chips, tiers, parts)
    due = sorted(failures(num_chips, seconds, parts, seed, bursts), key=lambda f: f.at)
    now, step, durable, copied, pending = 0.0, 0, 0, 0, (math.inf, 0)
    index = 0
    while now < seconds:
        end = now + parts.step
        copies = copy_every > 0 and (step + 1) % copy_every == 0
        end += parts.copy if copies else 0.0
        saves = (step + 1) % every == 0
        end += parts.save if saves else 0.0
        if index < len(due) and due[index].at < end:
            failure, index = due[index], index + 1
            failed_at = max(now, failure.at)
            if pending[0] <= failed_at:
                durable, pending = pending[1], (math.inf, 0)
            in_memory = tiers > 1 and not failure.loses_host
            with_partner = tiers > 2 and not failure.loses_partner
            if (in_memory or with_partner) and copied > durable:
                step, read = copied, parts.read_memory if in_memory else parts.read_partner
            else:
                step, read = durable, parts.read
            copied, pending = step, (math.inf, 0)
            now = failed_at + parts.notice + parts.restart + read
            continue
        now, step = end, step + 1
        copied = step if copies else copied
        if pending[0] <= now:
            durable, pending = pending[1], (math.inf, 0)
        if saves:
            pending = (now + parts.save_behind, step)
    return step * parts.step / now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for field in dataclasses.fields(Parts):
        parser.add_argument(f"--{field.name}_s", type=float, default=field.default)
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    parts = Parts(**{f.name: getattr(arguments, f"{f.name}_s") for f in dataclasses.fields(Parts)})
    print(parts)
    for bursts in (False, True):
        print(f"\n{'with bursts' if bursts else 'one by one':>12}", *TIERS.values(), sep="  ")
        for num_chips in (512, 4096, 16_384):
            cells = []
            for tiers in TIERS:
                runs = [
                    goodput(num_chips, tiers, arguments.days, parts, seed, bursts)
                    for seed in range(arguments.seeds)
                ]
                cells.append(f"{sum(runs) / len(runs):.3f}")
            print(f"{num_chips:>12}", *(f"{cell:>9}" for cell in cells))


if __name__ == "__main__":
    main()
