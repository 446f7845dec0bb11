"""Converts a model to specjax's own format.

python scripts/convert.py SRC DST [--dtype float32|bfloat16|float16] [--quantize int8|fp8]
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
from cli.parser import Parser, refusing

from convert import checkpoint
from convert.source import open_source
from specjax.checkpoints.load import locate
from specjax.models import families, parallel
from specjax.models.quantized import KINDS


def parse(argv) -> argparse.Namespace:
    parser = Parser(description="Converts a model to a folder that specjax.load reads.")
    parser.add_argument("source", help="Hugging Face folder, GGUF file, specjax folder, or hub name org/name")
    parser.add_argument("destination", type=Path, help="a new folder, or an empty one")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of the weights; by default the checkpoint's"
    )
    parser.add_argument("--quantize", choices=list(KINDS), help="store matrices in eight bits, one scale a channel")
    return parser.parse_args(argv)


def convert(source: str, destination: Path, dtype: str | None, quantize: str | None) -> None:
    """Reads ``source`` and writes the folder ``destination``, which must be new or empty."""
    started = time.monotonic()
    jax.config.update("jax_platforms", "cpu")  # a conversion computes nothing that needs a GPU
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} exists already; choose another place or remove it")
    path = locate(source)
    print(f"reading {path}", flush=True)
    if checkpoint.is_checkpoint(path):
        config, params, tokenizer = checkpoint.restore(path, dtype, quantize)
    else:
        opened = open_source(path)
        config, tokenizer = opened.config, opened.tokenizer
        params = opened.fill(dtype, parallel.placement(config, quantize=quantize), label="reading")
    if tokenizer is None:
        print(f"warning: {source} has no tokenizer; the model will take token ids only", file=sys.stderr)
    print(f"writing {destination}", flush=True)
    checkpoint.save(destination, config, params, tokenizer)
    count = sum(leaf.size for leaf in jax.tree.leaves(families.structure(config)[1]))
    head = checkpoint.read_head(destination)
    kind = f"{head.dtype} and {head.quantized}" if head.quantized else head.dtype
    print(f"{count:,} parameters, {kind}, in {time.monotonic() - started:.1f} s")


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: convert(**vars(parse(argv))))


if __name__ == "__main__":
    sys.exit(main())
