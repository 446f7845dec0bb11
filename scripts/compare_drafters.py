"""Compares all drafters on a model, by task: acceptance rate, tokens of a step, speed over plain decoding.

python scripts/compare_drafters.py --prompts spec_bench.jsonl --per-task 10 --json drafters.json
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
from cli.parser import Parser, refusing
from cli.prompt_files import encoded_prompts

import specjax
from specjax import drafters as d
from specjax.checkpoints.trained_drafters import load as load_drafter
from specjax.checkpoints.trained_drafters import trained_for
from specjax.decode.numeric import in_range
from specjax.drafting.datastore import Datastore
from specjax.drafting.grow_tree import tree_of
from specjax.drafting.topology import sequoia
from specjax.generation.compilation import compilation_cache_of_script
from specjax.generation.metrics import Totals
from specjax.measure import acceptance
from specjax.report.progress import bar
from specjax.verify import VERIFIERS

LOOKAHEAD = 4  # K of Lookahead, whose blocks are the widest
# The trees that a trained EAGLE head is compared with: a name, how the tree grows, and its depth.
TREES = (
    ("tree 3-2-1-1-1", tree_of((3, 2, 1, 1, 1)), 5),
    ("dynamic tree of 16", d.DynamicTree(4, 16), 5),
    ("dynamic tree of 32", d.DynamicTree(6, 32), 6),
)
LOOKUP = d.PromptLookup()

# The name of each drafter, a function that makes the drafter, and K.
Candidates = dict[str, tuple[Callable[[], Any], int]]


def trained_candidates(lm: specjax.LM, files: list[str], spare: list[list[int]]) -> Candidates:
    """Trained drafters, as chains and as trees, and each behind prompt lookup.

    Args:
      lm: the target.
      files: files or names of trained drafters.
      spare: prompts that nothing is compared on. A Sequoia tree is fitted to a few of them; without any there is none.
    """

    def best_tree(trained: Any, nodes: int) -> Any:
        """The drafter with the tree that is best for its acceptance by rank, measured on a few spare prompts."""
        rates = acceptance.by_rank(lm, spare[:6], trained, 5, 6, max_new_tokens=48)
        return dataclasses.replace(trained, tree=tree_of(sequoia(rates, nodes)))

    found: Candidates = {}
    for file in files:
        trained, name = load_drafter(file, lm), Path(file).stem
        found[f"lookup, else {name}"] = (lambda trained=trained: d.FirstOf(LOOKUP, trained), 4)
        for size in (3, 2):
            found[f"{name}, chain of {size}"] = (lambda trained=trained: trained, size)
        for label, tree, size in TREES if isinstance(trained, d.Eagle) else ():
            grown = dataclasses.replace(trained, tree=tree)
            found[f"{name}, {label}"] = (lambda grown=grown: grown, size)
        if isinstance(trained, d.Eagle) and spare:
            found[f"{name}, sequoia tree of 16"] = (lambda trained=trained: best_tree(trained, 16), 5)
    return found


def counted_candidates(vocab: int, corpus: Callable[[], list[list[int]]]) -> Candidates:
    """Drafters that are counted or built from a corpus of token ids."""

    def retrieval() -> Any:
        return d.Retrieval.over(Datastore.build(corpus()))

    return {
        "unigram": (lambda: d.NGramTable.count(corpus(), vocab, 1), 1),
        "bigram": (lambda: d.NGramTable.count(corpus(), vocab, 2), 3),
        "retrieval": (retrieval, 5),
        "lookup, else retrieval": (lambda: d.FirstOf(LOOKUP, retrieval()), 5),
    }


def thinned_candidates(lm: specjax.LM) -> Candidates:
    """The model without its layer 4, which is the best single layer to leave out of the default model."""
    if lm.config.num_hidden_layers <= 4:
        return {}
    skip = d.LayerSkip(skip_attention=(4,), skip_mlp=(4,))
    return {
        "layer 4 left out": (lambda: skip, 3),
        "layer 4 left out, K by entropy": (lambda: d.Adaptive(skip, d.EntropyGuided()), 4),
        "lookup, else layer skip": (lambda: d.FirstOf(LOOKUP, skip), 3),
    }


def candidates(
    lm: specjax.LM,
    corpus: Callable[[], list[list[int]]],
    spare: list[list[int]],
    known: list[list[int]],
    files: list[str],
    exits: list[int],
) -> Candidates:
    """All drafters to compare.

    Args:
      lm: the target.
      corpus: gives the token ids that tables and datastores are made from.
      spare: prompts that nothing is compared on. Without any, drafters that need a corpus are left out.
      known: the texts that the oracle replays. The list may be filled in after this call.
      files: files or names of trained drafters.
      exits: the numbers of layers after which the model leaves early.
    """
    found = trained_candidates(lm, files, spare)
    for after in exits:
        found[f"early exit after layer {after}"] = (lambda after=after: d.LayerSkip(exit_layer=after), 3)
    found |= {
        "prompt lookup, 3..2": (lambda: LOOKUP, 5),
        "prompt lookup, 3..1": (lambda: d.PromptLookup(prompt_lookup_min=1), 5),
        "jacobi": (d.Jacobi, 5),
        "lookahead, window 8": (d.Lookahead, LOOKAHEAD),
        "lookup, K by heuristic": (lambda: d.Adaptive(LOOKUP, d.Heuristic()), 8),
        "sink 4, window 124": (lambda: d.SinkWindow(4, 124), 3),
        "random": (d.RandomDraft, 1),
        "oracle": (lambda: d.Oracle.of(known), 8),
    }
    if spare:
        found |= counted_candidates(lm.config.vocab_size, corpus)
    return found | thinned_candidates(lm)


def measure(label: str, lm: specjax.LM, prompts: list[list[int]], **options) -> dict:
    """The figures of one drafter on some prompts. Prompts are decoded one at a time, after a warm-up that compiles."""
    specjax.warmup(lm, prompts[:1], **options)
    runs = [specjax.generate(lm, [prompt], **options) for prompt in bar(prompts, desc=label, unit="prompt")]
    sums = Totals.of([run.metrics[0] for run in runs])
    seconds = sum(run.seconds["decode"] for run in runs)
    return {
        "acceptance_rate": sums.draft_acceptance_rate,
        "mean_acceptance_length": sums.mean_acceptance_length,
        "tokens_per_step": sums.tokens_per_step,
        "tokens_per_second": sums.tokens / seconds,
        "seconds": seconds,
        "tokens": [run.tokens[0] for run in runs],
    }


def parse(argv) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="the target (%(default)s)")
    add("--prompts", type=Path, required=True, help="JSON lines with 'prompt' or 'turns', and 'category'")
    add("--per-task", type=int, default=10, help="prompts of each task to compare on (%(default)s)")
    add("--max-prompt-tokens", type=int, default=600, help="longer prompts are left out (%(default)s)")
    add("--max-new-tokens", type=int, default=64, help="new tokens of each prompt (%(default)s)")
    add("--temperature", type=float, nargs="+", default=[0.0], help="temperatures to try (0.0)")
    add("--verifier", choices=[name for name, v in VERIFIERS.items() if v.lossless and v.trees], default="rejection",
        help="who judges the drafts (%(default)s)")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights; float32 on a CPU by default")
    add("--trained", nargs="*", help="files or names of trained drafters; default: those shipped for the model")
    add("--exit-layers", type=int, nargs="+", help="layers after which to exit early; default: five sixths of all")
    add("--sizes", type=int, nargs="+", default=[None], metavar="K", help="numbers of drafted tokens to try")
    add("--only", nargs="+", metavar="START", help="compare only drafters whose names begin with one of these")
    add("--corpus-prompts", type=int, default=64, help="further prompts to build corpora from (%(default)s)")
    add("--json", type=Path, help="also write the figures to this file")
    parser.add_compilation_cache()
    args = parser.parse_args(argv)
    parser.at_least_one(args, "sizes", "per_task", "max_prompt_tokens", "max_new_tokens", "exit_layers")
    if wrong := [t for t in args.temperature if not in_range(t, 0)]:
        parser.error(f"--temperature must be numbers from 0 on, got {wrong[0]}")
    parser.in_a_folder(args, "json")
    return args


def split_prompts(lm: specjax.LM, args: argparse.Namespace) -> tuple[dict[str, list[list[int]]], list[list[int]]]:
    """The prompts to compare on, by task, and further prompts to count from, spread over the rest of the file."""
    by_task: dict[str, list[list[int]]] = {}
    spare: list[list[int]] = []
    for task, ids in encoded_prompts(lm, args.prompts, args.max_prompt_tokens):
        chosen = by_task.setdefault(task, [])
        (chosen if len(chosen) < args.per_task else spare).append(ids)
    return by_task, spare[:: max(1, len(spare) // max(1, args.corpus_prompts))][: args.corpus_prompts]


def room(lm: specjax.LM, args: argparse.Namespace) -> dict[str, int]:
    """Options of every call. All calls have the same capacity, which holds the widest block, so they share programs."""
    blocks = [d.Lookahead().plan(lm, size or LOOKAHEAD).block for size in args.sizes]
    widest = max(*blocks, *(1 + tree.size(depth) for _, tree, depth in TREES))
    longest = args.max_prompt_tokens + args.max_new_tokens + widest
    return dict(max_new_tokens=args.max_new_tokens, capacity=longest, verifier=args.verifier)


def chosen_of(offered: Candidates, only: list[str] | None) -> Candidates:
    """The drafters whose names begin with one of ``only``; None: all drafters.

    Raises:
      ValueError: no name begins so.
    """
    found = {name: made for name, made in offered.items() if not only or name.startswith(tuple(only))}
    if not found:
        raise ValueError(f"--only {' '.join(only or [])} begins none of these names: {', '.join(offered)}")
    return found


def run(args: argparse.Namespace) -> None:
    compilation_cache_of_script(args.compilation_cache)
    lm = specjax.load(args.model, dtype=args.dtype)
    if args.trained is None:
        args.trained = trained_for(args.model)
    exits = args.exit_layers or [lm.config.num_hidden_layers * 5 // 6]
    for after in exits:
        d.LayerSkip(exit_layer=after).plan(lm, 1)  # a layer that is not there is refused before any text is decoded
    by_task, spare = split_prompts(lm, args)
    common = room(lm, args)
    device = jax.devices()[0].device_kind
    print(f"{args.model}, {lm.dtype}, {device}, jax {jax.__version__}: "
          f"{', '.join(f'{len(v)} {k}' for k, v in by_task.items())}; {args.max_new_tokens} new tokens")  # fmt: skip

    @functools.cache
    def corpus() -> list[list[int]]:
        """The spare prompts, each with the target's own continuation."""
        outputs = specjax.generate(lm, spare, **common)
        return [prompt + tokens for prompt, tokens in zip(spare, outputs.tokens, strict=True)]

    def over_tasks(name: str, **options) -> dict[str, dict]:
        return {t: measure(f"{name}: {t}", lm, prompts, **options, **common) for t, prompts in by_task.items()}

    known: list[list[int]] = []
    compared = chosen_of(candidates(lm, corpus, spare, known, args.trained, exits), args.only)
    if not spare:
        print(f"--per-task {args.per_task} leaves no prompts to count tables from, so none is compared")
    plain = {t: over_tasks("plain", drafter=None, temperature=t) for t in args.temperature}
    for task, prompts in by_task.items():
        known += [p + new for p, new in zip(prompts, plain[args.temperature[0]][task]["tokens"], strict=True)]
    rows = [{"name": "plain", "K": 0, "temperature": t, "tasks": plain[t]} for t in args.temperature]
    width = max(map(len, compared), default=0)
    print(f"{'':<{width}}{'K':>4}{'T':>5}" + "".join(f"{task[:24]:>26}" for task in [*by_task, "all"]))
    print(f"{'':<{width}}{'':>9}" + "".join(f"{'alpha  tok/step  x plain':>26}" for _ in [*by_task, "all"]))
    for name, (make, best) in compared.items():
        drafter = make()
        for asked, t in itertools.product(args.sizes, args.temperature):
            size = asked or best
            found = over_tasks(name, drafter=drafter, num_speculative_tokens=size, temperature=t)
            rows.append({"name": name, "K": size, "temperature": t, "tasks": found})
            print(line(rows[-1], plain[t], width), flush=True)
        if args.json:
            about = {"device": device, "jax": jax.__version__, "model": args.model, "dtype": str(lm.dtype)}
            write(args.json, {**about, "verifier": args.verifier, "per_task": args.per_task}, rows)


