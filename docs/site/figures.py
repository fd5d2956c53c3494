"""Draws the figures of the documents from the metrics of runs: `python docs/site/figures.py RUNS`.

RUNS is a folder with the runs `grpo_tiny`, `rate_too_high` and `ppo_tiny`:

    python launch/train.py --config=configs/grpo_tiny.py --workdir=RUNS/grpo_tiny \\
        --config.metrics.rollout_tokens=True
    python launch/train.py --config=configs/grpo_tiny.py --workdir=RUNS/rate_too_high \\
        --config.trainer.optimizer.learning_rate=2e-2 --config.trainer.num_steps=20
    python launch/train.py --config=configs/ppo_tiny.py --workdir=RUNS/ppo_tiny \\
        --config.trainer.num_steps=20
"""

import json
import pathlib
import sys
from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot as plt

IMAGES = pathlib.Path(__file__).parents[1] / "images"
HELD_OUT = "val-core/arithmetic/mean@4"


def series(folder: pathlib.Path, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of a metric of a run; what was not finite is left out."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [(row["step"], row["data"].get(name)) for row in map(json.loads, lines)]
    found = [(step, value) for step, value in rows if value is not None]
    return [step for step, _ in found], [value for _, value in found]


def figures(runs: pathlib.Path) -> Iterator[str]:
    """Draws each figure and yields its name."""
    good, bad, ppo = runs / "grpo_tiny", runs / "rate_too_high", runs / "ppo_tiny"

    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot(*series(good, "critic/score/mean"), label="score of the samples", linewidth=1)
    axes.plot(*series(good, HELD_OUT), "o-", label="held-out accuracy")
    axes.set(xlabel="step", title="configs/grpo_tiny.py, seed 0", ylim=(0, 1))
    axes.legend()
    yield save(figure, "run_score")

    figure, panels = plt.subplots(1, 3, figsize=(10, 3))
    for axes, (name, title) in zip(panels, (
        ("critic/score/mean", "score"), ("actor/ppo_kl", "KL within a step"),
        ("actor/entropy", "entropy, nats"),
    ), strict=True):  # fmt: skip
        for folder, label in ((good, "learning rate 3e-4"), (bad, "learning rate 2e-2")):
            steps, values = series(folder, name)
            axes.plot(steps[:20], values[:20], label=label)
        axes.set(title=title, xlabel="step")
    panels[1].set_yscale("symlog", linthresh=1e-3)
    panels[0].legend(fontsize="small")
    yield save(figure, "rate_too_high")

    figure, panels = plt.subplots(1, 3, figsize=(10, 3))
    for axes, (name, title) in zip(panels, (
        ("training/groups/uniform_share", "groups with equal scores"),
        ("actor/entropy", "entropy, nats"), ("actor/kl_loss", "KL to the reference"),
    ), strict=True):  # fmt: skip
        axes.plot(*series(good, name))
        axes.set(title=title, xlabel="step")
    yield save(figure, "run_health")

    figure, panels = plt.subplots(1, 3, figsize=(10, 3))
    for axes, (name, title) in zip(panels, (
        ("critic/score/mean", "score"), ("critic/vf_loss", "loss of the critic"),
        ("critic/vf_explained_var", "explained variance"),
    ), strict=True):  # fmt: skip
        axes.plot(*series(ppo, name))
        axes.set(title=title, xlabel="step")
    yield save(figure, "run_critic")


def save(figure: plt.Figure, name: str) -> str:
    """Writes a figure to docs/images."""
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.png", dpi=90)
    plt.close(figure)
    return name


if __name__ == "__main__":
    matplotlib.use("Agg")
    print(*figures(pathlib.Path(sys.argv[1])))
