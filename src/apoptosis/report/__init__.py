"""Plots and tables made from records. The only room that draws; it measures nothing itself."""

from apoptosis.report.accuracy import plot_accuracy_against_cost
from apoptosis.report.layers import plot_layer_costs
from apoptosis.report.ranking import Agreement, RankingReport, plot_ranking
from apoptosis.report.tables import (
    conditions,
    csv_text,
    markdown_text,
    table_cells,
    write_comparison,
)

__all__ = [
    "Agreement",
    "RankingReport",
    "conditions",
    "csv_text",
    "markdown_text",
    "plot_accuracy_against_cost",
    "plot_layer_costs",
    "plot_ranking",
    "table_cells",
    "write_comparison",
]
