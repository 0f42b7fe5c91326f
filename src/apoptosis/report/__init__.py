"""Plots and tables made from records. The only room that draws; it measures nothing itself."""

from apoptosis.report.ranking import Agreement, RankingReport, plot_ranking

__all__ = ["Agreement", "RankingReport", "plot_ranking"]
