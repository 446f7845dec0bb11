"""Shows the record of a run as one HTML page and as charts: where its tokens came from, and where its time went."""

from specjax.report.analysis import Speedup, positions, speedup
from specjax.report.charts import charts
from specjax.report.drawing import Chart, png, pngs
from specjax.report.page import page

__all__ = ["Chart", "Speedup", "charts", "page", "png", "pngs", "positions", "speedup"]
