"""Measures alpha, the rate at which drafted tokens are accepted: a table like table 3 of Leviathan et al. 2023.

python scripts/measure_alpha.py --prompts spec_bench.jsonl --per-task 2 --temperature 0 1
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

from cli import choices
from cli.parser import Parser, refusing
from cli.prompt_files import encoded_prompts

import specjax
from specjax.generation.compilation import compilation_cache_of_script
from specjax.measure import acceptance
from specjax.report.progress import bar


def parse(argv) -> argparse.Namespace:
    parser = Parser(description="Measures alpha by position and task, on text sampled from the target.")
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m-instruct",
        help="the default model, a folder, a GGUF file or a hub name (%(default)s)",
    )
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines with 'prompt' or 'turns', 'category'")
    add("--per-task", type=int, default=2, help="prompts of each task, spread over the file (%(default)s)")
    add("--max-prompt-tokens", type=int, default=512, help="longer prompts are left out (%(default)s)")
    choices.add_flags(parser)
    add("--num-speculative-tokens", type=int, default=5, help="K, the positions of the block (%(default)s)")
    add("--max-new-tokens", type=int, default=48, help="prefixes of each prompt (%(default)s)")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="temperatures, a table line for each (0 1)")
    add("--top-k", type=int, help="sample from the k likeliest tokens only")
    add("--top-p", type=float, help="sample from the likeliest tokens that have this probability together")
    add("--batch", type=int, default=4, help="prompts of a batch (%(default)s)")
    add("--seed", type=int, default=0, help="prompt i uses seed + i (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights; float32 on a CPU by default")
    parser.add_compilation_cache()
    args = parser.parse_args(argv)
    try:
        choices.settle(args)
    except ValueError as problem:
        parser.error(str(problem))
    parser.at_least_one(args, "per_task", "num_speculative_tokens", "max_new_tokens", "batch")
    return args


def chosen(lm: specjax.LM, args: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """The (task, token ids) pairs of ``per_task`` prompts of each task, in the chat template, the shortest first."""
    found: dict[str, list[list[int]]] = {}
    for task, ids in encoded_prompts(lm, args.prompts, args.max_prompt_tokens):
        found.setdefault(task, []).append(ids)
    spread = []
    for task, prompts in found.items():
        step = max(1, len(prompts) // args.per_task)
        spread += [(task, ids) for ids in prompts[::step][: args.per_task]]
    return sorted(spread, key=lambda pair: len(pair[1]))  # rows of a batch are padded to the longest


def measure(lm: specjax.LM, drafter, prompts: list, args: argparse.Namespace, temperature: float) -> list:
    """One ``acceptance.Sample`` for each prompt."""
    samples = []
    starts = range(0, len(prompts), args.batch)
    for start in bar(starts, desc=setting(args, temperature), unit="batch"):
        batch = [ids for _, ids in prompts[start : start + args.batch]]
        filler = args.batch - len(batch)  # the last batch is filled up, so that it needs no further program
        seen = acceptance.measure(
            lm,
            batch + [batch[0]] * filler,
            drafter,
            args.num_speculative_tokens,
            args.max_new_tokens,
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed + start,
        )
        samples += seen[: len(batch)]
    return samples


def setting(args: argparse.Namespace, temperature: float) -> str:
    """The sampling setting in words."""
    parts = [f"T = {temperature:g}", args.top_k and f"top-k {args.top_k}", args.top_p and f"top-p {args.top_p:g}"]
    return ", ".join(part for part in parts if part)


def written(found: acceptance.Alpha) -> str:
    """An alpha with its standard error, as text."""
    if found.mean is None:
        return "none drafted"
    return f"{found.mean:.3f}" + ("" if found.error is None else f" ± {found.error:.3f}")


def line(cells) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def run(args: argparse.Namespace) -> None:
    compilation_cache_of_script(args.compilation_cache)
    lm = specjax.load(args.model, dtype=args.dtype)
    prompts = chosen(lm, args)
    drafter = choices.build(lm, args)
    tasks = sorted({task for task, _ in prompts})
    names = choices.settings(args)
    name = ", ".join([names.pop("name"), *(f"{key} {value}" for key, value in names.items())])
    overall, by_task = [], []
    for temperature in args.temperature:
        samples = measure(lm, drafter, prompts, args, temperature)
        head = [args.model, name, setting(args, temperature)]
        positions = [written(acceptance.alpha(samples, i)) for i in range(args.num_speculative_tokens)]
        overall.append([*head, positions[0], f"{acceptance.coverage(samples):.2f}", *positions[1:]])
        for task in tasks:
            of_task = [sample for sample, (its_task, _) in zip(samples, prompts, strict=True) if its_task == task]
            coverage = f"{acceptance.coverage(of_task):.2f}"
            by_task.append([*head, task, written(acceptance.alpha(of_task)), coverage, len(of_task)])
    later = [f"position {i + 2}" for i in range(args.num_speculative_tokens - 1)]
    print(table(["target", "draft", "sampling", "alpha", "coverage", *later], overall))
    print(table(["target", "draft", "sampling", "task", "alpha", "coverage", "prompts"], by_task))
    prefixes = sum(len(sample.weight) for sample in samples)
    print(f"{len(prompts)} prompts, {prefixes} prefixes in the last setting, {lm.dtype.name}")


def table(header: list, rows: list) -> str:
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)]) + "\n"


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
