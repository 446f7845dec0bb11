"""Puts load on a server, with the figures of ``vllm bench serve``, or on an engine in this process.

    python scripts/load_server.py --address http://127.0.0.1:8000 --rates 0.5 1 2
    python scripts/load_server.py --target llama-3.1-8b --draft llama-3.2-1b --streams 1 8 32 64

Without --address, each run goes to the engine directly and through the server's application, without sockets, and what
the application costs is the ratio of the two. With --target the weights are planted, as in scripts/benchmark.py.
"""

import argparse
import asyncio
import json
import sys
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
import numpy as np
from cli import choices, model_flags, prompt_files
from cli.parser import Parser, flag, refusing

import specjax
from specjax.generation.compilation import compilation_cache_of_script
from specjax.measure.benchmark.case import DECODERS, Case
from specjax.measure.benchmark.table import Table
from specjax.measure.load import compare
from specjax.measure.load.compare import Load
from specjax.measure.load.names import with_names
from specjax.measure.load.ways import OverHTTP
from specjax.report import progress

FOR_ADDRESSES = (
    "address served_model api_key streams rates num_prompts prompts prompt_length max_new_tokens temperature seed "
    "repeats json"
).split()
IDS = 32000  # every vocabulary of a Llama-family model has these ids


def _parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--address", metavar="URL", help="a server of OpenAI's interface, without /v1")
    add("--served-model", metavar="NAME", help="with --address: the model's name there (the first one of /v1/models)")
    add("--api-key", metavar="KEY", help="with --address: the key")
    add("--target", choices=DECODERS, help="planted weights of this shape, in place of --model")
    add("--draft", choices=DECODERS, help="with --target: the shape of the draft model; without it nothing is drafted")
    add("--alpha", type=float, default=0.8, help="with --draft: share of tokens that it predicts right (%(default)s)")
    model_flags.add_all(parser)
    add("--slots", type=int, help="requests that decode at the same time (as many as streams, or 8)")
    add("--streams", type=int, nargs="+", metavar="N", help="numbers of requests that run at the same time (1 8)")
    add("--rates", type=float, nargs="+", metavar="R", help="requests a second at random times, in place of --streams")
    add("--num-prompts", type=int, metavar="N", help="requests of a run (4 for each stream, or 32)")
    add("--prompts", type=Path, metavar="FILE", help="prompts, as compare_drafters.py reads them, in place of random "
        "token ids")  # fmt: skip
    add("--prompt-length", type=int, default=128, help="tokens of a random prompt (%(default)s)")
    add("--max-new-tokens", type=int, default=128, help="new tokens of each request (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    add("--seed", type=int, default=0, help="of the prompts, of the times, and of request 0 (%(default)s)")
    add("--repeats", type=int, default=2, help="runs of each kind, of which the one of most tokens/s counts "
        "(%(default)s)")  # fmt: skip
    add("--json", metavar="FILE", help="also write the figures to this file, row by row")
    return parser


def parse(argv) -> argparse.Namespace:
    """The settled arguments. If they can't be used, the process ends with one sentence."""
    parser = _parser()
    args = parser.parse_args(argv)
    parser.at_least_one(args, "slots", "streams", "num_prompts", "prompt_length", "max_new_tokens", "repeats")
    parser.in_a_folder(args, "json")
    if args.streams and args.rates:
        parser.error("--streams and --rates are two ways to send requests; leave one out")
    if any(not rate > 0 for rate in args.rates or ()):
        parser.error(f"--rates must be above 0, got {args.rates}")
    defaults, others = vars(parser.parse_args([])), []
    if args.address:
        others = [name for name, value in vars(args).items() if name not in FOR_ADDRESSES and value != defaults[name]]
    elif args.served_model or args.api_key:
        parser.error("--served-model and --api-key are for --address")
    if others:
        parser.error(f"--address names a server, which has a model of its own, so leave out {flag(others[0])}")
    if args.target is None and args.draft:
        parser.error("--draft is for --target; the draft model of --model is --draft-model")
    if args.target:
        plant(args, parser)
    try:
        model_flags.settle(args)
    except ValueError as problem:
        parser.error(str(problem))
    return args


def plant(args: argparse.Namespace, parser: Parser) -> None:
    """Settles the drafter of planted weights. Ends the process with one sentence if a flag does not go with them."""
    if args.prompts:
        parser.error("--prompts is text, and planted weights know no text; leave one out")
    if args.drafter != "auto" or args.draft_model or args.adaptive:
        parser.error("--drafter, --draft-model and --adaptive are for --model; the drafter of --target is --draft")
    args.drafter, args.draft_model = ("model", args.draft) if args.draft else ("none", None)


def loads(args: argparse.Namespace) -> list[Load]:
    """The loads that the flags ask for."""
    kinds: list[dict[str, Any]] = [dict(rate=rate) for rate in args.rates or ()]
    kinds = kinds or [dict(streams=streams) for streams in args.streams or (1, 8)]
    common = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "seed")}
    return [Load(count=args.num_prompts or 4 * kind.get("streams", 8), **kind, **common) for kind in kinds]


