"""Draws the figures that scripts/benchmark.py --json wrote, and prints its sweep as tables.

python scripts/plot_benchmark.py benchmark.json --png pictures
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

from cli.parser import Parser, refusing

from convert.source import read_json
from specjax import report
from specjax.measure.benchmark import plots, sweep


def parse(argv) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", metavar="FILE", type=Path, help="figures that benchmark.py --json FILE wrote")
    parser.add_argument("--png", metavar="FOLDER", type=Path, help="folder for the charts; this needs matplotlib")
    parser.add_argument("--alphas", type=float, nargs="+", default=plots.ALPHAS, help="acceptance rates of the sweep")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    figures = read_json(args.figures)
    if "rows" not in figures:
        raise ValueError(f"{args.figures} holds no figures of a benchmark: benchmark.py --json FILE writes them")
    if "sweep" in figures:
        print(sweep.markdown(figures["sweep"], args.alphas))
    if args.png:
        for path in report.pngs(plots.charts(figures, args.alphas), args.png):
            print(path)


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
