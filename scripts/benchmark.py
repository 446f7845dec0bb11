"""Times specjax on planted weights of a real model's shape, with full compute and a chosen acceptance rate.

Every time stands beside its floor: the bytes that must be read, over the read bandwidth measured in the same run.

    python scripts/benchmark.py --target llama-3.1-8b --draft llama-3.2-1b --alpha 0.8
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
from cli.parser import Parser, flag, refusing

from specjax.generation.compilation import compilation_cache_of_script
from specjax.measure.benchmark import calls, eagle, early_exit, held, latency, peers, rounds, serving, sweep, waits
from specjax.measure.benchmark import timed as measure
from specjax.measure.benchmark.case import SHAPES, Case
from specjax.measure.benchmark.table import Table
from specjax.models import attention, parallel
from specjax.models.quantized import KINDS
from specjax.testing.planted_dflash import BLOCK

# What each mode measures.
MODES = {
    "verify": lambda case, table, args: calls.verify(case, table),
    "draft": lambda case, table, args: calls.draft(case, table),
    "quantized": lambda case, table, args: calls.eight_bits(case, table),
    "arithmetic": lambda case, table, args: calls.arithmetic(case, table),
    "round": None,  # measured together with plain decoding, which every run measures
    "drafters": lambda case, table, args: rounds.drafters(case, table, args.corpus),
    "early-exit": lambda case, table, args: early_exit.early_exit(case, table, args.exit_layer),
    "trees": lambda case, table, args: rounds.trees(case, table),
    "latency": lambda case, table, args: latency.latency(case, table, args.prompt_lengths),
    "serving": lambda case, table, args: serving.serving(case, table, args.serving_requests, args.serving_chunk),
    "memory": lambda case, table, args: held.held(case, table, args.serving_requests),
    "waits": lambda case, table, args: waits.waits(case, table, *args.waits_prompts, args.serving_chunk),
    "sweep": lambda case, table, args: sweep.sweep(
        case, table, args.sweep_batches, args.sweep_tokens, args.sweep_check_alphas if case.draft else ()
    ),
}
# Flags that only some modes read, and these modes.
OF_MODES = {
    "exit_layer": "early-exit", "corpus": "drafters", "prompt_lengths": "latency",
    "serving_requests": "serving memory", "waits_prompts": "waits",
    "sweep_batches": "sweep", "sweep_tokens": "sweep", "sweep_check_alphas": "sweep",
}  # fmt: skip
# Modes that need no draft model, and flags that a head does not read.
HEAD_MODES = ("verify", "arithmetic", "round", "trees", "latency", "serving", "memory", "waits", "sweep")
NOT_FOR_HEADS = ("draft", "alpha", "quantize_draft", "sweep_check_alphas", "peers")
# Flags, and the drafters that read them.
READ_BY = {
    "acceptance": ("eagle3", "dflash"), "ways": ("eagle3",), "tree": ("eagle3",), "devices": ("draft-model", "eagle3"),
    "data_parallel": ("draft-model", "eagle3"),
}  # fmt: skip
DEFAULT_MODES = ("verify", "draft", "arithmetic", "round", "drafters", "trees")


def _parser() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--target", choices=SHAPES, default="llama-3.1-8b", help="shape of the target (%(default)s)")
    add("--draft", choices=SHAPES, default="llama-3.2-1b", help="shape of the draft model (%(default)s)")
    add("--alpha", type=float, default=0.8, help="share of tokens that the draft predicts right (%(default)s)")
    _add_heads(add)
    add("--batch", type=int, default=1, help="B, the number of prompts (%(default)s)")
    add("--num-speculative-tokens", type=int, default=5, help="K (%(default)s)")
    add("--prompt-length", type=int, default=128, help="tokens of each prompt (%(default)s)")
    add("--max-new-tokens", type=int, default=256, help="new tokens of each prompt (%(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="dtype of the weights (%(default)s)")  # fmt: skip
    add("--quantize", choices=KINDS, help="store the target's weights in eight bits")
    add("--quantize-draft", choices=KINDS, help="store the draft's weights in eight bits")
    add("--kv-dtype", choices=("int8",), help="store both models' caches in eight bits")
    add("--devices", type=int, default=1, help="GPUs that share the target; each has the whole drafter (%(default)s)")
    add("--data-parallel", type=int, default=1, metavar="N",
        help="N parts of the GPUs share the rows; each part has the whole target (%(default)s)")  # fmt: skip
    add("--modes", nargs="*", choices=MODES, default=DEFAULT_MODES,
        help="what to measure beside plain decoding, which is always measured (%(default)s)")  # fmt: skip
    _add_modes(add)
    add("--peers", nargs="+", choices=peers.NAMES, default=(),
        help="other implementations to time on the same weights, greedy, at B = 1; with --modes serving transformers' "
        "continuous batching too")  # fmt: skip
    add("--gpt-fast", metavar="FOLDER", help="for --peers gpt-fast: a checkout of gpt-fast at commit 091515a")
    parser.add_compilation_cache()
    add("--json", metavar="FILE", help="also write the figures to this file, row by row")
    return parser


def _add_heads(add: Callable) -> None:
    """The flags of rounds that a head drafts."""
    add(
        "--drafter",
        choices=("draft-model", "eagle3", "dflash"),
        default="draft-model",
        help="eagle3, dflash: a head of the published shape drafts, and no draft model (%(default)s)",
    )
    add(
        "--acceptance",
        nargs="+",
        default=("mt-bench",),
        metavar="RATE",
        help=f"for eagle3 and dflash: one of {', '.join(eagle.PRESETS)}; or for each depth how often its best guess is "
        "right, and for eagle3 after colons its next guesses: 0.8 0.7:0.1. The last holds for all further depths "
        "(%(default)s)",
    )
    add(
        "--ways",
        nargs="+",
        choices=eagle.WAYS,
        default=eagle.WAYS,
        help="for eagle3: chains, the best static tree, dynamic trees (%(default)s)",
    )
    add(
        "--tree",
        type=int,
        nargs=2,
        default=(10, 60),
        metavar=("BREADTH", "NODES"),
        help="for eagle3: nodes of a dynamic tree that get children at each depth, and nodes of a tree (%(default)s)",
    )


def _add_modes(add: Callable) -> None:
    """The flags that single modes read."""
    add("--exit-layer", type=int, help="for early-exit: how many layers draft; a quarter of the target's by default")
    add("--corpus", type=int, default=2_000_000, help="for drafters: how many random tokens retrieval searches")
    add(
        "--prompt-lengths", type=int, nargs="+", default=(128, 1024, 4096), help="for latency: prompt lengths in tokens"
    )
    add("--serving-requests", type=int, nargs="+", default=(1, 8, 32), help="for serving and memory: requests at once")
    add(
        "--waits-prompts",
        type=int,
        nargs=2,
        default=(8192, 32768),
        metavar=("KNOWN", "LONG"),
        help="for waits: tokens of the prompt that is submitted twice, and of the one that is read beside decoding",
    )
    add("--serving-chunk", type=int, help="for serving and waits: prompt tokens that the engine reads at once")
    add("--sweep-batches", type=int, nargs="+", default=(1, 2, 4, 8, 16, 32), help="for sweep: every B to time")
    add("--sweep-tokens", type=int, nargs="+", default=tuple(range(1, 9)), help="for sweep: every K to time")
    add("--sweep-check-alphas", type=float, nargs="*", default=(0.6,),
        help="for sweep: further acceptance rates at which the tokens of a round are measured")  # fmt: skip


def parse(argv) -> argparse.Namespace:
    """The checked arguments. Exits with one sentence for bad ones."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name, modes in OF_MODES.items():
        if getattr(args, name) != parser.get_default(name) and not set(modes.split()) & set(args.modes):
            parser.error(f"{flag(name)} is for --modes {modes}, which is not among {' '.join(args.modes)}")
    parser.at_least_one(args, "num_speculative_tokens", "max_new_tokens", "batch", "prompt_length")
    parser.at_least_one(args, "sweep_tokens", "sweep_batches", "prompt_lengths", "corpus")
    parser.at_least_one(args, "serving_requests", "waits_prompts")
    parser.at_least_one(args, "devices", "data_parallel")
    if args.devices % args.data_parallel:
        parser.error(f"--data-parallel must divide --devices, got {args.data_parallel} and {args.devices}")
    parser.in_a_folder(args, "json")
    for alpha in (args.alpha, *args.sweep_check_alphas):
        if not 0 <= alpha <= 1:
            parser.error(f"acceptance rates are from 0 to 1, got {alpha}")
    _check_head(parser, args)
    _check_shapes(parser, args)
    last = SHAPES[args.target].num_hidden_layers - 1
    if args.exit_layer is not None and not 1 <= args.exit_layer <= last:
        parser.error(f"--exit-layer of {args.target} is from 1 to {last}, got {args.exit_layer}")
    if "quantized" in args.modes and (args.quantize or args.quantize_draft):
        parser.error("--modes quantized quantises the models itself; leave --quantize and --quantize-draft out")
    return args


