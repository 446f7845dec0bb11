"""Builds a datastore for retrieval from text files: python scripts/build_datastore.py DST FILE [FILE ...]."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

from cli.parser import Parser, refusing

import specjax
from specjax.drafting.datastore import Datastore


def parse(argv) -> argparse.Namespace:
    parser = Parser(description="Builds a datastore that --drafter retrieval --datastore DST searches.")
    parser.add_argument("destination", type=Path, help="folder of the datastore")
    parser.add_argument("files", nargs="+", type=Path, help="texts in UTF-8, one document a file")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model whose tokenizer is used (%(default)s)")
    parser.add_argument("--extend", action="store_true", help="add to the datastore that the folder holds already")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    tokenizer = specjax.load(args.model).tokenizer
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer; choose a --model that has one")
    texts = [tokenizer.encode(path.read_text(encoding="utf-8")) for path in args.files]
    store = Datastore.load(args.destination).extended(texts) if args.extend else Datastore.build(texts)
    store.save(args.destination)
    print(f"{sum(map(len, texts)):,} tokens of {len(texts)} files in {args.destination}")


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
