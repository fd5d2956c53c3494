"""The curves as a PNG file; needs matplotlib."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.viewer.runs import RecordedRun, default_curves

_COLUMNS = 3


def save_curves(runs: Sequence[RecordedRun], path: str) -> None:
    """Writes the default curves of the web page to a PNG file."""
    from matplotlib.figure import Figure

    curves = default_curves(runs)
    rows = max(1, -(-len(curves) // _COLUMNS))
    figure = Figure(figsize=(4.2 * _COLUMNS, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    for axes, (title, name) in zip(grid, curves, strict=False):
        for run in runs:
            steps, values = run.curve(name)
            plotted = [np.nan if value is None else value for value in values]
            axes.plot(steps, plotted, label=_escaped(run.name), linewidth=1.2)
        axes.set_title(_escaped(title), fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    for axes in list(figure.axes)[len(curves) :]:
        axes.set_axis_off()
    if curves:
        figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _escaped(text: str) -> str:
    """`text` with `$` escaped, which matplotlib reads as math mode."""
    return text.replace("$", r"\$")
