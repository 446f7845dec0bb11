"""The drafters by name, with their flags. Every command line makes its drafter from this table."""

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
    """A drafter, or a policy that chooses K, as the user can choose it on a command line."""

    # Makes the drafter or the policy, from the target and the settled flags.
    build: Callable[[LM, argparse.Namespace], Any]
    # The flags that ``build`` reads.
    flags: tuple[str, ...] = ()
    # num_speculative_tokens, if the user gives none.
    size: int = 5


# The flags of the drafters, as keywords of argparse. If a flag has no default here, the user must give the flag.
FLAGS: dict[str, dict[str, Any]] = {
    "draft_model": dict(metavar="MODEL", help="a smaller model with the same tokenizer, in the same form as --model"),
    "quantize_draft": dict(choices=KINDS, default=None, help="the draft model's weights in eight bits"),
    "any_draft_tokenizer": dict(
        action="store_true",
        default=False,
        help="draft even if the tokenizers differ; the output's distribution stays the target's",
    ),
    "trained": dict(
        metavar="NAME",
        help=f"a drafter that comes with specjax ({', '.join(files.shipped())}), or a file that "
        "scripts/train_drafter.py wrote",
    ),
    "tree_nodes": dict(type=int, default=None, help="draft a dynamic tree of this many tokens in place of a chain"),
    "tree_breadth": dict(type=int, default=4, help="nodes that get children at each depth, and children of each"),
    "prompt_lookup_max": dict(type=int, default=3, help="tokens of the longest match"),
    "prompt_lookup_min": dict(type=int, default=2, help="tokens of the shortest match"),
    "exit_layer": dict(type=int, default=None, help="leave out this layer and all layers after it"),
    "skip_attention": dict(type=int, nargs="+", default=(), metavar="LAYER", help="layers whose attention is left out"),
    "skip_mlp": dict(type=int, nargs="+", default=(), metavar="LAYER", help="layers whose MLP is left out"),
    "sink": dict(type=int, default=4, help="how many of the cache's first entries the draft sees"),
    "window": dict(type=int, default=508, help="how many of the cache's latest entries the draft sees"),
    "corpus": dict(metavar="FILE", help="a text in UTF-8 whose n-grams are counted"),
    "datastore": dict(metavar="FOLDER", help="a datastore that scripts/build_datastore.py wrote"),
    "known": dict(metavar="RUN.json", help="the record of an earlier run, whose texts are proposed again"),
    "tree_widths": dict(
        type=int,
        nargs="+",
        default=(3, 2, 1),
        metavar="CHILDREN",
        help="how many tokens are drafted after each token, by depth",
    ),
    "lookahead_window": dict(type=int, default=8, help="columns of guesses; each gives one n-gram in a round"),
    "lookahead_guesses": dict(type=int, default=8, help="the most n-grams that are proposed"),
    "inner_tokens": dict(
        type=int, default=3, help="how many tokens prompt lookup proposes to the draft model at a time"
    ),
}


def _load(target: LM, args: argparse.Namespace) -> LM:
    """The draft model. Its cache is stored like the target's, and every device of the target has the whole model."""
    from specjax.checkpoints.load import load  # imported here, because this imports all of the conversion

    lm = load(args.draft_model, dtype=args.dtype, quantize=args.quantize_draft, kv_dtype=target.kv_dtype)
    return parallel.replicate(lm, target.mesh)


def _draft_model(target: LM, args: argparse.Namespace) -> Drafter:
    return d.DraftModel(_load(target, args), any_tokenizer=args.any_draft_tokenizer)


def _lookup(args: argparse.Namespace) -> Drafter:
    return d.PromptLookup(args.prompt_lookup_max, args.prompt_lookup_min)


def _table(order: int) -> Callable[[LM, argparse.Namespace], Drafter]:
    """The ``build`` of a table of n-grams of the given order, counted from --corpus."""

    def build(target: LM, args: argparse.Namespace) -> Drafter:
        if target.tokenizer is None:
            raise ValueError("--corpus is text, but the model has no tokenizer to encode it; choose another drafter")
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
        raise ValueError(
            f"--tree-nodes needs a head that grows trees, and {args.trained} is a {type(drafter).__name__}; leave "
            "--tree-nodes out"
        )
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
    "ngram-model": Choice(lambda target, args: d.FirstOf(_lookup(args), _draft_model(target, args)), (*LOOKUP, *MODEL)),
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

# The policies of specjax.drafters.adaptive, which choose K while a run goes on.
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
    "confidence_threshold": dict(
        type=float, default=0.4, help="the chain ends after a token whose probability is below this"
    ),
    "gamma_min": dict(type=int, default=1, help="drafted tokens at the highest entropy"),
    "gamma_max": dict(type=int, default=None, help="drafted tokens at entropy 0; by default num-speculative-tokens"),
    "ema_beta": dict(type=float, default=0.0, help="weight of earlier rounds in the smoothed entropy"),
    "draft_cost": dict(type=float, help="time of a draft step over the time of a target step"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--drafter``, ``--adaptive`` and the flags of every choice."""
    names = ["auto", *CHOICES]
    parser.add_argument(
        "--drafter", choices=names, default="auto", metavar="NAME",
        help="who proposes tokens: auto (the default) is ngram-trained if specjax comes with a drafter for this model, "
        f"else ngram; or one of {', '.join(CHOICES)}",
    )  # fmt: skip
    parser.add_argument("--adaptive", choices=POLICIES, help="choose K in each round, up to num-speculative-tokens")
    for option, choices, flags in _groups():
        for name, spec in flags.items():
            default = f" ({spec['default']})" if spec.get("default") not in (None, ()) else ""
            text = f"for --{option} {_users(name, choices)}: {spec['help']}{default}"
            # The default is None, which says that the user did not give the flag. ``settle`` fills in the real default.
            parser.add_argument(flag(name), **{**spec, "default": None, "help": text})


def settle(args: argparse.Namespace) -> None:
    """Replaces the drafter ``auto`` by the one it stands for, and fills in the defaults of the chosen drafter's flags.

    Raises:
      ValueError: the user gave a flag of another drafter or policy, or left out a flag that this one needs.
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
        raise ValueError(
            f"--adaptive chooses how much to draft; with --drafter {args.drafter} there is nothing to choose"
        )


def build(target: LM, args: argparse.Namespace) -> Drafter:
    """The drafter that the settled arguments ask for. Their ``dtype`` is that of a draft model's weights."""
    drafter = parallel.everywhere(CHOICES[args.drafter].build(target, args), target.mesh)
    return d.Adaptive(drafter, POLICIES[args.adaptive].build(target, args)) if args.adaptive else drafter


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The drafter's name and the values of its flags, for a record."""
    policy = {"adaptive": args.adaptive} if args.adaptive else {}
    names = CHOICES[args.drafter].flags + (POLICIES[args.adaptive].flags if args.adaptive else ())
    return {"name": args.drafter, **policy, **{name: getattr(args, name) for name in names}}


def _groups():
    """The option that makes a choice, the choices, and their flags: once for drafters, once for policies."""
    return ("drafter", CHOICES, FLAGS), ("adaptive", POLICIES, POLICY_FLAGS)


def _users(name: str, choices: dict[str, Choice]) -> str:
    """The choices that read a flag, in words."""
    return " or ".join(key for key, choice in choices.items() if name in choice.flags)
