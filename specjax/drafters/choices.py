"""Drafters by name, and the flags that set them: the one table from which command lines make a drafter."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from specjax.drafters.model import DraftModel
from specjax.drafters.none import NoDraft
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.models.lm import LM
from specjax.types import Drafter


@dataclasses.dataclass(frozen=True)
class Choice:
    build: Callable[[LM, argparse.Namespace], Drafter]  # from the target and the settled flags
    flags: tuple[str, ...] = ()  # those of FLAGS that it reads


# Keywords of argparse. One without a default must be given.
FLAGS: dict[str, dict[str, Any]] = {
    "draft_model": dict(metavar="MODEL", help="a smaller model with the same tokenizer, named as --model is"),
    "prompt_lookup_max": dict(type=int, default=3, help="longest match looked for"),
    "prompt_lookup_min": dict(type=int, default=2, help="shortest match"),
}


def _model(target: LM, args: argparse.Namespace) -> Drafter:
    from specjax.load import load  # pulls in all of the conversion

    del target
    return DraftModel(load(args.draft_model, dtype=args.dtype))


CHOICES = {
    "none": Choice(lambda target, args: NoDraft()),
    "model": Choice(_model, ("draft_model",)),
    "ngram": Choice(
        lambda target, args: PromptLookup(args.prompt_lookup_max, args.prompt_lookup_min),
        ("prompt_lookup_max", "prompt_lookup_min"),
    ),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--drafter`` and every drafter's own flags."""
    parser.add_argument("--drafter", choices=CHOICES, default="ngram", help="who proposes tokens (%(default)s)")
    for name, spec in FLAGS.items():
        default = f" ({spec['default']})" if "default" in spec else ""
        text = f"for --drafter {_users(name)}: {spec['help']}{default}"
        # None tells whether it was given; settle fills in the default.
        parser.add_argument(_flag(name), **{**spec, "default": None, "help": text})


def settle(args: argparse.Namespace) -> None:
    """Fills in the chosen drafter's defaults.

    Raises:
      ValueError: if a flag of another drafter was given, or one that this drafter needs was not.
    """
    used = CHOICES[args.drafter].flags
    for name, spec in FLAGS.items():
        given = getattr(args, name) is not None
        if given and name not in used:
            raise ValueError(
                f"{_flag(name)} is used only with --drafter {_users(name)}, not with --drafter {args.drafter}"
            )
        if name in used and not given:
            if "default" not in spec:
                raise ValueError(f"--drafter {args.drafter} needs {_flag(name)}")
            setattr(args, name, spec["default"])


def build(target: LM, args: argparse.Namespace) -> Drafter:
    """The drafter that settled args ask for. They have a ``dtype`` for what must be loaded."""
    return CHOICES[args.drafter].build(target, args)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Its name and what it was set to, for a record."""
    return {"name": args.drafter, **{name: getattr(args, name) for name in CHOICES[args.drafter].flags}}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _users(name: str) -> str:
    return " or ".join(drafter for drafter, choice in CHOICES.items() if name in choice.flags)
