"""Where the cost goes: MACs of every layer in the order of the forward pass, before and after pruning."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from apoptosis.comparison import Comparison
from apoptosis.report.style import COLORS, INK, PALE, new_figure, save, tidy

__all__ = ["plot_layer_costs"]

MOST_PANELS = 4
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


def plot_layer_costs(
    comparison: Comparison,
    path: Path,
    contestants: Sequence[str] | None = None,
    budget: float | None = None,
) -> Path:
    """Draw layers of the dense network in grey and what is left of them in colour, means over seeds, as a PNG.

    Args:
        comparison: what was measured.
        path: the file.
        contestants: whose networks; the first that was asked for, the best on validation data and the baselines unless
            said.
        budget: of which budget; the smallest unless said.
    """
    names = list(contestants or comparison.notable()[:MOST_PANELS])
    budget = comparison.budgets[-1] if budget is None else budget
    layers = list(comparison.dense[0].layer_macs)
    dense = [mean(d.layer_macs[layer] for d in comparison.dense) for layer in layers]
    factor, unit = next((f, u) for f, u in UNITS if max(dense, default=0) >= f or f == 1)
    figure = new_figure(1.7 + 2.9 * len(names), 1.6 + 0.27 * max(len(layers), 4))
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name, color in zip(panels, names, COLORS, strict=False):
        trials = comparison.of(name, budget)
        left = [mean(trial.layer_macs[layer] for trial in trials) for layer in layers]
        places = range(len(layers))
        axes.barh(places, [value / factor for value in dense], height=0.78, color=PALE)
        axes.barh(places, [value / factor for value in left], height=0.44, color=color)
        for place, (whole, part) in enumerate(zip(dense, left, strict=True)):
            share = f"{part / whole:.0%}" if whole else "–"
            axes.annotate(
                share,
                (1.0, place),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="center",
                fontsize=8,
                color=color,
            )
        axes.set_title(
            f"{name}\n{mean(t.got for t in trials):.1%} of all MACs",
            loc="left",
            fontsize=10,
            color=color,
            weight="bold",
        )
        axes.set_xlim(0, 1.22 * max(dense, default=1) / factor)
        axes.set_xlabel(f"{unit}MACs", color=INK)
        axes.set_yticks(places, [layer or "(the model itself)" for layer in layers])
        tidy(axes, "x")
    panels[0].set_ylim(len(layers) - 0.4, -0.6)
    figure.suptitle(
        f"MACs of each layer: dense in grey, kept in colour ({budget:.0%} asked)",
        x=0.01,
        ha="left",
        weight="bold",
        fontsize=11,
        color=INK,
    )
    return save(figure, path)
