"""Measures drafts for one target beside theorem 3.8: tables like tables 2, 3 and 4 of Leviathan et al. 2023.

python scripts/measure_pair.py --model pair/97m --drafts pair/6m --prompts pair/prompts.jsonl
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
from cli import choices
from cli.parser import Parser, refusing
from cli.prompt_files import read_prompts

import specjax
from specjax.drafters import DraftModel, NoDraft
from specjax.drafting import theory
from specjax.generation.compilation import compilation_cache_of_script
from specjax.generation.prompts import encode_prompts
from specjax.measure.benchmark.timed import side_by_side
from specjax.measure.trial import Trial
from specjax.report.progress import say

TABLES = ("unigram", "bigram")  # drafts that are counted in --corpus
MAX_K = 16  # the most that "best K" may be
HEADER = (
    "draft", "T", "K", "alpha", "coverage", "c", "verify", "best K", "tokens by eq. 1", "tokens", "by theorem 3.8",
    "speedup",
)  # fmt: skip


def parse(argv=None) -> argparse.Namespace:
    """The checked arguments. Exits with one sentence for bad ones."""
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="the target, in any form that specjax.load takes")
    add("--drafts", nargs="+", required=True, metavar="DRAFT", help="smaller models, or unigram, bigram")
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines with 'prompt': plain text or sources")
    add("--corpus", metavar="FILE", help="text in UTF-8 in which unigram and bigram are counted")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="temperatures (0 1)")
    add("--num-speculative-tokens", type=int, nargs="+", default=[5], metavar="K", help="drafted tokens a round (5)")
    add("--max-new-tokens", type=int, default=128, help="new tokens of each prompt (%(default)s)")
    add("--alpha-prompts", type=int, default=64, help="prompts for alpha, one batch (%(default)s)")
    add("--speed-prompts", type=int, default=16, help="prompts for the speed, one at a time (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights; float32 on a CPU by default")
    parser.add_compilation_cache()
    args = parser.parse_args(argv)
    parser.at_least_one(args, "num_speculative_tokens", "max_new_tokens", "alpha_prompts", "speed_prompts")
    if args.corpus is None and any(draft in TABLES for draft in args.drafts):
        parser.error("unigram and bigram are counted in a text: give --corpus FILE")
    return args


def drafter_of(lm: specjax.LM, draft: str, args: argparse.Namespace) -> specjax.Drafter:
    """The drafter of a name of ``TABLES``, or of a model."""
    return choices.CHOICES[draft].build(lm, args) if draft in TABLES else DraftModel(specjax.load(draft, args.dtype))


def written(cells) -> str:
    """A line of the table."""
    return "| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def rows(draft: str, trial: Trial, alphas: dict, plain: dict) -> list[tuple]:
    """The lines of one drafter and one K.

    Args:
      draft: the drafter's name.
      trial: the drafter on the prompts for the speed.
      alphas: alpha and the coverage, by temperature.
      plain: the tokens/s of plain decoding, by temperature.
    """
    c, verify = trial.costs()
    found = []
    for temperature, (of_drafts, coverage) in alphas.items():
        alpha = (of_drafts.mean or 0.0) * coverage  # a prefix without a draft counts as 0
        speed, tokens = trial.speed(temperature)
        spread = f"{alpha:.3f}" + ("" if of_drafts.error is None else f" ± {of_drafts.error * coverage:.3f}")
        found.append((draft, f"{temperature:g}", trial.size, spread, f"{coverage:.2f}", c, verify,
                      theory.best_gamma(alpha, c, MAX_K), theory.expected_tokens(alpha, trial.size), tokens,
                      theory.walltime_factor(alpha, trial.size, c), speed / plain[temperature]))  # fmt: skip
    return found


def run(args: argparse.Namespace) -> None:
    compilation_cache_of_script(args.compilation_cache)
    lm = specjax.load(args.model, args.dtype)
    prompts = encode_prompts(lm, [prompt for _, prompt in read_prompts(args.prompts)], chat=False)
    capacity = max(map(len, prompts)) + args.max_new_tokens + 2 * max(args.num_speculative_tokens) + 2
    fewer = prompts[: args.speed_prompts]
    drafters = {draft: drafter_of(lm, draft, args) for draft in args.drafts}

    def trial(drafter, size: int, given: list) -> Trial:
        return Trial(lm, drafter, given, size, args.max_new_tokens, capacity)

    plain = trial(NoDraft(), 1, fewer)
    timed = {(draft, size): trial(drafter, size, fewer)
             for draft, drafter in drafters.items() for size in args.num_speculative_tokens}  # fmt: skip
    alphas: dict[str, dict] = {draft: {} for draft in drafters}

    def measure(draft: str) -> None:
        many = trial(drafters[draft], 1, prompts[: args.alpha_prompts])
        alphas[draft] = {temperature: many.alpha(temperature) for temperature in args.temperature}

    # Alpha is no time, so it is measured while the programs that are timed compile.
    side_by_side([one.warmup for one in (plain, *timed.values())] + [lambda d=d: measure(d) for d in drafters])
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    speeds = {temperature: plain.speed(temperature)[0] for temperature in args.temperature}
    rates = ", ".join(f"{speed:.0f} tokens/s at T = {temperature:g}" for temperature, speed in speeds.items())
    say(f"{args.model}, {lm.dtype}, {device}: plain decoding makes {rates}\n")
    say(written(HEADER) + "\n" + written(["---"] * len(HEADER)))
    for (draft, _), one in timed.items():
        for row in rows(draft, one, alphas[draft], speeds):
            say(written(row))


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
