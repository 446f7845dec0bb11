"""A chart: its description, and how it is saved: as SVG for the page, or as a file, SVG or PNG.

In the SVG the colours are CSS variables of the page.
"""

import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The colours of the charts by name. In the page's SVG a CSS variable of the same name replaces each colour, and the
# style sheet gives the variable a value for light and one for dark. The colours differ for colour-blind eyes (after
# Okabe and Ito), and their contrast with either background is at least 3 to 1.
COLOURS = {
    "accepted": "#0072b2",
    "correction": "#c44f00",
    "bonus": "#00805c",
    "plain": "#6b7280",
    "draft": "#a8488a",
    "wide": "#7a5c00",
    "ink": "#1f2328",
    "faint": "#d0d7de",
    "back": "#ffffff",
}


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart and its text alternative.

    Args:
      name: the name of its file, without an ending.
      title: the title.
      text: a description in words, for readers who do not see the chart.
      header: the column names of the table of its numbers.
      rows: the rows of that table.
      size: the width and the height in inches.
      draw: a function that draws the chart on a matplotlib Axes.
    """

    name: str
    title: str
    text: str
    header: tuple[str, ...]
    rows: list[tuple]
    size: tuple[float, float]
    draw: Callable


def svg(chart: Chart) -> str:
    """The chart as an inline SVG that scales, with a title and a description, in the page's colours."""
    text = io.StringIO()
    _save(chart, text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    body = text.getvalue()
    body = re.sub(r"<metadata>.*?</metadata>", "", body[body.index("<svg") :], flags=re.DOTALL)
    body = re.sub(
        r'(\bid="|href="#|url\(#)', rf"\g<1>{chart.name}-", body
    )  # ids must be unique in the page, which holds several charts
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    width, height = (round(96 * inches) for inches in chart.size)
    head = (
        f'<svg viewBox="0 0 {72 * chart.size[0]:g} {72 * chart.size[1]:g}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="{chart.name}-title {chart.name}-text" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{chart.name}-title">{chart.title}</title><desc id="{chart.name}-text">{chart.text}</desc>'
    )
    return head + body[body.index(">") + 1 :]


def svg_file(chart: Chart, path) -> None:
    """Writes the chart as an SVG file, on white."""
    _save(chart, path, format="svg", facecolor=COLOURS["back"], metadata={"Title": chart.title, "Date": None})


def png(chart: Chart, path) -> None:
    """Writes the chart as a PNG file, on white."""
    _save(chart, path, format="png", dpi=160, facecolor=COLOURS["back"])


def pngs(pictures: Sequence[Chart], folder: Path) -> list[Path]:
    """Writes each chart into the folder as a PNG file. The folder is made if it does not exist. -> the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{picture.name}.png" for picture in pictures]
    for picture, path in zip(pictures, paths, strict=True):
        png(picture, path)
    return paths


def _save(chart: Chart, target, **how) -> None:
    """Draws the chart in the report's style, and saves it to a file or a buffer. ``how`` are options of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "specjax",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": COLOURS["ink"],
        "axes.labelcolor": COLOURS["ink"],
        "text.color": COLOURS["ink"],
        "xtick.color": COLOURS["ink"],
        "ytick.color": COLOURS["ink"],
        "grid.color": COLOURS["faint"],
        "legend.frameon": False,
        "legend.fontsize": 9,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=chart.size, layout="constrained")
        axes = figure.subplots()
        axes.set_axisbelow(True)
        chart.draw(axes)
        figure.savefig(target, **how)


def whole_numbers(axis) -> None:
    """Puts ticks of the axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
