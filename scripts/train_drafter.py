"""Trains a drafter for a model, or the model itself for early exit, on text that the model generates.

python scripts/train_drafter.py --kind eagle3 --dialogues 60000 --steps 6000 --out eagle.safetensors
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from cli.parser import Parser, flag, refusing
from cli.planted import tokenizer_and_dtype
from cli.prompt_files import read_prompts

import specjax
from convert import checkpoint
from specjax.checkpoints import trained_drafters as files
from specjax.drafters import DFlash, DraftModel, Eagle, Medusa, PaSS
from specjax.generation.compilation import compilation_cache_of_script
from specjax.measure.benchmark.case import DECODERS
from specjax.models.config import LlamaConfig
from specjax.models.heads.dflash_head import DFlashHeadConfig, layers_for
from specjax.models.heads.eagle1_head import Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3HeadConfig
from specjax.models.heads.medusa_heads import MedusaHeadsConfig
from specjax.models.model import check_no_encoder
from specjax.report import drawing
from specjax.report.progress import say
from specjax.testing import planted_writer
from specjax.training import loop, plots
from specjax.training.losses import LOSSES
from specjax.training.mark import mark
from specjax.training.texts import Texts, dialogues, over_passages
from specjax.training.train_dflash import DFlashObjective
from specjax.training.train_draft import DraftObjective
from specjax.training.train_eagle import EagleObjective
from specjax.training.train_early_exit import EarlyExitObjective
from specjax.training.train_medusa import MedusaObjective
from specjax.training.train_pass import PaSSObjective

KINDS = {"draft": "model"}  # the name of a kind in a drafter's file, where the file has another name

# Flags that only some kinds have: the kinds, the default, and whether --start-from already settles the value.
OF_KINDS = {
    "draft_vocab": ({"dflash", "eagle", "eagle3", "medusa"}, None, False),
    "intermediate": ({"dflash", "eagle", "eagle3"}, None, True),
    "unroll": ({"eagle", "eagle3"}, 4, False),
    "head_layers": ({"dflash"}, 2, True),
    "block_size": ({"dflash"}, 5, True),
    "heads": ({"medusa"}, 4, True),
    "lookahead_tokens": ({"pass"}, 3, True),
    "layers": ({"draft"}, None, True),
    "exit_layers": ({"early-exit"}, None, False),
    "layer_dropout": ({"early-exit"}, 0.1, False),
}
# Flags of sampling, which have no effect if the texts are read from a file.
SAMPLING = ("dialogues", "sample_batch", "sample_seconds", "text_tokens", "passages", "row_tokens", "prompts")


# All settings that texts depend on, beside the model and the prompts.
OF_TEXTS = ("dtype", "seed", "dialogues", "text_tokens", "passages", "row_tokens")


def _parser() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--kind", choices=("eagle", "eagle3", "dflash", "medusa", "pass", "draft", "early-exit"), required=True)
    add("--model", default="smollm2-135m-instruct", help="the target (%(default)s)")
    add("--planted", choices=DECODERS, metavar="SHAPE",
        help=f"a planted target, to try a run out: {', '.join(DECODERS)}; with the tokenizer of --model")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16"), help="dtype of the target's weights")
    add("--texts", type=Path, metavar="FILE.npz", help="texts: read if the file exists, else sampled and written there")
    add("--dialogues", type=int, default=20000, help="dialogues to sample (%(default)s)")
    add("--sample-batch", type=int, default=1024, help="dialogues sampled at the same time (%(default)s)")
    add("--sample-seconds", type=float, default=float("inf"), help="most seconds of sampling")
    add("--text-tokens", type=int, default=383, help="most tokens of a dialogue (%(default)s)")
    add(
        "--passages",
        type=int,
        default=0,
        help="further dialogues, about passages from the first ones; all dialogues then stand in rows of --row-tokens",
    )
    add("--row-tokens", type=int, default=1023, help="tokens of a row, which holds several dialogues (%(default)s)")
    add("--prompts", type=Path, help="JSON lines of questions, which are asked before the model invents any")
    add("--steps", type=int, default=3000, help="training steps (%(default)s)")
    add("--batch", type=int, default=32, help="texts of a training step (%(default)s)")
    add("--learning-rate", type=float, default=1e-3, help="the largest learning rate (%(default)s)")
    add("--loss", choices=LOSSES, default="kl", help="the loss (%(default)s)")
    add("--start-from", metavar="NAME", help="train this drafter of the same kind further: a file, or a shipped name")
    add("--seed", type=int, default=0, help="seed of sampling and training (%(default)s)")
    add("--draft-vocab", type=int,
        help="eagle, eagle3, dflash, medusa: how many frequent tokens they draft (16384, or all of --start-from)",
    )  # fmt: skip
    add("--intermediate", type=int, help="eagle, eagle3, dflash: width of the MLP; the target's by default")
    add("--unroll", type=int, help="eagle, eagle3: how many tokens in a row the head is trained for (4)")
    add("--head-layers", type=int, help="dflash: how many layers the head has (2)")
    add("--block-size", type=int, help="dflash: tokens of a block, of which all but the first are drafted (5)")
    add("--heads", type=int, help="medusa: how many heads (4)")
    add("--lookahead-tokens", type=int, help="pass: how many look-ahead tokens (3)")
    add("--layers", type=int, nargs="+", help="draft: the target's layers to begin with; first and last by default")
    add("--exit-layers", type=int, nargs="+",
        help="early-exit: layers after which to exit; a fifth, a third and a half by default")  # fmt: skip
    add("--layer-dropout", type=float, help="early-exit: the largest dropout, that of the last layer (0.1)")
    add("--checkpoints", type=Path, help="folder of checkpoints: a run that was cut short goes on from there")
    add("--every", type=int, default=500, help="steps between measurements (%(default)s)")
    add("--seconds", type=float, default=float("inf"), help="most seconds of training")
    add("--out", type=Path, help="file of the drafter; for early-exit a new folder of the model")
    add("--json", type=Path, help="file of the loss curve and the settings")
    add("--plot", type=Path, metavar="FILE.svg", help="draws the curve after each measurement; needs matplotlib")
    parser.add_compilation_cache()
    return parser


def parse(argv=None) -> argparse.Namespace:
    """The checked arguments, with the defaults of the chosen kind filled in. Exits with one sentence for bad ones."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name, (kinds, default, shape) in OF_KINDS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.kind not in kinds:
            parser.error(f"{flag(name)} is for --kind {' or '.join(sorted(kinds))}, not {args.kind}")
        elif shape and args.start_from:
            parser.error(f"{flag(name)} can't be chosen with --start-from: it stays as in that drafter")
    if args.kind == "early-exit" and args.start_from:
        parser.error("--kind early-exit trains a model on: give its folder as --model, not --start-from")
    parser.at_least_one(args, "unroll", "draft_vocab", "head_layers", "steps", "batch", "every", "sample_batch")
    parser.at_least_one(args, "dialogues", "heads", "lookahead_tokens", "intermediate")
    if args.passages and args.text_tokens > args.row_tokens:
        parser.error(f"--text-tokens {args.text_tokens} must fit into a row, which has --row-tokens {args.row_tokens}")
    if args.block_size < 2:
        parser.error(f"--block-size must be at least 2, got {args.block_size}: a block's first token is not drafted")
    if args.row_tokens != parser.get_default("row_tokens") and not args.passages:
        parser.error("--row-tokens is for texts with --passages")
    args.unused = [flag(name) for name in SAMPLING if getattr(args, name) != parser.get_default(name)]
    parser.in_a_folder(args, "out", "json", "texts", "plot")
    if args.kind == "early-exit" and args.out is not None and args.out.exists():
        parser.error(f"--out {args.out} exists already; early-exit makes a new folder")
    return args