def write(path: Path, about: dict, rows: list[dict]) -> None:
    """Writes the figures as JSON, without the generated tokens."""
    slim = [
        {**row, "tasks": {k: {n: x for n, x in v.items() if n != "tokens"} for k, v in row["tasks"].items()}}
        for row in rows
    ]
    path.write_text(json.dumps({**about, "rows": slim}, indent=1))


def line(row: dict, plain: dict[str, dict], width: int) -> str:
    """One line of the table: a drafter's figures for each task and over all tasks, beside those of plain decoding.

    ``width`` is that of the longest drafter's name.
    """
    found, temperature = row["tasks"], row["temperature"]
    cells = [cell(found[task], plain[task]) for task in found] + [cell(total(found), total(plain))]
    same = all(found[task]["tokens"] == plain[task]["tokens"] for task in found)
    note = "" if same or temperature else "  parts from plain"
    return f"{row['name']:<{width}}{row['K']:>4}{temperature:>5}" + "".join(f"{c:>26}" for c in cells) + note


def total(by_task: dict[str, dict]) -> dict:
    """The figures over all tasks. Rates are means in which each task counts the same. The speed is from the sums."""
    rows = list(by_task.values())
    rates = [r["acceptance_rate"] for r in rows if r["acceptance_rate"] is not None]
    tokens = sum(len(t) for r in rows for t in r["tokens"])
    return {
        "acceptance_rate": sum(rates) / len(rates) if rates else None,
        "tokens_per_step": sum(r["tokens_per_step"] for r in rows) / len(rows),
        "tokens_per_second": tokens / sum(r["seconds"] for r in rows),
    }


def cell(found: dict, plain: dict) -> str:
    """Acceptance rate, tokens of a step, and tokens/s over those of plain decoding."""
    rate = "   -" if found["acceptance_rate"] is None else f"{found['acceptance_rate']:.2f}"
    return f"{rate}  {found['tokens_per_step']:.2f}  {found['tokens_per_second'] / plain['tokens_per_second']:.2f}"


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
