"""Makes one HTML page from the record of a run: where each token came from, and where the time went.

python scripts/generate.py --profile --json run.json && python scripts/report.py run.json
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

from cli.parser import Parser, refusing

from specjax import report
from specjax.report import record


def parse(argv) -> argparse.Namespace:
    parser = Parser(description="Makes one self-contained HTML page from the record of a run.")
    parser.add_argument("record", metavar="RUN.json", type=Path, help="record that generate.py --json RUN.json wrote")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file of the page (RUN.html)")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write each chart to this folder as a PNG")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    output = args.output or args.record.with_suffix(".html")
    found = record.load(args.record)
    output.write_text(report.page(found), encoding="utf-8")
    print(output)
    if args.png:
        for path in report.pngs(report.charts(found), args.png):
            print(path)


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
