"""Every drafter on a model, by task: acceptance rate, tokens a step, tokens/s over those of plain decoding.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
from cli.parser import Parser, refusing
from cli.prompt_files import encoded_prompts

import specjax
from specjax import drafters as d
from specjax.checkpoints.trained_drafters import load as load_drafter
from specjax.checkpoints.trained_drafters import read_about, shipped
from specjax.drafting.datastore import Datastore
from specjax.drafting.grow_tree import tree_of
from specjax.drafting.topology import sequoia
from specjax.generation.compilation import compilation_cache_of_script
from specjax.generation.metrics import Totals
from specjax.measure import acceptance
from specjax.report.progress import bar


def candidates(
    lm: specjax.LM,
    corpus: Callable[[], list[list[int]]],
    spare: list[list[int]],
    known: list[list[int]],
    files: list[str],
    exits: list[int],
) -> dict[str, tuple]:
    """Name -> (what makes the drafter, K).

    ``spare`` prompts are not compared on; where there are none, what is counted or built from them is left out.
    ``known`` is for the oracle alone, ``files`` are of trained drafters, ``exits`` layers to leave the model after.
    """
    vocab = lm.config.vocab_size
    lookup = d.PromptLookup()
    # The best single layer to leave out of the default model.
    skip = d.LayerSkip(skip_attention=(4,), skip_mlp=(4,)) if lm.config.num_hidden_layers > 4 else None

    def retrieval():
        return d.Retrieval.over(Datastore.build(corpus()))

    def best_tree(trained, nodes: int):
        """The best for the acceptance by rank that is measured on a few of the spare prompts."""
        rates = acceptance.by_rank(lm, spare[:6], trained, 5, 6, max_new_tokens=48)
        return dataclasses.replace(trained, tree=tree_of(sequoia(rates, nodes)))

    found: dict[str, tuple] = {}
    for file in files:
        trained, name = load_drafter(file, lm), Path(file).stem
        found[f"lookup, else {name}"] = (lambda trained=trained: d.FirstOf(lookup, trained), 4)
        for size in (3, 2):
            found[f"{name}, chain of {size}"] = (lambda trained=trained: trained, size)
        for label, tree, size in TREES if isinstance(trained, d.Eagle) else ():
            grown = dataclasses.replace(trained, tree=tree)
            found[f"{name}, {label}"] = (lambda grown=grown: grown, size)
        if isinstance(trained, d.Eagle) and spare:
            found[f"{name}, sequoia tree of 16"] = (lambda trained=trained: best_tree(trained, 16), 5)
    for after in exits:
        found[f"early exit after layer {after}"] = (lambda after=after: d.LayerSkip(exit_layer=after), 3)
    found |= {
        "prompt lookup, 3..2": (lambda: lookup, 5),
        "prompt lookup, 3..1": (lambda: d.PromptLookup(prompt_lookup_min=1), 5),
        "jacobi": (d.Jacobi, 5),
        "lookahead, window 8": (d.Lookahead, LOOKAHEAD),
        "lookup, K by heuristic": (lambda: d.Adaptive(lookup, d.Heuristic()), 8),
        "sink 4, window 124": (lambda: d.SinkWindow(4, 124), 3),
        "random": (d.RandomDraft, 1),
        "oracle": (lambda: d.Oracle.of(known), 8),
    }
    if spare:
        found |= {
            "unigram": (lambda: d.NGramTable.count(corpus(), vocab, 1), 1),
            "bigram": (lambda: d.NGramTable.count(corpus(), vocab, 2), 3),
            "retrieval": (retrieval, 5),
            "lookup, else retrieval": (lambda: d.FirstOf(lookup, retrieval()), 5),
        }
    if skip:
        found |= {
            "layer 4 left out": (lambda: skip, 3),
            "layer 4 left out, K by entropy": (lambda: d.Adaptive(skip, d.EntropyGuided()), 4),
            "lookup, else layer skip": (lambda: d.FirstOf(lookup, skip), 3),
        }
    return found


LOOKAHEAD = 4  # K of the widest blocks
# (name, how it grows, depth)
TREES = (
    ("tree 3-2-1-1-1", tree_of((3, 2, 1, 1, 1)), 5),
    ("dynamic tree of 16", d.DynamicTree(4, 16), 5),
    ("dynamic tree of 32", d.DynamicTree(6, 32), 6),
)


def measure(label: str, lm: specjax.LM, prompts: list[list[int]], **options) -> dict:
    """One prompt at a time, after one that compiles."""
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
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines: 'prompt' or 'turns', 'category'")
    parser.add_argument("--per-task", type=int, default=10)
    parser.add_argument("--max-prompt-tokens", type=int, default=600)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--trained", nargs="*", help="drafter files or names; default: those shipped for the model")
    parser.add_argument("--exit-layers", type=int, nargs="+", help="early exits; default: after five sixths")
    parser.add_argument("--sizes", type=int, nargs="+", default=[None], metavar="K", help="drafted tokens, each tried")
    parser.add_argument("--only", nargs="+", help="names that begin so")
    parser.add_argument("--corpus-prompts", type=int, default=64, help="further prompts whose outputs are counted")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_compilation_cache()
    args = parser.parse_args(argv)
    parser.at_least_one(args, "sizes")
    parser.in_a_folder(args, "json")
    return args


def run(args) -> None:
    compilation_cache_of_script(args.compilation_cache)
    lm = specjax.load(args.model, dtype=args.dtype)
    if args.trained is None:
        args.trained = [name for name in shipped() if read_about(name)["about"]["model"] == args.model]
    exits = args.exit_layers or [lm.config.num_hidden_layers * 5 // 6]
    by_task: dict[str, list[list[int]]] = {}
    spare: list[list[int]] = []
    for task, ids in encoded_prompts(lm, args.prompts, args.max_prompt_tokens):
        chosen = by_task.setdefault(task, [])
        (chosen if len(chosen) < args.per_task else spare).append(ids)
    spare = spare[:: max(1, len(spare) // max(1, args.corpus_prompts))][: args.corpus_prompts]
    blocks = [d.Lookahead().widths(size or LOOKAHEAD)[0] for size in args.sizes]
    widest = max(*blocks, *(1 + tree.size(depth) for _, tree, depth in TREES))
    common = dict(max_new_tokens=args.max_new_tokens, capacity=args.max_prompt_tokens + args.max_new_tokens + widest)
    device = jax.devices()[0].device_kind
    print(f"{args.model}, {lm.dtype}, {device}, jax {jax.__version__}: "
          f"{', '.join(f'{len(v)} {k}' for k, v in by_task.items())}; {args.max_new_tokens} new tokens")  # fmt: skip

    @functools.cache
    def corpus() -> list[list[int]]:
        """What tables and datastores know: the target's own words on other prompts."""
        outputs = specjax.generate(lm, spare, **common)
        return [prompt + tokens for prompt, tokens in zip(spare, outputs.tokens, strict=True)]

    def over_tasks(name: str, **options) -> dict[str, dict]:
        return {t: measure(f"{name}: {t}", lm, prompts, **options, **common) for t, prompts in by_task.items()}

    known: list[list[int]] = []
    offered = candidates(lm, corpus, spare, known, args.trained, exits)
    compared = {n: found for n, found in offered.items() if not args.only or any(n.startswith(o) for o in args.only)}
    if not compared:
        raise ValueError(f"--only {' '.join(args.only)} begins none of these names: {', '.join(offered)}")
    if not spare:
        print(f"--per-task {args.per_task} leaves no prompts to count tables from, so none is compared")
    plain = {t: over_tasks("plain", drafter=None, temperature=t) for t in args.temperature}
    for task, prompts in by_task.items():
        known += [p + new for p, new in zip(prompts, plain[args.temperature[0]][task]["tokens"], strict=True)]
    rows = [{"name": "plain", "K": 0, "temperature": t, "tasks": plain[t]} for t in args.temperature]
    print(f"{'':<40}{'K':>3}{'T':>5}" + "".join(f"{task[:14]:>24}" for task in [*by_task, "all"]))
    print(f"{'':<48}" + "".join(f"{'alpha  tok/step  x plain':>24}" for _ in [*by_task, "all"]))
    for name, (make, best) in compared.items():
        drafter = make()
        for asked, t in itertools.product(args.sizes, args.temperature):
            size = asked or best
            found = over_tasks(name, drafter=drafter, num_speculative_tokens=size, temperature=t)
            rows.append({"name": name, "K": size, "temperature": t, "tasks": found})
            cells = [cell(found[task], plain[t][task]) for task in by_task] + [cell(total(found), total(plain[t]))]
            same = all(found[task]["tokens"] == plain[t][task]["tokens"] for task in by_task)
            note = "" if same or t else "  parts from plain"
            print(f"{name:<40}{size:>3}{t:>5}" + "".join(f"{c:>24}" for c in cells) + note, flush=True)
        if args.json:
            slim = [
                {**row, "tasks": {k: {n: x for n, x in v.items() if n != "tokens"} for k, v in row["tasks"].items()}}
                for row in rows
            ]
            about = {"device": device, "jax": jax.__version__, "model": args.model, "dtype": str(lm.dtype)}
            args.json.write_text(json.dumps({**about, "per_task": args.per_task, "rows": slim}, indent=1))


def total(by_task: dict[str, dict]) -> dict:
    """Means over tasks, each weighing the same; speed from the sums."""
    rows = list(by_task.values())
    rates = [r["acceptance_rate"] for r in rows if r["acceptance_rate"] is not None]
    tokens = sum(len(t) for r in rows for t in r["tokens"])
    return {
        "acceptance_rate": sum(rates) / len(rates) if rates else None,
        "tokens_per_step": sum(r["tokens_per_step"] for r in rows) / len(rows),
        "tokens_per_second": tokens / sum(r["seconds"] for r in rows),
    }


def cell(found: dict, plain: dict) -> str:
    rate = "   -" if found["acceptance_rate"] is None else f"{found['acceptance_rate']:.2f}"
    return f"{rate}  {found['tokens_per_step']:.2f}  {found['tokens_per_second'] / plain['tokens_per_second']:.2f}"


def main(argv=None) -> int:
    """Exit code 0, or 2 and one sentence on stderr."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
