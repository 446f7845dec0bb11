"""Runs Spec-Bench by its authors' rules: speedup by task and overall, mean accepted tokens, tokens/s, as one table.

python scripts/spec_bench.py --prompts question.jsonl --per-task 4 --max-new-tokens 128 --answers answers.jsonl
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
from cli.parser import Parser, refusing
from cli.planted import tokenizer_and_dtype
from cli.prompt_files import read_questions
from compare_drafters import LOOKUP, Candidates, candidates, chosen_of

import specjax
from specjax import drafters as d
from specjax.checkpoints.trained_drafters import load as load_drafter
from specjax.checkpoints.trained_drafters import trained_for
from specjax.generation.compilation import compilation_cache_of_script
from specjax.measure import spec_bench
from specjax.measure.benchmark import peers
from specjax.measure.benchmark.case import DECODERS
from specjax.report.progress import bar
from specjax.testing import planted_writers

PLAIN = "specjax, plain"
K = 5  # of draft models, of planted heads and of the peer's draft model
# The drafters that are compared unless --only chooses others: the baselines without training; of each trained drafter
# what pays on some machine.
UNTRAINED = ("prompt lookup, 3..2", "lookahead", "draft model")
OF_TRAINED = ("lookup, else {}", "{}, chain of 3", "{}, dynamic tree of 16")
# Prompt lookup as the authors set it: matches of up to 3 tokens, 10 tokens drafted.
PEER_LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}


def parse(argv) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--prompts", type=Path, required=True, metavar="FILE",
        help="the questions: data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench")  # fmt: skip
    add("--per-task", type=int, help="questions of each task, spread over the file; all 80 by default")
    add("--model", default="smollm2-135m-instruct", help="the target (%(default)s)")
    add("--draft-model", metavar="MODEL", help="a smaller model with the same tokenizer, which drafts too")
    add("--planted", nargs=2, choices=DECODERS, metavar=("TARGET", "DRAFT"),
        help=f"planted models of these shapes ({', '.join(DECODERS)}), with the tokenizer of --model")  # fmt: skip
    add("--alpha", type=float, default=0.75, help="with --planted: the acceptance rate of a token (%(default)s)")
    add("--max-new-tokens", type=int, default=1024, help="new tokens of a turn (%(default)s, as the authors)")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="temperatures, a table for each (0 1)")
    add("--trained", nargs="*", help="files or names of trained drafters; default: those shipped for the model")
    add("--only", nargs="+", metavar="START", help="only drafters whose names begin with one of these")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights; float32 on a CPU by default")
    add("--peers", action="store_true", help="also transformers' generate: plain, assisted, and prompt lookup")
    add("--answers", type=Path, metavar="FILE", help="keeps each answer here; the same command goes on after a stop")
    add("--json", type=Path, metavar="FILE", help="also write the figures, by task, to this file")
    parser.add_compilation_cache()
    args = parser.parse_args(argv)
    parser.at_least_one(args, "per_task", "max_new_tokens")
    parser.in_a_folder(args, "json", "answers")
    if not 0 <= args.alpha <= 1:
        parser.error(f"--alpha is from 0 to 1, got {args.alpha}")
    if args.planted and (args.draft_model or args.trained):
        parser.error("--planted brings its own draft model and head: leave --draft-model and --trained out")
    if not args.planted and args.alpha != parser.get_default("alpha"):
        parser.error("--alpha is for --planted: a real model's acceptance rate is its own")
    return args


def planted(args: argparse.Namespace) -> tuple[specjax.LM, specjax.LM, Candidates]:
    """The planted target, its draft model, and the drafters to compare on the target."""
    tokenizer, dtype = tokenizer_and_dtype(args)
    target, draft = (DECODERS[name] for name in args.planted)
    lm, helper, head = planted_writers(target, draft, args.alpha, K, tokenizer, dtype=dtype)
    return lm, helper, {
        "draft model, chain of 5": (lambda: d.DraftModel(helper), K),
        "head, chain of 5": (lambda: head, K),
        "lookup, else head": (lambda: d.FirstOf(LOOKUP, head), K),
        "prompt lookup, 3..2": (lambda: LOOKUP, K),
    }


def loaded(args: argparse.Namespace) -> tuple[specjax.LM, specjax.LM | None, Candidates]:
    """The target, a draft model if there is one, and the drafters to compare on the target."""
    lm = specjax.load(args.model, dtype=args.dtype)
    trained = args.trained
    if trained is None:
        trained = trained_for(args.model)
    offered = candidates(lm, list, [], [], trained, [])
    found = (load_drafter(name, lm) for name in trained)
    of_models = [drafter.lm for drafter in found if isinstance(drafter, d.DraftModel)]
    if args.draft_model:
        of_models.insert(0, specjax.load(args.draft_model, dtype=args.dtype))
        offered["draft model, chain of 5"] = (lambda: d.DraftModel(of_models[0]), K)
    usual = [*UNTRAINED, *(how.format(Path(name).stem) for name in trained for how in OF_TRAINED)]
    return lm, of_models[0] if of_models else None, offered if args.only else chosen_of(offered, usual)


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def contestants(
    lm: specjax.LM, helper: specjax.LM | None, offered: Candidates, count: int, peer: Any
) -> Sequence[spec_bench.Contestant]:
    """All rows of the table. Plain decoding comes first.

    Args:
      lm: the target.
      helper: the peer's draft model, if there is one.
      offered: the drafters.
      count: the most new tokens of a turn.
      peer: transformers, without weights so far. None: no peer runs.
    """
    found: list[spec_bench.Contestant] = [spec_bench.Ours(PLAIN, PLAIN, lm, drafter=None, max_new_tokens=count)]
    for name, (make, size) in offered.items():
        found.append(spec_bench.Ours(
            name, PLAIN, lm, drafter=make(), num_speculative_tokens=size, max_new_tokens=count
        ))  # fmt: skip
    if peer is None:
        return found
    peer.take(lm, helper)
    brand = f"transformers {peer.package.__version__}"
    ways = {"plain": {}, "assisted": peer.assisted(K) if helper else None, "prompt lookup": PEER_LOOKUP}
    stops = lm.config.eos_token_ids
    return found + [
        spec_bench.Theirs(f"{brand}, {way}", f"{brand}, plain", peer, count, stops, **settings)
        for way, settings in ways.items() if settings is not None
    ]  # fmt: skip


def run(args: argparse.Namespace) -> None:
    compilation_cache_of_script(args.compilation_cache)
    questions = read_questions(args.prompts, args.per_task)
    peer = peers.load(["transformers"], None)[0] if args.peers else None  # a missing package is refused at once
    lm, helper, offered = planted(args) if args.planted else loaded(args)
    if lm.tokenizer is None:
        raise ValueError(f"the questions are texts, but {args.model} has no tokenizer; give a chat model")
    about = {
        "model": f"planted {' + '.join(args.planted)}" if args.planted else args.model,
        "dtype": str(lm.dtype), "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "max_new_tokens": args.max_new_tokens, "alpha": args.alpha if args.planted else None,
    }  # fmt: skip
    told = {name: value for name, value in about.items() if value is not None}
    about |= {"draft_model": args.draft_model, "prompts": digest(args.prompts)}
    about["trained"] = {name: digest(Path(name)) if Path(name).is_file() else None for name in args.trained or ()}
    records = spec_bench.Records(args.answers, about)
    rows = contestants(lm, helper, chosen_of(offered, args.only), args.max_new_tokens, peer)
    for temperature in args.temperature:
        for question in bar(questions, desc=f"T = {temperature:g}", unit="question"):
            for row in rows:  # in turn, so that load from outside falls on all of them
                if (row.name, temperature, question.question_id) not in records.found:
                    records.add(spec_bench.ask(lm, question, row, temperature))
    wanted = {(row.name, t, q.question_id): None for t in args.temperature for row in rows for q in questions}
    asked = [records.found[key] for key in wanted]
    found = {t: spec_bench.figures(asked, t) for t in args.temperature}
    for temperature, table in found.items():
        print(f"T = {temperature:g}; {', '.join(f'{k} {v}' for k, v in told.items())}\n")
        print(spec_bench.markdown(table, same_texts=not temperature) + "\n")
    if args.json:
        args.json.write_text(json.dumps({**about, "temperatures": {f"{t:g}": x for t, x in found.items()}}, indent=1))


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
