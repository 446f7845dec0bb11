"""The flags of an engine's sizes, and the engine that they ask for."""

import argparse
from collections.abc import Callable
from typing import Any

import jax

import specjax
from cli import choices, model_flags
from specjax.distributed import Replica
from specjax.report import progress

SIZES, ON_A_CPU = (8, 4096), (2, 2048)  # slots and capacity; a CPU's rounds take as long as they have rows and entries


def add_sizes(add: Callable) -> None:
    """The flags of an engine's sizes."""
    add("--slots", type=int, help="requests that decode at the same time (8, on a CPU 2)")
    add("--capacity", type=int, help="the most tokens of a request, prompt included (4096, on a CPU 2048)")
    add("--kv-tokens", type=int, help="tokens that the caches of all requests hold together (slots times capacity)")
    add("--overcommit", action="store_true", help="give requests cache pages as they grow, so that more run at once; "
        "if pages run out, the youngest one waits in the host's memory")  # fmt: skip
    add("--fast", action="store_true", help="narrower calls when drafts are short: exact laws, but a seed replays a "
        "text only if the same requests run beside it")  # fmt: skip


def engine(args: argparse.Namespace, replica: Replica | None = None, **options: Any) -> specjax.Engine:
    """The engine of the model, the drafter and the sizes of the flags. ``options`` are further ones of the engine."""
    with progress.waiting(f"loading {args.model}"):
        return engine_over(model_flags.load_model(args), args, replica, **options)


def engine_over(
    lm: specjax.LM, args: argparse.Namespace, replica: Replica | None = None, **options: Any
) -> specjax.Engine:
    """As :func:`engine`, over a model that is loaded."""
    slots, capacity = ON_A_CPU if jax.default_backend() == "cpu" else SIZES
    calls = None if replica is None else replica.calls()
    return specjax.Engine(
        lm, choices.build(lm, args), args.verifier, args.num_speculative_tokens, slots=args.slots or slots,
        capacity=args.capacity or capacity, kv_tokens=args.kv_tokens, exact=not args.fast, overcommit=args.overcommit,
        calls=calls, **options,
    )  # fmt: skip
