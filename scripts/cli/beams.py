"""``scripts/generate.py --num-beams``: the flags of beam search, and its output."""

import argparse
from collections.abc import Callable
from typing import Any

import specjax
from specjax.report import progress

# Flags that have no meaning in beam search, with the values that say that the user did not give them.
ONE_TEXT = {"stream": None, "trace": False, "profile": False, "memory": False, "json": None, "adaptive": None}
EARLY = {"false": False, "true": True, "never": "never"}


def add_flags(add: Callable) -> None:
    """The flags of beam search, by the names of ``specjax.Options``."""
    add("--num-beams", type=int, default=1, metavar="N",
        help="beam search with this many beams; without --drafter nothing is drafted (docs/beams.md)")  # fmt: skip
    add("--num-return-sequences", type=int, default=1, metavar="N", help="texts of a beam search (%(default)s)")
    add("--length-penalty", type=float, default=1.0, help="a text's log-probability is divided by length ** this (1.0)")
    add("--early-stopping", choices=EARLY, default="false", help="when beam search ends (%(default)s)")
    add("--num-draft-beams", type=int, metavar="N", help="beams of the draft (twice --num-beams)")


def settle(args: argparse.Namespace) -> None:
    """Settles the flags before the drafter's. Raises ValueError if a flag can't go with beams."""
    args.early_stopping = EARLY[args.early_stopping]
    if args.num_beams == 1:
        return
    given = [name for name, off in ONE_TEXT.items() if getattr(args, name) not in (off, False)]
    if given:
        raise ValueError(f"--{', --'.join(given)} can't go with --num-beams; leave one of them out")
    args.drafter = "none" if args.drafter == "auto" else args.drafter


def run(lm: specjax.LM, prompts: list[str], options: dict[str, Any], args: argparse.Namespace) -> specjax.Result:
    """Searches, and prints the texts of each prompt, the best first, and the counts."""
    with progress.waiting("searching"):
        result = specjax.generate(lm, prompts, **options)
    count, several = args.num_return_sequences, len(prompts) > 1
    for i, text in enumerate(result.texts or []):
        if several and i % count == 0:
            print(f"--- {prompts[i // count]}")
        print(f"{result.scores[i]:.4f} ({result.finish_reasons[i]}): {text}")  # type: ignore[index]
    print("\n" + summary(result, count))
    if args.compare:
        with progress.waiting("searching without a draft"):
            plain = specjax.generate(lm, prompts, **{**options, "drafter": None, "num_draft_beams": None})
        same = "identical texts" if plain.tokens == result.tokens else "different texts (see docs/beams.md)"
        print(f"without a draft: {summary(plain, count)}; {same}")
    return result


def summary(result: specjax.Result, count: int) -> str:
    """The steps and calls of all searches, each of which has ``count`` texts in the result."""
    searches = result.metrics[::count]
    steps, calls = (sum(getattr(m, name) for m in searches) for name in ("completion_tokens", "num_steps"))
    return f"{steps} steps in {calls} target calls ({steps / calls:.2f} a call)"