def target_of(args: argparse.Namespace) -> specjax.LM:
    """The model of --model, or the planted one of --planted."""
    if not args.planted:
        return specjax.load(args.model, dtype=args.dtype)
    tokenizer, dtype = tokenizer_and_dtype(args)
    return planted_writer(DECODERS[args.planted], tokenizer, seed=args.seed, dtype=dtype)


def said(texts: Texts, vocab: int) -> np.ndarray:
    """How often the target said each token, i64[V]."""
    return np.bincount(texts.tokens[texts.weights() > 0], minlength=vocab)


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """The places of the ``size`` largest counts, i32[size] in rising order."""
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def objective_of(args: argparse.Namespace, target: specjax.LM, texts: Texts | None = None):
    """The objective: the weights to train, and the loss.

    Only a new head needs the texts: it drafts the most frequent tokens of them.
    """
    c = target.config
    if args.start_from:
        return objective_from(args, target)
    if args.kind == "pass":
        return PaSSObjective.of(target, args.lookahead_tokens, loss=args.loss)
    if args.kind == "draft":
        layers = tuple(args.layers or (0, c.num_hidden_layers - 1))
        return DraftObjective.from_layers(target, layers, args.loss)
    if args.kind == "early-exit":
        return EarlyExitObjective.of(target, tuple(args.exit_layers or ()), args.layer_dropout, args.loss)
    assert texts is not None
    counts = said(texts, c.vocab_size)
    tokens = jnp.asarray(most_frequent(counts, args.draft_vocab or 16384))
    rows = target.head_table()[tokens]
    if args.kind == "medusa":
        return MedusaObjective(tokens, rows, MedusaHeadsConfig(c.hidden_size, len(tokens), args.heads), args.loss)
    if args.kind == "dflash":
        layers = layers_for(c, args.head_layers, args.intermediate or c.intermediate_size, len(tokens))
        taps, rarest = low_middle_high(c.num_hidden_layers), int(np.argmin(counts))
        return DFlashObjective(tokens, rows, DFlashHeadConfig(layers, taps, args.block_size, rarest), args.loss)
    layer = dataclasses.replace(
        c, num_hidden_layers=1, vocab_size=len(tokens), intermediate_size=args.intermediate or c.intermediate_size
    )
    taps = low_middle_high(c.num_hidden_layers)
    config = Eagle1HeadConfig(layer) if args.kind == "eagle" else Eagle3HeadConfig(layer, taps)
    return EagleObjective(tokens, rows, config, args.unroll, args.loss)


