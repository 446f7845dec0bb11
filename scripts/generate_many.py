"""Answers the rows of a file: many prompts through one engine, resumed where an earlier run was stopped.

python scripts/generate_many.py prompts.jsonl answers.jsonl --chat --max-new-tokens 64
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

from cli import distributed_flags, engine_flags, model_flags
from cli.generate_flags import SAMPLING, add_sampling
from cli.parser import INTERRUPTED, Parser, refusing

import specjax
from specjax.generation.compilation import compilation_cache_of_script
from specjax.offline import files
from specjax.offline.rows import Row
from specjax.report import progress

# Options that a flag gives to all rows. A row's own fields go first.
DEFAULTS = [name for name in SAMPLING if name not in ("tools", "chat_template_kwargs", "parse_special")]


def parse(argv) -> argparse.Namespace:
    """The settled arguments. If they can't be used, the process ends with one sentence."""
    parser = Parser(
        description="Answers every row of a file with a Llama-family model. A row is a JSON object with a prompt or "
        "messages, and with any field of specjax.Options that holds for this row alone."
    )
    add = parser.add_argument
    add("source", type=Path, metavar="IN.jsonl", help="the rows, one JSON object a line")
    add("target", type=Path, metavar="OUT.jsonl", help="the answers; rows whose id stands there are left out")
    add("--keep-order", action="store_true", help="write answers in the order of the rows, not as they end")
    add("--ray", type=int, metavar="REPLICAS", help="answer on so many replicas of a Ray cluster (extra ray): the one "
        "that RAY_ADDRESS names, else one on this machine")  # fmt: skip
    add("--gpus-per-replica", type=float, default=0, metavar="N", help="GPUs of each replica of --ray (%(default)s)")
    add("--chat", action="store_true", help="wrap each text prompt as a user's turn in the model's chat template")
    model_flags.add_all(parser)
    add_sampling(add)
    engine_flags.add_sizes(add)
    args = parser.parse_args(argv)
    parser.at_least_one(args, "slots", "capacity", "kv_tokens", "devices", "ray")
    parser.in_a_folder(args, "target")
    if not args.source.exists():
        parser.error(f"there is no file {args.source}")
    if args.ray and (args.keep_order or args.distributed is not None):
        parser.error("--ray can't go with --keep-order or --distributed")
    if args.gpus_per_replica and not args.ray:
        parser.error("--gpus-per-replica is for --ray")
    try:
        model_flags.settle(args)
    except ValueError as problem:
        parser.error(str(problem))
    return args


def run(args: argparse.Namespace) -> int:
    """Answers the rows. -> exit code 0, or 130 if a signal ended the run before the last row."""
    given = {name: getattr(args, name) for name in (*DEFAULTS, "max_new_tokens")}
    defaults = {name: value for name, value in given.items() if value is not None}
    if args.ray:
        began = time.perf_counter()
        answer = over_ray(args)
        show(args, files.fill(answer, args.source, args.target, defaults, args.seed), time.perf_counter() - began)
        return 0
    compilation_cache_of_script(args.compilation_cache)
    with distributed_flags.joined(args) as replica, engine_flags.engine(args, replica) as engine:
        if distributed_flags.follows(replica):
            replica.follow()
            return 0
        with progress.waiting("compiling, or fetching compiled programs"):
            engine.warmup()
        stopped, began = stop_at_signals(engine), time.perf_counter()
        totals = files.run(engine, args.source, args.target, defaults, args.seed, args.keep_order)
        show(args, totals, time.perf_counter() - began)
    if stopped.is_set():
        progress.say("stopped before the last row; the same command goes on from here", sys.stderr)
        return INTERRUPTED
    return 0


def show(args: argparse.Namespace, totals: files.Totals, seconds: float) -> None:
    """Prints what the run has done."""
    print(
        f"{args.target}: {totals.written} rows written, {totals.errors} of them errors; {totals.found} were there, "
        f"{totals.found_errors} of them errors; {totals.tokens} tokens in {seconds:.1f} s "
        f"({totals.tokens / seconds:.1f} tokens/s)"
    )
    if totals.found_errors:
        print('rows that were there are not tried again: to do so, remove their lines, which have an "error"')


def over_ray(args: argparse.Namespace) -> Callable[[Iterator[Row]], Iterator[dict[str, Any]]]:
    """What answers rows on replicas of a Ray cluster. Each replica makes the engine that the flags ask for."""
    import ray

    from specjax.integrations import ray as replicas

    # Replicas import the scripts' parts from the same places as this process.
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}, log_to_driver=False)
    return partial(
        replicas.answers, partial(engine_of, args), replicas=args.ray, num_gpus=args.gpus_per_replica, num_cpus=1
    )


def engine_of(args: argparse.Namespace) -> specjax.Engine:
    """The engine of a replica."""
    compilation_cache_of_script(args.compilation_cache)
    return engine_flags.engine(args)


def stop_at_signals(engine: specjax.Engine) -> threading.Event:
    """Lets SIGINT and SIGTERM end the run after the rows that are finished. -> an event that says whether one came.

    A second signal ends the process at once.
    """
    stopped = threading.Event()

    def stop(number: int, frame: object) -> None:
        stopped.set()
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_DFL)
        # A thread, because the interrupted code may hold a lock for which the engine's thread waits.
        threading.Thread(target=engine.close, kwargs={"drain": False}).start()

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, stop)
    return stopped


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
