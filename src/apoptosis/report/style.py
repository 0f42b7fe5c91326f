"""What all pictures have in common: colours, light axes, files written whole, and no display."""

from pathlib import Path
from typing import TYPE_CHECKING

from apoptosis.checkpoint import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "GRID", "INK", "MARKERS", "PALE", "QUIET", "new_figure", "save", "tidy"]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""That colour-blind readers can tell apart (Okabe and Ito)."""
MARKERS = "osD^vPX"
"""Beside colours, for printing in grey."""
INK, QUIET, PALE, GRID = "#333333", "#8a8a8a", "#d4d4d4", "#e6e6e6"


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches."""
    # Here and without pyplot: drawing needs no display, and whoever draws nothing does not wait for matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: "Axes", grid: str) -> None:
    """Light axes with lines along `grid`, and no frame."""
    axes.grid(visible=False)
    axes.grid(axis=grid, color=GRID, linewidth=0.8, zorder=0)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)


def save(figure: "Figure", path: Path) -> Path:
    """As a PNG."""
    return write_file(path, lambda file: figure.savefig(file, dpi=150, format="png"))