def low_middle_high(layers: int) -> tuple[int, ...]:
    """The taps of a new head for a target of so many layers."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))


def objective_from(args: argparse.Namespace, target: specjax.LM):
    """The objective that trains the drafter of --start-from further."""
    kind, before = files.read_about(args.start_from)["kind"], files.load(args.start_from, target)
    if kind != KINDS.get(args.kind, args.kind):
        raise ValueError(f"--start-from {args.start_from} is of kind {kind!r}, which --kind {args.kind} can't train on")
    if isinstance(before, DraftModel):
        first = {name: before.lm.params[name] for name in ("layers", "norm")}
        shared = {name: leaf for name, leaf in before.lm.params.items() if name not in first}
        return DraftObjective(shared, first, before.lm.config, args.loss)
    if isinstance(before, PaSS):
        return PaSSObjective(before.params, before.config, loss=args.loss)
    assert isinstance(before, DFlash | Eagle | Medusa)
    common = dict(tokens=before.tokens, lm_head=before.params["lm_head"], loss=args.loss, first=before.params)
    if isinstance(before, Medusa):
        return MedusaObjective(config=before.config, **common)
    if isinstance(before, DFlash):
        return DFlashObjective(config=before.config, **common)
    return EagleObjective(config=before.config, steps=args.unroll, **common)


def cut(objective, counts: np.ndarray, size: int):
    """The objective of a head without its rare tokens: it drafts the ``size`` ones with the largest counts i64[V]."""
    known = np.asarray(objective.tokens)
    places = most_frequent(counts[known], size)
    config = objective.config
    if isinstance(config, MedusaHeadsConfig):
        config = dataclasses.replace(config, vocab_size=size)
    else:
        config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, vocab_size=size))
    return dataclasses.replace(
        objective, tokens=jnp.asarray(known[places]), lm_head=objective.lm_head[places], config=config
    )


def kept(path: Path | None, make: Callable[[], Texts]) -> Texts:
    """The texts of a file if it exists, else newly made ones, which the file then keeps. None: there is no file."""
    if path is not None and path.is_file():
        return Texts.load(path)
    made = make()
    if path is not None:
        made.save(path)
    return made


def texts_of(args: argparse.Namespace, target: specjax.LM) -> Texts:
    """The texts of --texts, or newly sampled ones."""
    if args.texts is not None and args.texts.is_file():
        if args.unused:  # this is no error: the same command continues a run that was cut short
            unused = " ".join(args.unused)
            print(f"{args.texts} is there and is read as it is; {unused} would only be used to sample it", flush=True)
        return Texts.load(args.texts)
    prompts = [prompt for _, prompt in read_prompts(args.prompts)] if args.prompts else []
    parts = None if args.texts is None else args.texts.with_name(args.texts.name + ".parts")
    if parts:
        settings = {"model": name_of(args), "prompts": prompts, **{name: getattr(args, name) for name in OF_TEXTS}}
        mark(parts / "settings.json", json.dumps(settings), "texts that were begun with other settings")
    made = kept(parts and parts / "short.npz", lambda: dialogues(
        target, args.dialogues, args.text_tokens, batch=min(args.sample_batch, args.dialogues), seed=args.seed,
        prompts=prompts, seconds=args.sample_seconds, folder=parts and parts / "short",
    ))  # fmt: skip
    if args.passages:
        asked = over_passages(target, made, args.passages, args.row_tokens // 2, args.seed)
        longer = dialogues(
            target, args.passages, args.row_tokens, args.row_tokens * 3 // 4, seed=args.seed, prompts=asked,
            batch=min(max(1, args.sample_batch // 4), args.passages), folder=parts and parts / "passages",
        )  # fmt: skip
        made = Texts.joined([made.packed(args.row_tokens), longer])
    made = made.shuffled(args.seed)
    if args.texts is not None:
        made.save(args.texts)
        shutil.rmtree(parts)
    return made


def name_of(args: argparse.Namespace) -> str:
    """The target's name in figures and charts."""
    return f"planted {args.planted}" if args.planted else args.model