def _check_shapes(parser: Parser, args: argparse.Namespace) -> None:
    """Refuses a target and a drafter that do not go together, and what a model with an encoder does not do."""
    target, draft = SHAPES[args.target], SHAPES[args.draft]
    if args.drafter == "draft-model":
        if target.vocab_size != draft.vocab_size:
            sizes = f"{target.vocab_size} and {draft.vocab_size} tokens"
            parser.error(f"--target and --draft need one vocabulary, got {sizes}")
        if bool(target.start_ids) != bool(draft.start_ids):
            parser.error(f"--target and --draft need an encoder both, or none, got {args.target} and {args.draft}")
    if not target.start_ids:
        return
    if args.drafter != "draft-model":
        parser.error(f"--drafter {args.drafter} is for decoders, and {args.target} has an encoder; give --draft")
    if "waits" in args.modes or args.serving_chunk is not None:
        parser.error(f"--modes waits and --serving-chunk are for decoders: {args.target} reads each prompt in one call")


def _check_head(parser: Parser, args: argparse.Namespace) -> None:
    """Refuses flags and modes that the chosen drafter would ignore. The default modes become those of the drafter."""
    given = {name for name in (*NOT_FOR_HEADS, *READ_BY) if getattr(args, name) != parser.get_default(name)}
    for name, drafters in READ_BY.items():
        if name in given and args.drafter not in drafters:
            parser.error(f"{flag(name)} is only for --drafter {' or '.join(drafters)}")
    if args.drafter == "draft-model":
        return
    for name in NOT_FOR_HEADS:
        if name in given:
            parser.error(f"{flag(name)} is not for --drafter {args.drafter}")
    parser.at_least_one(args, "tree")
    if args.modes is DEFAULT_MODES:
        args.modes = ("round",)
    if unfit := [mode for mode in args.modes if mode not in HEAD_MODES]:
        these = " ".join(HEAD_MODES)
        parser.error(f"--modes {' '.join(unfit)} needs a draft model; --drafter {args.drafter} has {these}")
    if args.drafter == "dflash" and (size := _deepest(args)) >= BLOCK:
        parser.error(f"the published head's block has room for {BLOCK - 1} drafted tokens, got {size}")
    try:
        eagle.acceptance_table(args.acceptance, 1)
    except ValueError as error:
        parser.error(f"--acceptance: {error}")
    if args.drafter == "dflash" and any(":" in rates for rates in args.acceptance):
        given = " ".join(args.acceptance)
        parser.error(f"--acceptance {given}: dflash drafts one guess a place; leave the colons and what follows out")


