"""Serves a model to any client of OpenAI's interface, with speculative decoding.

python scripts/serve.py
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

from cli import distributed_flags, engine_flags, model_flags
from cli.parser import Parser, refusing

from specjax.generation.compilation import compilation_cache_of_script
from specjax.report import progress

LOCAL = ("127.0.0.1", "localhost", "::1")


def _parser() -> Parser:
    parser = Parser(description="Serves a Llama-family model over HTTP, as OpenAI's clients expect it.")
    add = parser.add_argument
    model_flags.add_all(parser)
    engine_flags.add_sizes(add)
    add("--max-waiting", type=int, default=1024, help="requests that may wait for a slot (%(default)s)")
    add("--also", nargs="+", default=[], metavar="DRAFTER", help="also serve the model with other drafters, each as "
        "NAME:DRAFTER, for the page at / to choose and to compare with; none drafts nothing. All share the weights, "
        "and each has caches of its own")  # fmt: skip
    add("--host", default=LOCAL[0], help="the address to listen at; 0.0.0.0 is every one (%(default)s)")
    add("--port", type=int, default=8000, help="the port to listen at; 0 is a free one (%(default)s)")
    add("--api-key", action="append", default=[], metavar="KEY", help="a key that lets clients in; may be repeated. "
        "The variable SPECJAX_API_KEY adds one. Without any key everybody is let in")  # fmt: skip
    add("--api-key-file", type=Path, metavar="FILE", help="a file with one key a line")
    add("--served-model-name", nargs="+", metavar="NAME", help="how clients call the model (default: as --model does)")
    add("--shutdown-timeout", type=float, default=30, metavar="SECONDS", help="how long running answers may go on "
        "after SIGTERM (%(default)s)")  # fmt: skip
    return parser


def parse(argv) -> argparse.Namespace:
    """The settled arguments. If they can't be used, the process ends with one sentence."""
    parser = _parser()
    args = parser.parse_args(argv)
    parser.at_least_one(args, "slots", "capacity", "kv_tokens", "max_waiting", "devices")
    if not 0 <= args.port < 1 << 16:
        parser.error(f"--port must be from 0 to 65535, got {args.port}")
    if not args.shutdown_timeout >= 0:
        parser.error(f"--shutdown-timeout must be at least 0 seconds, got {args.shutdown_timeout}")
    try:
        model_flags.settle(args)
        args.also = {name: model_flags.with_drafter(args, name) for name in args.also}
        args.keys = keys(args)
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    return args


def keys(args: argparse.Namespace) -> list[str]:
    """The keys of the flags, of the file and of the environment.

    Raises:
      ValueError: a key is empty, or a file has none.
      OSError: the file can't be read.
    """
    found = list(args.api_key)
    if args.api_key_file:
        lines = [line.strip() for line in args.api_key_file.read_text(encoding="utf-8").splitlines()]
        if not any(lines):
            raise ValueError(f"--api-key-file {args.api_key_file} holds no key")
        found += [line for line in lines if line]
    found += [os.environ["SPECJAX_API_KEY"]] if "SPECJAX_API_KEY" in os.environ else []
    if not all(key.strip() for key in found):
        raise ValueError("--api-key and SPECJAX_API_KEY must not be empty: an empty key would lock everybody out")
    return found


def run(args: argparse.Namespace) -> None:
    """Serves until a signal ends the server."""
    from specjax.server.lifetime import serve  # imported here, so that a missing extra is told in one sentence
    from specjax.server.service import Service

    compilation_cache_of_script(args.compilation_cache)
    if args.host not in LOCAL and not args.keys:
        progress.say("note: no --api-key: whoever reaches this machine can use the model", sys.stderr)
    progress.say(f"loading {args.model}, drafter {args.drafter}", sys.stderr)
    with distributed_flags.joined(args) as replica:
        waits = {"max_waiting": args.max_waiting}
        make = partial(engine_flags.engine, args, replica, **waits)
        others = {
            name: lambda first, its=its: engine_flags.engine_over(first.lm, its, replica, **waits)
            for name, its in args.also.items()
        }
        if distributed_flags.follows(replica):
            leading = make()
            for other in others.values():
                other(leading)
            return replica.follow()
        service = Service(make, args.served_model_name or [args.model], args.keys, others)
        serve(service, args.host, args.port, args.shutdown_timeout)


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
