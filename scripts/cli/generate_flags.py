"""The flags of ``scripts/generate.py``."""

import argparse
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from cli import beams, choices, model_flags
from cli.parser import Parser

SAMPLING = (
    "min_new_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
    "no_repeat_ngram_size allow_unknown_ids stop eos_token_id ignore_eos chat tools chat_template_kwargs parse_special"
).split()


def _parser() -> Parser:
    parser = Parser(description="Decodes prompts speculatively with a Llama-family model.")
    _add_prompts(parser.add_argument)
    choices.add_flags(parser)
    _add_decoding(parser.add_argument)
    beams.add_flags(parser.add_argument)
    parser.add_compilation_cache()
    _add_output(parser.add_argument)
    return parser


def _add_prompts(add: Callable) -> None:
    """The flags of the model and of the prompts."""
    model_flags.add_model(add)
    add("--prompt", action="append", default=[], help="text to continue; repeat the flag for a batch")
    add("--prompt-file", action="append", default=[], type=Path, help="file with one prompt; may be repeated")
    add("--chat", action="store_true", help="wrap each prompt as a user's turn in the model's chat template")
    add("--tools", type=Path, metavar="FILE", help="file with a JSON list of tools for the chat template")
    add("--chat-template-kwargs", metavar="JSON", help="JSON object with further variables of the chat template")
    add("--date", metavar="YYYY-MM-DD", help="date for a chat template that asks for one (default: today)")
    add(
        "--parse-special", action=argparse.BooleanOptionalAction, default=None,
        help="read control strings such as <|im_end|> in prompts as tokens (default: only without --chat; see "
        "docs/prompts.md)",
    )  # fmt: skip


def _add_decoding(add: Callable) -> None:
    """The flags of drafting, sampling, stops and number formats."""
    model_flags.add_speculation(add)
    add("--block-width", type=int, metavar="N",
        help="tokens of every call of the target, at least K + 1; with one width a greedy text doesn't depend on the "
        "drafter, even in bfloat16 (by default the narrowest block that serves)")  # fmt: skip
    add_sampling(add)
    model_flags.add_numbers(add)
    add(
        "--logprobs", type=int, metavar="N", help="record each token's log-probability and the N likeliest tokens there"
    )


def add_sampling(add: Callable) -> None:
    """The flags of sampling, limits and stops, by the names of ``specjax.Options``."""
    add("--max-new-tokens", type=int, default=128, help="-1: up to the model's context (%(default)s)")
    add("--min-new-tokens", type=int, help="new tokens before a stop token or a stop string may end a completion")
    add("--temperature", type=float, help="0 is greedy (0.0)")
    add("--top-k", type=int, help="sample from the k likeliest tokens only")
    add("--top-p", type=float, help="sample from the likeliest tokens that have this probability together")
    add("--min-p", type=float, help="leave out tokens whose probability is below this share of the likeliest token's")
    add("--repetition-penalty", type=float, help="factor against tokens of prompt and output; 1 is off")
    add("--presence-penalty", type=float, help="subtracted from the logits of tokens of the output")
    add("--frequency-penalty", type=float, help="subtracted for each time that the output holds a token")
    add("--no-repeat-ngram-size", type=int, help="no n-gram of this size occurs twice; 0 is off")
    add("--stop", action="append", help="text that ends a completion; may be repeated")
    add("--eos-token-id", type=int, nargs="+", metavar="ID", help="tokens that end a text, in place of the model's own")
    add("--ignore-eos", action="store_true", help="end-of-text tokens do not end a completion")
    add("--allow-unknown-ids", action="store_true", help="also allow ids that the model has and its tokenizer lacks")
    add("--seed", type=seed, default=0, help="prompt i uses seed + i; 'random' draws and prints a seed (%(default)s)")


def _add_output(add: Callable) -> None:
    """The flags of the output."""
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print the text while it is generated (default for one prompt)",
    )
    add("--compare", action="store_true", help="also decode plainly, and compare the times and the outputs")
    add("--trace", action="store_true", help="show each round: drafted tokens with q and p, accepted or rejected")
    add("--profile", action="store_true", help="also time a plain step, the drafting and a verification one by one")
    add("--memory", action="store_true", help="show the memory of weights and caches, the drafter's included")
    add(
        "--json", nargs="?", const="-", metavar="FILE",
        help="write the record of the run to FILE, from which scripts/report.py makes a page; without FILE, print the "
        "record in place of the text",
    )  # fmt: skip


def parse(argv) -> argparse.Namespace:
    """The settled arguments. If they can't be used, the process ends with one sentence."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        beams.settle(args)
        model_flags.settle(args)
    except ValueError as problem:
        parser.error(str(problem))
    if args.compare and args.drafter == "none":
        parser.error("--compare compares a drafter with plain decoding, so --drafter none leaves nothing to compare")
    if args.stream and (args.json == "-" or args.compare or args.trace):
        parser.error("--stream can't go with --json without FILE, --compare or --trace")
    if args.logprobs is not None and not args.json:
        parser.error("--logprobs adds to the record of the run, so it needs --json or --json FILE")
    if args.memory and args.json == "-":
        parser.error("--memory prints a line, so it can't go with --json without FILE")
    if args.compare and args.trace:
        parser.error("--compare and --trace can't go together: looking at each round takes time")
    parser.in_a_folder(args, "json")
    try:
        args.tools = args.tools and json.loads(args.tools.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        parser.error(f"--tools {args.tools} must be a file of JSON: {problem}")
    try:
        args.chat_template_kwargs = args.chat_template_kwargs and json.loads(args.chat_template_kwargs)
    except ValueError as problem:
        parser.error(f"--chat-template-kwargs must be JSON: {problem}")
    return args


def seed(text: str) -> int:
    """A seed from the command line. A random seed is drawn here once, so that all runs of the command have the same."""
    if text != "random":
        return int(text)
    drawn = secrets.randbits(53)
    print(f"note: --seed {drawn}", file=sys.stderr)
    return drawn
