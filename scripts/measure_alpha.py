"""Measures alpha, the rate at which drafted tokens are accepted, as a table like Leviathan et al. 2023, table 3.

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
    add("--model", default="smollm2-135m-instruct", help="default model, folder, GGUF file or hub name (%(default)s)")
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines with turns or prompt, and category")
    add("--per-task", type=int, default=2, help="prompts of each task, spread over the file (%(default)s)")
    add("--max-prompt-tokens", type=int, default=512, help="longer prompts are passed over (%(default)s)")
    choices.add_flags(parser)
    add("--num-speculative-tokens", type=int, default=5, help="K, positions of the block (%(default)s)")
    add("--max-new-tokens", type=int, default=48, help="prefixes a prompt (%(default)s)")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="one line of the table each (0 1)")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--batch", type=int, default=4, help="prompts at a time (%(default)s)")
    add("--seed", type=int, default=0, help="prompt i uses seed + i (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; float32 on CPU by default")
    parser.add_compilation_cache()
    args = parser.parse_args(argv)
    try:
        choices.settle(args)
    except ValueError as problem:
        parser.error(str(problem))
    parser.at_least_one(args, "per_task", "num_speculative_tokens", "max_new_tokens", "batch")
    return args


def chosen(lm: specjax.LM, args: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """(task, token ids in the chat template), ``per_task`` prompts of each task, shortest first within the list."""
    found: dict[str, list[list[int]]] = {}
    for task, ids in encoded_prompts(lm, args.prompts, args.max_prompt_tokens):
        found.setdefault(task, []).append(ids)
    spread = []
    for task, prompts in found.items():
        step = max(1, len(prompts) // args.per_task)
        spread += [(task, ids) for ids in prompts[::step][: args.per_task]]
    return sorted(spread, key=lambda pair: len(pair[1]))  # rows of a batch are padded to the longest


def measure(lm: specjax.LM, drafter, prompts: list, args: argparse.Namespace, temperature: float) -> list:
    """One Sample a prompt."""
    samples = []
    starts = range(0, len(prompts), args.batch)
    for start in bar(starts, desc=setting(args, temperature), unit="batch"):
        batch = [ids for _, ids in prompts[start : start + args.batch]]
        filler = args.batch - len(batch)  # a full batch compiles nothing new
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
    parts = [f"T = {temperature:g}", args.top_k and f"top-k {args.top_k}", args.top_p and f"top-p {args.top_p:g}"]
    return ", ".join(part for part in parts if part)


def written(found: acceptance.Alpha) -> str:
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
            own = [sample for sample, (of, _) in zip(samples, prompts, strict=True) if of == task]
            by_task.append([*head, task, written(acceptance.alpha(own)), f"{acceptance.coverage(own):.2f}", len(own)])
    later = [f"position {i + 2}" for i in range(args.num_speculative_tokens - 1)]
    print(table(["target", "draft", "sampling", "alpha", "coverage", *later], overall))
    print(table(["target", "draft", "sampling", "task", "alpha", "coverage", "prompts"], by_task))
    prefixes = sum(len(sample.weight) for sample in samples)
    print(f"{len(prompts)} prompts, {prefixes} prefixes in the last setting, {lm.dtype.name}")


def table(header: list, rows: list) -> str:
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)]) + "\n"


def main(argv=None) -> int:
    """Exit code 0, or 2 and one sentence on stderr for what can't be done."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
