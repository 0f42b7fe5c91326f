"""Plots and files made from records. The only room that draws; it measures nothing itself."""

from apoptosis.report.files import write_file, write_json
from apoptosis.report.ranking import Agreement, RankingReport, plot_ranking

__all__ = ["Agreement", "RankingReport", "plot_ranking", "write_file", "write_json"]