def prompts(args: argparse.Namespace, vocab: int, count: int) -> list[Any]:
    """The prompts: text, or random token ids."""
    if args.prompts:
        return [prompt for _, prompt in prompt_files.read_prompts(args.prompts)]
    return np.random.default_rng(args.seed).integers(0, vocab, (count, args.prompt_length)).tolist()


def served_names(args: argparse.Namespace) -> list[str]:
    """The names of a server's models. Raises OSError if the server can't be reached."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with urllib.request.urlopen(urllib.request.Request(f"{args.address}/v1/models", headers=headers)) as answer:
        return [entry["id"] for entry in json.load(answer)["data"]]


async def over_http(args: argparse.Namespace, table: Table) -> None:
    """All loads on an address."""
    name = args.served_model or served_names(args)[0]
    for load in loads(args):
        way = OverHTTP(args.address, name, args.api_key)
        asked = load.requests(prompts(args, IDS, load.count))
        found, _ = await compare.best({name: way}, asked, load, args.repeats)
        compare.add(table, f"{name}, {load.name}", found[name])


def models(args: argparse.Namespace) -> tuple[specjax.LM, Any]:
    """The target and its drafter."""
    if args.target is None:
        lm = model_flags.load_model(args)
        return lm, choices.build(lm, args)
    case = Case.planted(
        args.target, args.draft or args.target, args.alpha, args.dtype or "bfloat16", {}, args.quantize,
        args.quantize_draft, args.kv_dtype, args.devices, num_speculative_tokens=args.num_speculative_tokens, batch=1,
        prompt_length=args.prompt_length, max_new_tokens=args.max_new_tokens, seed=args.seed,
    )  # fmt: skip
    target, draft = with_names(case.target), with_names(case.draft)
    if args.draft is None:
        return target, None
    return target, specjax.drafters.DraftModel(draft, any_tokenizer=args.any_draft_tokenizer)


def in_this_process(args: argparse.Namespace, table: Table) -> None:
    """All loads on engines of this process, with speculation and without."""
    lm, drafter = models(args)
    no_drafts = drafter is None or isinstance(drafter, specjax.drafters.NoDraft)
    size = args.num_speculative_tokens
    ways = {} if no_drafts else {f"K = {size}": dict(drafter=drafter, num_speculative_tokens=size)}
    ways["plain"] = dict(drafter=None)
    for load in loads(args):
        texts = prompts(args, lm.vocab_size, load.count)
        longest = max(len(lm.tokenizer.encode(p)) if isinstance(p, str) else len(p) for p in texts)
        for name, way in ways.items():
            make = partial(
                specjax.Engine, lm, slots=args.slots or load.streams or 8, capacity=longest + args.max_new_tokens,
                verifier=args.verifier, **way,
            )  # fmt: skip
            asyncio.run(compare.engine_and_app(make, texts, load, args.repeats, name, table))


def run(args: argparse.Namespace) -> None:
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    about = {"jax": jax.__version__, "arguments": given}
    if args.address:
        asyncio.run(over_http(args, Table(about, args.json)))
        return
    compilation_cache_of_script(args.compilation_cache)
    device = jax.devices()[0].device_kind
    progress.say(f"{device}, jax {jax.__version__}, {args.target or args.model}, {args.draft or args.drafter}")
    in_this_process(args, Table({**about, "device": device}, args.json))


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
