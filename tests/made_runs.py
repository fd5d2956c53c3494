"""Folders of runs with made-up numbers, in the files that a run writes."""

import json
import math
import random

ANSWERS = ("3+4+2=9", "I add the digits: 3+4=7, 7+2=9. The answer is 9.", "The answer is 8.")


def make(folder, num_steps, samples_per_step, dumps=None, seed=0, more=None):
    """Writes `metrics.jsonl` and `rollouts/`, with tokens in the last dump; returns the folder."""
    random_number = random.Random(seed)
    (folder / "rollouts").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            record = {"step": step, "data": numbers(step, random_number, more)}
            file.write(json.dumps(record) + "\n")
    dumped = list(range(1, num_steps + 1)) if dumps is None else dumps
    for step in dumped:
        rows = [sample(step, row, step == dumped[-1]) for row in range(samples_per_step)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"{step}.jsonl").write_text(text)
    return folder


def numbers(step, random_number, more=None):
    """Returns what a step of a healthy run writes, with a KL that is not finite in step 7."""
    risen = 1 - math.exp(-step / 40)
    noise = random_number.uniform(-0.05, 0.05)
    return {
        "critic/score/mean": risen + noise,
        "actor/ppo_kl": None if step == 7 else 0.002 + abs(noise) / 20,
        "actor/reward_kl_penalty": 0.03 * risen,
        "actor/entropy": 0.2 + 0.8 * math.exp(-step / 60) + noise / 4,
        "response_length/mean": 20 + 6 * risen + 8 * noise,
        "training/rollout_probs_diff_mean": 1e-4 * (1 + noise),
        "actor/grad_norm": 1.5 - risen + 2 * abs(noise),
        "timing_s/step": 2.0 + noise,
        "perf/throughput": 900 + 300 * noise,
        "perf/planned_memory_gb": 2.0,
        "perf/max_cpu_memory_used_gb": 1.8,
        "alerts/kl": float(step in (30, 31)),
        "val-core/sums/mean@4": risen,
        **(more or {}),
    }


def sample(step, row, with_tokens=False):
    """Returns a line of a dump; every third answer is wrong."""
    output = ANSWERS[row % 3]
    found = {
        "input": f"user: 3+4+2=\nassistant: <b>{row}</b>",
        "output": output,
        "gts": "9",
        "score": float(row % 3 != 2),
        "step": step,
        "data_source": "sums" if row % 2 else "stories",
        "num_tokens": len(output.split()),
        "stopped": row % 5 != 0,
        "terms": {"answer": float(row % 3 != 2)},
        "details": {},
    }
    if with_tokens:
        pieces = [f"{word} " for word in output.split()]
        count = len(pieces)
        found |= {
            "pieces": pieces,
            "tokens": list(range(count)),
            "mask": [int(i != 1) for i in range(count)],
            "log_probs": [-0.1 * i for i in range(count)],
            "rollout_log_probs": [-0.1 * i + 0.01 * (-1) ** i for i in range(count)],
            "advantages": [0.5 if row % 3 != 2 else -1.0] * count,
            "versions": [step - 1] * count,
        }
    if row == 1:
        call = {"function": {"name": "calculator", "arguments": {"text": "3+4+2"}}}
        found["messages"] = [
            {"role": "user", "content": "3+4+2="},
            {"role": "assistant", "content": "I ask.", "tool_calls": [call]},
            {"role": "tool", "content": "9"},
        ]
    return found
