"""The flags of a model over several processes, which all run the same command."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from specjax import distributed

# Flags that may differ between the processes.
OWN = ("distributed", "num_processes", "process_id", "compilation_cache", "seed", "json", "source", "target")


def add_all(add: Callable) -> None:
    """The flags that say which processes share the model."""
    add("--distributed", nargs="?", const="", metavar="HOST:PORT", help="the model is cut over the devices of all "
        "processes that run this command. Slurm and Open MPI say which; else give the address of process 0, and the "
        "two flags below")  # fmt: skip
    add("--num-processes", type=int, metavar="N", help="the number of processes of --distributed HOST:PORT")
    add("--process-id", type=int, metavar="I", help="the number of this process, from 0")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError if the flags contradict each other."""
    by_hand = args.num_processes is not None, args.process_id is not None
    if any(by_hand) and not (all(by_hand) and args.distributed):
        raise ValueError("--num-processes and --process-id go together, and with --distributed HOST:PORT")
    if args.distributed is not None and args.devices != 1:
        raise ValueError("--distributed takes all devices of all processes; leave --devices out")


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[distributed.Replica | None]:
    """This process's part of the replica for a ``with`` block, or None without --distributed. Only rank 0 writes.

    Raises:
      ValueError: as :func:`specjax.distributed.join`.
    """
    if args.distributed is None:
        yield None
        return
    with distributed.join(args.distributed or None, args.num_processes, args.process_id) as replica:
        mine = {name: str(value) for name, value in vars(args).items() if name not in OWN}
        first = replica.agreed(mine)
        for name in mine:
            if first.get(name) != mine[name]:
                replica.end(f"{name} is {mine[name]} here and {first.get(name)} on rank 0; give all the same flags")
        if replica.rank:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
        yield replica


def agreed(replica: distributed.Replica | None, value: Any) -> Any:
    """The value of rank 0: what JSON holds. Without --distributed: the value itself."""
    return value if replica is None else replica.agreed(value)


def compare(replica: distributed.Replica | None, tokens: list[list[int]]) -> None:
    """Ends all processes if a rank has other tokens than rank 0."""
    if agreed(replica, tokens) != tokens and replica is not None:
        replica.end("this rank has other tokens than rank 0")


def follows(replica: distributed.Replica | None) -> bool:
    """Whether this process only follows rank 0."""
    return replica is not None and replica.rank > 0
