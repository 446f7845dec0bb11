"""Drafters by name, and the flags that set them: the one table from which command lines make a drafter."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.parser import flag
from specjax import drafters as d
from specjax.checkpoints import trained_drafters as files
from specjax.decode.types import Drafter
from specjax.drafting.datastore import Datastore
from specjax.drafting.grow_tree import ChainOrTree
from specjax.models import parallel
from specjax.models.lm import LM
from specjax.models.quantized import KINDS


@dataclasses.dataclass(frozen=True)
class Choice:
    build: Callable[[LM, argparse.Namespace], Any]  # from the target and the settled flags
    flags: tuple[str, ...] = ()  # those of FLAGS that it reads
    size: int = 5  # num_speculative_tokens, where none is asked for


# Keywords of argparse. One without a default must be given.
FLAGS: dict[str, dict[str, Any]] = {
    "draft_model": dict(metavar="MODEL", help="a smaller model with the same tokenizer, named as --model is"),
    "quantize_draft": dict(choices=KINDS, default=None, help="the draft model's weights in eight bits"),
    "any_draft_tokenizer": dict(
        action="store_true", default=False, help="draft although the tokenizers differ; the text stays the target's"
    ),
    "trained": dict(
        metavar="NAME",
        help=f"a drafter that comes with specjax ({', '.join(files.shipped())}) or a file of scripts/train_drafter.py",
    ),
    "tree_nodes": dict(type=int, default=None, help="verify a dynamic tree of so many tokens instead of a chain"),
    "tree_breadth": dict(type=int, default=4, help="nodes of that tree that go on at each depth, and children of each"),
    "prompt_lookup_max": dict(type=int, default=3, help="longest match looked for"),
    "prompt_lookup_min": dict(type=int, default=2, help="shortest match"),
    "exit_layer": dict(type=int, default=None, help="the first layer left out, with all after it"),
    "skip_attention": dict(type=int, nargs="+", default=(), metavar="LAYER", help="layers whose attention is left out"),
    "skip_mlp": dict(type=int, nargs="+", default=(), metavar="LAYER", help="layers whose MLP is left out"),
    "sink": dict(type=int, default=4, help="first entries of the cache that the draft sees"),
    "window": dict(type=int, default=508, help="latest entries of the cache that the draft sees"),
    "corpus": dict(metavar="FILE", help="text to count, in UTF-8"),
    "datastore": dict(metavar="FOLDER", help="a datastore that scripts/build_datastore.py wrote"),
    "known": dict(metavar="RUN.json", help="an earlier run's record, whose texts are replayed"),
    "tree_widths": dict(
        type=int, nargs="+", default=(3, 2, 1), metavar="CHILDREN", help="tokens drafted after each token, by depth"
    ),
    "lookahead_window": dict(type=int, default=8, help="columns of guesses, and so n-grams found a round"),
    "lookahead_guesses": dict(type=int, default=8, help="n-grams proposed at most"),
    "inner_tokens": dict(type=int, default=3, help="tokens that prompt lookup proposes to the draft model at a time"),
}


def _load(target: LM, args: argparse.Namespace) -> LM:
    """The draft model: its cache stored as the target's is, and whole on every device of the target."""
    from specjax.checkpoints.load import load  # pulls in all of the conversion

    lm = load(args.draft_model, dtype=args.dtype, quantize=args.quantize_draft, kv_dtype=target.kv_dtype)
    return parallel.replicate(lm, target.mesh)


def _draft_model(target: LM, args: argparse.Namespace) -> Drafter:
    return d.DraftModel(_load(target, args), any_tokenizer=args.any_draft_tokenizer)


def _lookup(args: argparse.Namespace) -> Drafter:
    return d.PromptLookup(args.prompt_lookup_max, args.prompt_lookup_min)


def _table(order: int) -> Callable[[LM, argparse.Namespace], Drafter]:
    def build(target: LM, args: argparse.Namespace) -> Drafter:
        if target.tokenizer is None:
            raise ValueError("a corpus is text, but the model has no tokenizer")
        ids = target.tokenizer.encode(Path(args.corpus).read_text(encoding="utf-8"))
        return d.NGramTable.count([ids], target.config.vocab_size, order)

    return build


def _oracle(target: LM, args: argparse.Namespace) -> Drafter:
    from specjax.report import record

    del target
    completions = record.load(args.known)["completions"]
    return d.Oracle.of([c["prompt_token_ids"] + c["tokens"] for c in completions])


def _trained(target: LM, args: argparse.Namespace) -> Drafter:
    drafter = files.load(args.trained, target)
    if args.tree_nodes is None:
        return drafter
    if not isinstance(drafter, ChainOrTree):
        raise ValueError(f"--tree-nodes needs a head, and {args.trained} is a {type(drafter).__name__}")
    return dataclasses.replace(drafter, tree=d.DynamicTree(args.tree_breadth, args.tree_nodes))  # type: ignore[type-var]


