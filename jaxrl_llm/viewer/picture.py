"""A still picture of the curves; needs matplotlib."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.viewer.runs import Run, chosen_curves

_COLUMNS = 3


def save(runs: Sequence[Run], path: str) -> None:
    """Writes the curves that the page shows first to a PNG file."""
    from matplotlib.figure import Figure

    curves = chosen_curves(runs)
    rows = max(1, -(-len(curves) // _COLUMNS))
    figure = Figure(figsize=(4.2 * _COLUMNS, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    for axes, (title, name) in zip(grid, curves, strict=False):
        for run in runs:
            steps, values = run.curve(name)
            known = [np.nan if value is None else value for value in values]
            axes.plot(steps, known, label=_plain(run.name), linewidth=1.2)
        axes.set_title(_plain(title), fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    for axes in list(figure.axes)[len(curves) :]:
        axes.set_axis_off()
    if curves:
        figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _plain(text: str) -> str:
    """A text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")
