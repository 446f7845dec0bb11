"""Charts of a benchmark's JSON file: how near each call is to its floor, and the sweep over B and K."""

from collections.abc import Sequence
from typing import Any

from specjax.measure.benchmark.sweep import axes as axes_of
from specjax.measure.benchmark.sweep import speedup
from specjax.report.drawing import COLOURS, Chart

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def charts(found: dict[str, Any], alphas: Sequence[float] = ALPHAS) -> list[Chart]:
    """All charts that the file has figures for.

    Args:
      found: the content of the file.
      alphas: the acceptance rates for which the sweep's speedups are drawn.
    """
    rows = [row for row in found["rows"] if row["floor_ms"] and not row["name"].startswith("sweep")]
    pictures = [_bandwidth(rows, found["bandwidth"]["read"])] if rows else []
    if "sweep" in found:
        pictures += [_speedups(found["sweep"], alphas), _times(found["sweep"])]
    return pictures


def _bandwidth(rows: list[dict[str, Any]], read: float) -> Chart:
    shares = [row["floor_ms"] / row["ms"] for row in rows]

    def draw(axes) -> None:
        place = range(len(rows))[::-1]
        colours = [COLOURS["accepted" if "specjax_times" not in row else "plain"] for row in rows]
        axes.barh(place, shares, 0.7, color=colours)
        for height, share, row in zip(place, shares, rows, strict=True):
            axes.text(share + 0.01, height, f"{share:.0%}  {row['ms']:.3g} ms", va="center", fontsize=8)
        axes.axvline(1, color=COLOURS["ink"], linewidth=1, linestyle="--")
        axes.set_yticks(place, [row["name"] for row in rows], fontsize=8)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlim(0, max(1.15, max(shares) + 0.2))
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"floor over measured time: the share of the read bandwidth of {read / 1e12:.2f} TB/s")

    return Chart(
        "bandwidth",
        "How near each call is to reading its weights once",
        "Each call's floor over its time: " + ", ".join(
            f"{row['name']} {share:.0%}" for row, share in zip(rows, shares, strict=True)
        ) + ".",
        ("call", "ms", "floor, ms", "share of read bandwidth"),
        [
            (row["name"], f"{row['ms']:.3f}", f"{row['floor_ms']:.3f}", f"{share:.3f}")
            for row, share in zip(rows, shares, strict=True)
        ],
        (8.4, 0.9 + 0.24 * len(rows)),
        draw,
    )  # fmt: skip


def _speedups(found: dict[str, Any], alphas: Sequence[float]) -> Chart:
    batches, sizes = axes_of(found)
    grids = {alpha: [[speedup(found, b, k, alpha) for k in sizes] for b in batches] for alpha in alphas}
    values = [value for grid in grids.values() for row in grid for value in row]
    columns = min(3, len(alphas))
    lines = -(-len(alphas) // columns)

    def draw(axes) -> None:
        import matplotlib.pyplot as plt
        from matplotlib.colors import TwoSlopeNorm

        figure = axes.figure
        axes.remove()
        norm = TwoSlopeNorm(1.0, min(0.5, *values), max(1.5, *values))
        panels = list(figure.subplots(lines, columns, squeeze=False).flat)
        for panel in panels[len(alphas) :]:
            panel.remove()
        for panel, (alpha, grid) in zip(panels, grids.items(), strict=False):
            panel.imshow(grid, cmap=plt.get_cmap("PuOr"), norm=norm, aspect="auto")
            for i, row in enumerate(grid):
                for j, value in enumerate(row):
                    dark = abs(norm(value) - 0.5) > 0.3
                    weight = "bold" if value == max(row) else "normal"
                    colour = COLOURS["back" if dark else "ink"]
                    panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour, weight=weight)
            panel.set_title(f"alpha = {alpha:g}", fontsize=9)
            panel.set_xticks(range(len(sizes)), sizes)
            panel.set_yticks(range(len(batches)), batches)
            panel.set_xlabel("K")
            panel.set_ylabel("B")
            panel.tick_params(length=0)

    return Chart(
        "sweep-speedup",
        "Speedup over plain decoding at the same batch size",
        "The speedup follows from theorem 3.8 with the measured times of each (B, K): the expected tokens of a round, "
        "times the time of a plain step, over the time of a round. The best K of each batch size is bold.",
        ("alpha", "B", *(f"K = {size}" for size in sizes)),
        [
            (alpha, batch, *(f"{value:.2f}" for value in row))
            for alpha, grid in grids.items()
            for batch, row in zip(batches, grid, strict=True)
        ],
        (1.2 + columns * (0.9 + 0.3 * len(sizes)), lines * (1.0 + 0.27 * len(batches))),
        draw,
    )


def _times(found: dict[str, Any]) -> Chart:
    batches, sizes = axes_of(found)
    seconds = {(p["batch"], p["size"]): p["seconds"] for p in found["points"]}
    lines = {f"K = {size}": [seconds[batch, size] * 1e3 for batch in batches] for size in sizes}
    lines["plain"] = [found["plain"][str(batch)] * 1e3 for batch in batches]

    def draw(axes) -> None:
        import matplotlib.pyplot as plt

        for i, (name, times) in enumerate(lines.items()):
            colour = COLOURS["ink"] if name == "plain" else plt.get_cmap("viridis")(0.9 * i / max(1, len(sizes) - 1))
            axes.plot(batches, times, ".-" if name != "plain" else ".--", color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, batches)
        axes.minorticks_off()
        axes.set_xlabel("B")
        axes.set_ylabel("round (ms)")
        axes.set_ylim(0)
        axes.grid(axis="y")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return Chart(
        "sweep-times",
        "Time of a round by batch size",
        f"From B = {batches[0]} to B = {batches[-1]}: "
        + ", ".join(f"{name} {times[0]:.2f} to {times[-1]:.2f} ms" for name, times in lines.items())
        + ".",
        ("", *(f"B = {batch}" for batch in batches)),
        [(name, *(f"{time:.2f}" for time in times)) for name, times in lines.items()],
        (6.2, 3.6),
        draw,
    )