MODEL = ("draft_model", "quantize_draft", "any_draft_tokenizer")
TREE = ("tree_nodes", "tree_breadth")
LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
CHOICES = {
    "none": Choice(lambda target, args: d.NoDraft()),
    "model": Choice(_draft_model, MODEL),
    "tree-model": Choice(
        lambda target, args: d.TreeModel(
            _load(target, args), tuple(args.tree_widths), any_tokenizer=args.any_draft_tokenizer
        ),
        (*MODEL, "tree_widths"),
    ),
    "ngram": Choice(lambda target, args: _lookup(args), LOOKUP),
    "trained": Choice(_trained, ("trained", *TREE), size=3),
    "ngram-trained": Choice(
        lambda target, args: d.FirstOf(_lookup(args), _trained(target, args)), (*LOOKUP, "trained", *TREE), size=3
    ),
    "ngram-model": Choice(
        lambda target, args: d.FirstOf(_lookup(args), _draft_model(target, args)), (*LOOKUP, *MODEL)
    ),
    "cascade": Choice(
        lambda target, args: d.Cascade(
            _lookup(args), _load(target, args), args.inner_tokens, any_tokenizer=args.any_draft_tokenizer
        ),
        (*LOOKUP, *MODEL, "inner_tokens"),
    ),
    "layer-skip": Choice(
        lambda target, args: d.LayerSkip(args.exit_layer, args.skip_attention, args.skip_mlp),
        ("exit_layer", "skip_attention", "skip_mlp"),
    ),
    "sink-window": Choice(lambda target, args: d.SinkWindow(args.sink, args.window), ("sink", "window")),
    "unigram": Choice(_table(1), ("corpus",)),
    "bigram": Choice(_table(2), ("corpus",)),
    "retrieval": Choice(lambda target, args: d.Retrieval.over(Datastore.load(args.datastore)), ("datastore",)),
    "jacobi": Choice(lambda target, args: d.Jacobi()),
    "lookahead": Choice(
        lambda target, args: d.Lookahead(args.lookahead_window, args.lookahead_guesses),
        ("lookahead_window", "lookahead_guesses"),
        size=4,
    ),
    "random": Choice(lambda target, args: d.RandomDraft()),
    "oracle": Choice(_oracle, ("known",)),
}

# How K is chosen while running: the policies of specjax.drafters.adaptive.
POLICIES: dict[str, Choice] = {
    "heuristic": Choice(lambda target, args: d.Heuristic()),
    "confidence": Choice(lambda target, args: d.Confidence(args.confidence_threshold), ("confidence_threshold",)),
    "entropy": Choice(
        lambda target, args: d.EntropyGuided(args.gamma_min, args.gamma_max, args.ema_beta),
        ("gamma_min", "gamma_max", "ema_beta"),
    ),
    "cost": Choice(lambda target, args: d.CostModel(args.draft_cost), ("draft_cost",)),
}
POLICY_FLAGS: dict[str, dict[str, Any]] = {
    "confidence_threshold": dict(type=float, default=0.4, help="the chain ends after a token less sure than this"),
    "gamma_min": dict(type=int, default=1, help="drafted tokens at the highest entropy"),
    "gamma_max": dict(type=int, default=None, help="drafted tokens at entropy 0; num-speculative-tokens if not given"),
    "ema_beta": dict(type=float, default=0.0, help="weight of the rounds before in the smoothed entropy"),
    "draft_cost": dict(type=float, help="time of a draft step over that of a target step"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--drafter``, ``--adaptive`` and the flags of every choice."""
    names = ["auto", *CHOICES]
    parser.add_argument(
        "--drafter", choices=names, default="auto", metavar="NAME",
        help="who proposes tokens: ngram-trained with the drafter that comes with specjax for this model, else ngram "
        f"(auto); or one of {', '.join(CHOICES)}",
    )  # fmt: skip
    parser.add_argument("--adaptive", choices=POLICIES, help="choose K while running, up to num-speculative-tokens")
    for option, choices, flags in _groups():
        for name, spec in flags.items():
            default = f" ({spec['default']})" if spec.get("default") not in (None, ()) else ""
            text = f"for --{option} {_users(name, choices)}: {spec['help']}{default}"
            # None tells whether it was given; settle fills in the default.
            parser.add_argument(flag(name), **{**spec, "default": None, "help": text})


def settle(args: argparse.Namespace) -> None:
    """Settles which drafter ``auto`` is, and fills in the chosen one's defaults.

    Raises:
      ValueError: if a flag of another choice was given, or one that this choice needs was not.
    """
    if args.drafter == "auto":
        args.trained = args.trained or files.shipped_for(args.model)
        args.drafter = "ngram-trained" if args.trained else "ngram"
    for option, choices, flags in _groups():
        chosen = getattr(args, option)
        used = choices[chosen].flags if chosen else ()
        for name, spec in flags.items():
            given = getattr(args, name) is not None
            if given and name not in used:
                instead = f", not with --{option} {chosen}" if chosen else ""
                raise ValueError(f"{flag(name)} is used only with --{option} {_users(name, choices)}{instead}")
            if name in used and not given:
                if "default" not in spec:
                    raise ValueError(f"--{option} {chosen} needs {flag(name)}")
                setattr(args, name, spec["default"])
    if args.adaptive and args.drafter in ("none", "jacobi", "lookahead", "tree-model"):
        raise ValueError(f"--adaptive chooses how much to draft, and --drafter {args.drafter} leaves nothing to choose")


def build(target: LM, args: argparse.Namespace) -> Drafter:
    """The drafter that settled args ask for. They have a ``dtype`` for what must be loaded."""
    drafter = CHOICES[args.drafter].build(target, args)
    return d.Adaptive(drafter, POLICIES[args.adaptive].build(target, args)) if args.adaptive else drafter


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Its name and what it was set to, for a record."""
    policy = {"adaptive": args.adaptive} if args.adaptive else {}
    names = CHOICES[args.drafter].flags + (POLICIES[args.adaptive].flags if args.adaptive else ())
    return {"name": args.drafter, **policy, **{name: getattr(args, name) for name in names}}


def _groups():
    return ("drafter", CHOICES, FLAGS), ("adaptive", POLICIES, POLICY_FLAGS)


def _users(name: str, choices: dict[str, Choice]) -> str:
    return " or ".join(key for key, choice in choices.items() if name in choice.flags)
