"""A run's record as one HTML page and pictures: where its tokens came from, where its time went."""

from specjax.report.analysis import Speedup, positions, speedup
from specjax.report.charts import Chart, charts, png, pngs
from specjax.report.page import page

__all__ = ["Chart", "Speedup", "charts", "page", "png", "pngs", "positions", "speedup"]
