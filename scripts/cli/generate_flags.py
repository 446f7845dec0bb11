"""The flags of ``scripts/generate.py``."""

import argparse
import json
import secrets
import sys
from pathlib import Path

from cli import choices
from cli.parser import Parser
from specjax.models.quantized import KINDS
from specjax.verify import VERIFIERS

SAMPLING = (
    "min_new_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
    "no_repeat_ngram_size allow_unknown_ids stop eos_token_id ignore_eos chat tools chat_template_kwargs parse_special"
).split()


def _parser() -> Parser:
    parser = Parser(description="Decodes prompts speculatively with a Llama-family model.")
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="default model, folder, GGUF file or hub name (%(default)s)")
    add("--prompt", action="append", default=[], help="text to continue; repeat it for a batch")
    add("--prompt-file", action="append", default=[], type=Path, help="file that holds one prompt; may be repeated")
    add("--chat", action="store_true", help="wrap each prompt as a user's turn in the model's chat template")
    add("--tools", type=Path, metavar="FILE", help="JSON list of tools for the chat template")
    add("--chat-template-kwargs", metavar="JSON", help="object of further variables of the template")
    add("--date", help="YYYY-MM-DD, for a chat template that asks for the present (default: today)")
    add(
        "--parse-special", action=argparse.BooleanOptionalAction, default=None,
        help="control strings such as <|im_end|> in prompts are tokens (default: unless --chat; see docs/prompts.md)",
    )  # fmt: skip
    choices.add_flags(parser)
    add("--num-speculative-tokens", type=int, help="K, drafted tokens a round at most (3 of a trained drafter, else 5)")
    add("--verifier", choices=[name for name, v in VERIFIERS.items() if v.lossless], default="rejection")
    add("--max-new-tokens", type=int, default=128)
    add("--min-new-tokens", type=int, help="before so many no stop token and no stop string ends a completion")
    add("--temperature", type=float, help="0 is greedy (0.0)")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--min-p", type=float)
    add("--repetition-penalty", type=float)
    add("--presence-penalty", type=float)
    add("--frequency-penalty", type=float)
    add("--no-repeat-ngram-size", type=int)
    add("--stop", action="append", help="text that ends a completion; may be repeated")
    add("--eos-token-id", type=int, nargs="+", metavar="ID", help="tokens that end a text, in place of the model's own")
    add("--ignore-eos", action="store_true")
    add("--allow-unknown-ids", action="store_true", help="also generate ids that the model has and its tokenizer lacks")
    add("--seed", type=seed, default=0, help="prompt i uses seed + i; 'random' draws one, and says it (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; float32 on CPU by default")
    add("--quantize", choices=KINDS, help="the target's weights in eight bits; --quantize-draft is the draft model's")
    add("--kv-dtype", choices=("int8",), help="the cache in eight bits")
    add("--devices", type=int, default=1, help="GPUs that share the target; a drafter is on each (%(default)s)")
    add("--logprobs", type=int, metavar="N", help="record each token's log-probability, and the N best ones there")
    parser.add_compilation_cache()
    add("--stream", action=argparse.BooleanOptionalAction, help="print text as it is made (default for one prompt)")
    add("--compare", action="store_true", help="also decode plainly: both times, their ratio, same output or not")
    add("--trace", action="store_true", help="show each round: drafted tokens with q and p, and their fate")
    add("--profile", action="store_true", help="also time a plain step, a draft and a verification, each by itself")
    add("--memory", action="store_true", help="show how much memory weights and caches take, the drafter's too")
    add(
        "--json", nargs="?", const="-", metavar="FILE",
        help="write the record of the run to FILE (scripts/report.py makes a page of it); without FILE print it "
        "instead of text",
    )  # fmt: skip
    return parser


def parse(argv) -> argparse.Namespace:
    """The settled arguments; ends the process with one sentence where they can't be used."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        choices.settle(args)
        if args.drafter == "none" and args.num_speculative_tokens:
            raise ValueError(
                f"--num-speculative-tokens {args.num_speculative_tokens} is a length of drafts, and --drafter none "
                "drafts nothing; leave one out"
            )
        if args.num_speculative_tokens is None:
            args.num_speculative_tokens = choices.CHOICES[args.drafter].size
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
        args.chat_template_kwargs = args.chat_template_kwargs and json.loads(args.chat_template_kwargs)
    except (OSError, ValueError) as problem:
        parser.error(f"--tools and --chat-template-kwargs must be JSON: {problem}")
    return args


def seed(text: str) -> int:
    """A seed of the command line; a random one is drawn here, so that all runs of one command have the same."""
    if text != "random":
        return int(text)
    drawn = secrets.randbits(53)
    print(f"note: --seed {drawn}", file=sys.stderr)
    return drawn
