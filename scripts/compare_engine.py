"""Compares the engine with ``generate`` called for one prompt after another: texts, tokens per second, first tokens.

python scripts/compare_engine.py --prompts spec_bench.jsonl --requests 8 --slots 4
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
from cli import choices
from cli.parser import Parser, refusing
from cli.prompt_files import encoded_prompts

import specjax
from specjax.generation.compilation import compilation_cache_of_script


def parse(argv) -> argparse.Namespace:
    """The checked arguments. Exits with one sentence for bad ones."""
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--prompts", required=True, metavar="FILE", help="prompts, as JSON lines or plain lines")
    add("--model", default="smollm2-135m-instruct", help="as in generate.py (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights")
    add("--requests", type=int, default=8, help="how many of the prompts (%(default)s)")
    add("--slots", type=int, default=4, help="requests that decode at the same time (%(default)s)")
    add("--max-prompt-tokens", type=int, default=300, help="longer prompts are left out (%(default)s)")
    add("--max-new-tokens", type=int, default=64, help="new tokens of each request (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    add("--num-speculative-tokens", type=int, help="K; by default as in generate.py")
    choices.add_flags(parser)
    parser.add_compilation_cache()
    args = parser.parse_args(argv)
    parser.at_least_one(args, "requests", "slots", "max_prompt_tokens", "max_new_tokens")
    choices.settle(args)
    return args


def run(args: argparse.Namespace) -> None:
    compilation_cache_of_script(args.compilation_cache)
    lm = specjax.load(args.model, dtype=args.dtype)
    every = [ids for _, ids in encoded_prompts(lm, args.prompts, args.max_prompt_tokens)]
    step = max(1, len(every) // args.requests)  # spread over the file, so that all tasks are there
    prompts = every[::step][: args.requests]
    size = args.num_speculative_tokens or choices.CHOICES[args.drafter].size
    way: dict[str, Any] = dict(drafter=choices.build(lm, args), num_speculative_tokens=size)
    asked = dict(max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    capacity = args.max_prompt_tokens + args.max_new_tokens
    with specjax.Engine(lm, slots=args.slots, capacity=capacity, **way) as engine:
        alone = {**way, **asked, "block_width": engine.decoder.block_width, "capacity": capacity + 64}
        texts, single, latency = _one_after_another(lm, prompts, alone)
        found, together, waits = _together(engine, prompts, asked)
        stats = engine.stats()
    same = sum(a == b for a, b in zip(texts, found, strict=True))
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {args.model}, {args.drafter}, K = {size}, {len(prompts)} prompts")
    print(f"generate, one after another: {single:.1f} tokens/s, first token {latency * 1e3:.0f} ms after its call")
    print(
        f"engine, {args.slots} slots: {together:.1f} tokens/s, {together / single:.2f} times; first token after "
        f"{waits * 1e3:.0f} ms from submission (median); {stats.mean_acceptance_length or 1:.2f} tokens a step"
    )
    print(f"same texts: {same} of {len(prompts)}")


def _one_after_another(lm: specjax.LM, prompts: list[list[int]], options: dict) -> tuple[list, float, float]:
    """The texts, the tokens per second with prompts included, and the median time of the prefill."""
    jobs = [specjax.prepare(lm, [prompt], seed=i, **options) for i, prompt in enumerate(prompts)]
    for job in jobs:
        job.warmup()
    began = time.perf_counter()
    results = [job.generate() for job in jobs]
    seconds = time.perf_counter() - began
    tokens = [result.tokens[0] for result in results]
    prefills = sorted(result.seconds["prefill"] for result in results)
    return tokens, sum(map(len, tokens)) / seconds, prefills[len(prefills) // 2]


def _together(engine: specjax.Engine, prompts: list[list[int]], options: dict) -> tuple[list, float, float]:
    """The texts, the tokens per second with prompts included, and the median time to the first token."""
    engine.warmup()
    began, firsts = time.perf_counter(), {}

    def note(number: int):
        return lambda event: firsts.setdefault(number, time.perf_counter() - began)

    handles = [engine.submit(p, seed=i, listener=note(i), **options) for i, p in enumerate(prompts)]
    tokens = [handle.result().tokens[0] for handle in handles]
    seconds = time.perf_counter() - began
    return tokens, sum(map(len, tokens)) / seconds, sorted(firsts.values())[len(firsts) // 2]


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