def _deepest(args: argparse.Namespace) -> int:
    """The most tokens, or levels, that any mode drafts."""
    return max(args.num_speculative_tokens, *(args.sweep_tokens if "sweep" in args.modes else ()), 1)


def _case(args: argparse.Namespace, speed: dict[str, float]) -> Case:
    """The planted models and the request."""
    common = "dtype quantize kv_dtype devices data_parallel num_speculative_tokens batch prompt_length max_new_tokens"
    given = {name: getattr(args, name) for name in common.split()}
    if args.drafter == "draft-model":
        return Case.planted(
            args.target, args.draft, args.alpha, speed=speed, quantize_draft=args.quantize_draft, **given
        )
    depths = _deepest(args)
    if args.drafter == "eagle3":
        return Case.planted_head(
            args.target, args.acceptance, depths, args.ways, tuple(args.tree), speed=speed, **given
        )
    return Case.planted_block_head(args.target, args.acceptance, depths, speed=speed, **given)


def run(args: argparse.Namespace) -> None:
    if args.peers:
        changes = args.quantize or args.quantize_draft or args.kv_dtype
        peers.check((SHAPES[args.target], SHAPES[args.draft]), args.batch, args.devices, changes)
    others = peers.load(args.peers, args.gpt_fast)  # a missing peer is refused before any device work
    compilation_cache_of_script(args.compilation_cache)
    if args.devices > 1:
        parallel.mesh(args.devices)  # too few devices are refused here
    device = jax.devices()[0]
    head = args.drafter != "draft-model"
    alpha = f"acceptance {' '.join(args.acceptance)}" if head else f"alpha = {args.alpha}"
    print(
        f"{device.device_kind}, jax {jax.__version__}, {args.target} + {args.drafter if head else args.draft}, "
        f"B = {args.batch}, K = {args.num_speculative_tokens}, {alpha}, {args.dtype}, {args.devices} device(s)"
    )
    speed = measure.bandwidth(4.0 if device.platform != "cpu" else 0.1)
    print(f"read {speed['read'] / 1e9:.0f} GB/s, copy {speed['copy'] / 1e9:.0f} GB/s")
    case = _case(args, speed)
    about = {"device": device.device_kind, "jax": jax.__version__, "arguments": vars(args), "bandwidth": speed}
    about["attention"] = attention.usual_implementation()
    table = Table(about, args.json)
    settings = tuple(calls.SETTINGS) if "round" in args.modes else ("T = 0",) if others else ()
    runs = rounds.rounds(case, table, settings)
    steps = {mode: partial(MODES[mode], case, table, args) for mode in args.modes if MODES[mode]}
    steps |= {peer.name: partial(peers.compare, peer, case, table, runs) for peer in others}
    if "serving" in args.modes:
        batching = [peer for peer in others if hasattr(peer, "batch")]
        steps |= {
            f"{peer.name}, batches": partial(serving.against, peer, case, table, args.serving_requests)
            for peer in batching
        }
    for name, step in steps.items():
        began = time.perf_counter()
        step()
        print(f"-- {name}: {time.perf_counter() - began:.0f} s, compiling included", flush=True)
    rounds.against_theory(case, table, runs)


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