def show(curve: list[dict], args: argparse.Namespace) -> None:
    """Prints the latest measurement, and draws the curve so far if --plot asks for the drawing."""
    say(json.dumps(curve[-1]))
    if args.plot:
        place = "exit" if args.kind == "early-exit" else "token"
        drawing.svg_file(plots.chart(curve, f"{args.kind} for {name_of(args)}", place), args.plot)


def run(args: argparse.Namespace) -> None:
    compilation_cache_of_script(args.compilation_cache)
    if args.plot:
        import matplotlib  # noqa: F401  (a missing package is refused before any work)
    target = target_of(args)
    check_no_encoder(target, "scripts/train_drafter.py")
    if args.kind in ("eagle", "eagle3", "dflash") and not isinstance(target.config, LlamaConfig):
        raise ValueError(f"--kind {args.kind} makes Llama's layers, and {name_of(args)} has others; use medusa or pass")
    # An objective that needs no texts is built first, so that bad arguments are refused before any sampling.
    early = args.start_from or args.kind in ("pass", "draft", "early-exit")
    objective = objective_of(args, target) if early else None
    fewer = args.draft_vocab if args.start_from else None
    if fewer and fewer > len(objective.tokens):
        raise ValueError(f"--draft-vocab {fewer} can only cut the {len(objective.tokens)} tokens of that head")
    began = time.perf_counter()
    texts = texts_of(args, target)
    print(f"{len(texts.tokens)} texts, {texts.own_tokens} tokens, {time.perf_counter() - began:.0f} s", flush=True)
    if len(texts.tokens) < 2:
        raise ValueError("training needs at least two texts: one is held out")
    held = min(args.batch, max(1, len(texts.tokens) // 20))
    held_out, texts = texts.rows(slice(0, held)), texts.rows(slice(held, None))
    objective = objective or objective_of(args, target, texts)
    if fewer:
        objective = cut(objective, said(texts, target.vocab_size), fewer)
    recipe = loop.Recipe(args.steps, args.batch, args.learning_rate, seed=args.seed)
    count = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: objective.init(0))))
    print(f"{args.kind}: {count} trainable weights; {recipe}", flush=True)
    params, curve = loop.train(
        objective, target, texts, held_out, recipe, args.checkpoints, args.every, args.seconds,
        progress=lambda curve: show(curve, args),
    )  # fmt: skip
    about = {
        "model": name_of(args), "kind": args.kind, "loss": args.loss, "recipe": dataclasses.asdict(recipe),
        "start_from": args.start_from,
        "texts": {"rows": len(texts.tokens), "own_tokens": texts.own_tokens, "size": int(texts.tokens.shape[1])},
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "dtype": target.dtype.name, "curve": curve,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),  # None on a CPU
    }  # fmt: skip
    print(f"peak of the device's memory in bytes: {about['peak_bytes'] or 'unknown'}", flush=True)
    if args.out is not None and args.kind == "early-exit":
        trained = objective.whole.lm(params, target.dtype)
        checkpoint.save(args.out, trained.config, trained.params, target.tokenizer)
    elif args.out is not None:
        kind = KINDS.get(args.kind, args.kind)
        files.save(args.out, kind, objective.config, params, getattr(objective, "tokens", None), about)
    if args.json is not None:
        args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
