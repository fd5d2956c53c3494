"""Simulates decoding with a cache of pages and with a cache that has the longest for each slot.

    python benchmarks/simulate.py --device=v5e --devices=8

Nothing is sampled and no device is needed: responses get log-normal lengths, the engine's own
scheduler decides, and each chunk of steps takes what the planner's figures say (`decode_step` of
`planning.step_time`: operations, bytes and links of a step on a device, and the shares of them
that programs reach). Reading prompts takes what their operations take, again when samples were put
back. Host work is left out.

    longest   slots x longest, as many as fit; a step reads of all slots as much as the longest has
    pages     the same memory; a step of the kernel reads each sequence to its own length

Without `--slots` and `--cache_tokens` they are chosen as an engine does, with the memory beside the
rollout weights alone.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.kv_cache_sizing import page_tokens
from jaxrl_llm.models import flops
from jaxrl_llm.planning import step_time
from jaxrl_llm.planning.accelerators import Device, device_by_name
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import RunSetting
from jaxrl_llm.rollout.engine.compiled_programs import cache_windows, slot_counts
from jaxrl_llm.rollout.engine.device_programs import Outputs
from jaxrl_llm.rollout.engine.page_allocator import CacheLayout, PageAllocator
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.rollout.engine.scheduler import Sample, Scheduler
from jaxrl_llm.sharding.mesh import AXES

_NO_KEY = np.zeros((1, 2), np.uint32)


class Result(NamedTuple):
    """One simulated step of sampling."""

    num_slots: int
    cache_tokens: int
    tokens_per_s: float
    seconds: float
    mean_active: float  # sequences in a decode step
    read_over_live: float  # cached tokens that steps read, over those of active sequences
    put_back: int
    reread_tokens: int


def setting_of(args: argparse.Namespace, device: Device) -> RunSetting:
    """Returns one copy of the weights, its layers split over all devices."""
    values: dict[str, dict[str, Any]] = {
        "model": {"compute_dtype": "bfloat16", "param_dtype": "bfloat16"},
        "algorithm": {"recipe": "grpo", "samples_per_prompt": args.samples},
        "data": {"max_prompt_tokens": args.prompt_tokens},
        "rollout": {
            "max_response_tokens": args.longest,
            "num_slots": args.slots,
            "cache_tokens": args.cache_tokens,
        },
        "trainer": {"prompts_per_step": args.prompts},
        "rewards": {"functions": {"length": {"function": "length"}}},
    }
    mesh = dict.fromkeys(AXES, 1) | {"tensor": args.devices}
    made = RunSetting(from_config_dict(values), SHAPES[args.model], (), mesh, device.backend)
    room = device.memory_bytes - made.rollout_bytes
    return dataclasses.replace(made, memory_bytes=room)


def longest_slots(setting: RunSetting) -> int:
    """Returns how many of the longest sequences fit in the memory that `pages` has."""
    fitting = setting.cache_tokens // setting.config.max_sequence_tokens
    return min(fitting, setting.config.sequences_per_step, setting.config.rollout.num_slots or 256)


def lengths_of(args: argparse.Namespace) -> np.ndarray:
    """Returns the tokens of each response, [prompts, samples]."""
    random = np.random.default_rng(args.seed)
    drawn = np.exp(random.normal(np.log(args.median), args.sigma, (args.prompts, args.samples)))
    return np.clip(drawn, 1, args.longest).astype(int)


class Run:
    """Decodes until all samples have their lengths, on the clock of the planner's figures."""

    def __init__(
        self, setting: RunSetting, device: Device, layout: CacheLayout, chunk: int, window: bool
    ):
        """`window`: whether a step reads of all slots as much as the longest has."""
        self._setting, self._device, self._layout = setting, device, layout
        self._chunk, self._window = chunk, window
        self._windows = cache_windows(layout.max_tokens)
        self._scheduler = Scheduler(str, PageAllocator(layout), chunk)
        self._seconds = 0.0
        self._steps = self._active = self._read = self._live = 0.0

    def play(self, lengths: np.ndarray) -> Result:
        config, scheduler = self._setting.config, self._scheduler
        prompt = tuple(range(config.data.max_prompt_tokens))
        for row in lengths:
            params = tuple(SamplingParams(int(n)) for n in row)
            scheduler.add(Request(prompt, _NO_KEY.repeat(len(row), 0), params))
        read: set[int] = set()
        while scheduler.waiting or scheduler.active:
            scheduler.reserve(self._chunk, preempt=True)
            while entering := scheduler.schedule():
                self._enter(entering, read)
            scheduler.reserve(self._chunk, preempt=True)
            self._decode()
        return Result(
            self._layout.num_slots,
            self._layout.num_pages * self._layout.page_tokens,
            lengths.sum() / self._seconds,
            self._seconds,
            self._active / self._steps,
            self._read / self._live,
            scheduler.num_preempted,
            scheduler.recomputed_tokens,
        )

    def _enter(self, entering: list[Sample], read: set[int]) -> None:
        prompts = {sample.request for sample in entering if sample.needs_full_prefill} - read
        read |= prompts
        again = [s.num_tokens - s.num_cached_tokens for s in entering if not s.needs_full_prefill]
        self._prefill([len(entering[0].prompt)] * len(prompts) + again)
        left = [s.max_tokens - s.num_tokens - 1 for s in entering]
        self._scheduler.record_inserted(entering, _sampled(np.ones((1, len(entering)), bool), left))

    def _prefill(self, lengths: list[int]) -> None:
        if lengths:
            work = flops.forward(self._setting.policy, np.array(lengths), 1)
            reached = self._device.flops * step_time.EFFICIENCY["flops"]
            self._seconds += work / self._setting.num_devices / reached

    def _decode(self) -> None:
        """Decodes a chunk, which ends early where a sixteenth of the slots is free for others."""
        scheduler = self._scheduler
        num_active = len(scheduler.active)
        counts = slot_counts(self._layout.num_slots)
        num_slots = min(n for n in counts if n >= num_active)
        scheduler.compact(num_slots)
        scheduler.stale_slots()
        left = np.zeros(num_slots, int)
        held = np.zeros(num_slots, int)
        for slot, sample in scheduler.active.items():
            left[slot], held[slot] = sample.max_tokens - sample.num_tokens, sample.num_tokens - 1
        steps = min(self._chunk, int(left.max()))
        if scheduler.waiting:
            enough = num_slots - num_active + max(1, num_slots // 16)
            free_at = np.sort(left)[min(enough, num_slots) - 1]  # so many are free then
            steps = min(steps, max(1, int(free_at)))
        page, recent = self._layout.page_tokens, num_slots * self._chunk
        if self._window:
            cached = num_slots * next(n for n in self._windows if n >= held.max())
        else:
            cached = int((-(-held // page) * page).sum())
        given = np.arange(steps)[:, None] < left
        read = cached + recent  # of each step: there is room for a whole chunk
        cost = step_time.decode_step(self._setting, self._device, num_slots, read)
        self._seconds += steps * cost.seconds
        self._steps += steps
        self._active += int(given.sum())
        self._read += steps * read
        self._live += int(((held + np.arange(steps)[:, None]) * given).sum())
        scheduler.record_generated(_sampled(given, np.maximum(left - steps, 0).tolist()))
        scheduler.progress()


def _sampled(given: np.ndarray, left: list[int]) -> Outputs:
    """Returns what a program gives that sampled where it is said."""
    tokens, none = np.where(given, 1, -1), np.zeros((*given.shape, 0), int)
    on_host: Any = tokens, tokens * 0.0, none, none * 0.0, none, none, np.array(left)
    return Outputs(*on_host)


def simulate(args: argparse.Namespace) -> dict[str, Result]:
    """Returns what each cache does with the same responses."""
    device = device_by_name(args.device)
    setting, lengths = setting_of(args, device), lengths_of(args)
    longest, page = setting.config.max_sequence_tokens, page_tokens(device.backend)
    slots = longest_slots(setting)
    dense = CacheLayout(slots, longest, longest, slots)
    paged = CacheLayout(setting.cache_tokens // page, page, longest, setting.num_slots)
    return {
        "longest": Run(setting, device, dense, args.chunk_steps, True).play(lengths),
        "pages": Run(setting, device, paged, args.chunk_steps, False).play(lengths),
    }


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options; the model's layers are split over all `--devices`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Llama-3.1-8B", choices=[*SHAPES])
    parser.add_argument("--device", default="v5e")
    for name, default in (
        ("devices", 8),
        ("prompts", 64),
        ("samples", 16),
        ("prompt_tokens", 512),
        ("median", 1000),
        ("longest", 8192),
        ("slots", 0),
        ("cache_tokens", 0),
        ("chunk_steps", 16),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sigma", type=float, default=1.0)
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    found = simulate(args)
    print(
        f"{args.model} on {args.devices} x {args.device}, {args.prompts} x {args.samples} samples"
    )
    print(
        "| cache | slots | tokens held | tokens/s | decoding at a time | read / live | put back |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, r in found.items():
        print(
            f"| {name} | {r.num_slots} | {r.cache_tokens} | {r.tokens_per_s:.0f}"
            f" | {r.mean_active:.1f} | {r.read_over_live:.2f} | {r.put_back} |"
        )
    print(f"ratio {found['pages'].tokens_per_s / found['longest'].tokens_per_s:.2f}")


if __name__ == "__main__":
    main()
