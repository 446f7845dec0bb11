"""The output of ``scripts/generate.py``: the heading, the text in colours that show token origins, and the summary."""

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import jax

from specjax.generation.metrics import Totals
from specjax.generation.result import Result
from specjax.models import families
from specjax.models.lm import LM
from specjax.models.quantized import kind_of

RESET = "\033[0m"
SHADES = {"accepted": "\033[32m", "correction": "\033[33m", "bonus": "\033[36m", "plain": ""}  # green, yellow, cyan
MEANINGS = {
    "accepted": "drafted and accepted",
    "correction": "the target's own token, in place of a refused one",
    "bonus": "the target's own token, after a draft that was accepted whole",
    "plain": "the target's own token, without a draft",
}


def in_colour() -> bool:
    """Whether stdout is a terminal and the user has not set NO_COLOR (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def paint(text: str, origin: str) -> str:
    """``text`` in the colour of its origin (``Metrics.origins``)."""
    return f"{SHADES[origin]}{text}{RESET}" if text and SHADES[origin] else text


def painted(pieces: Iterable[str], origins: Iterable[str]) -> str:
    """The text of all pieces, each in the colour of its origin."""
    return "".join(map(paint, pieces, origins))


def legend() -> str:
    """The colours and their meanings, on one line."""
    return "; ".join(f"{paint(origin, origin)}: {meaning}" for origin, meaning in MEANINGS.items())


def heading(lm: LM, name: str, drafter: dict[str, Any], size: int, prompts: list[str]) -> str:
    """Three lines: the model, the drafter and the prompt. A long prompt is cut; of several prompts the number is shown.

    Args:
      lm: the target.
      name: the name of the model as the user gave it.
      drafter: the drafter's settings as in a record. The name comes first.
      size: K.
      prompts: the prompts as the user wrote them.
    """
    weights = sum(leaf.size for leaf in jax.tree.leaves(families.structure(lm.config)[1]))
    kind = kind_of(lm.params) or lm.dtype.name
    given = [f"{key.replace('_', ' ')} {value}" for key, value in drafter.items() if value is not None][1:]
    settings = f" ({', '.join(given)})" if given else ""
    prompt = textwrap.shorten(prompts[0], 300, placeholder=" ...") if len(prompts) == 1 else f"{len(prompts)} prompts"
    most = f", at most {size} tokens a round" if size else ""
    return (
        f"model    {name}: {weights / 1e6:.0f} million parameters, {kind}, {jax.devices()[0].device_kind}\n"
        f"drafter  {drafter['name']}{settings}{most}\n"
        f"prompt   {prompt}\n"
    )


def speed(result: Result) -> float:
    """The new tokens in a second of decoding, without prefill and compilation."""
    return sum(map(len, result.tokens)) / result.seconds["decode"] if result.seconds["decode"] else 0.0


def summary(lm: LM, result: Result) -> str:
    """The lines under the text."""

    def written(rate):
        return "none drafted" if rate is None else f"{rate:.2f}"

    stops = ", ".join(f"{lm.tokenizer.token_str(i)!r} ({i})" for i in result.stop_token_ids) or "no token"
    sums = Totals.of(result.metrics)
    return (
        f"tokens {sums.tokens} in {sums.steps} target steps ({written(sums.tokens_per_step)} a step); "
        f"finished by {', '.join(map(str, result.finish_reasons))}; stops at {stops}\n"
        f"drafted {sums.drafted}, accepted {sums.accepted}; acceptance rate {written(sums.draft_acceptance_rate)}; "
        f"mean acceptance length {written(sums.mean_acceptance_length)} over {sums.spec_steps} speculative steps\n"
        f"{speed(result):.1f} tokens/s decoding; prefill {result.seconds['prefill']:.2f} s; compilation not counted"
    )


def against_plain_steps(result: Result, plain_step: float) -> str:
    """The time that plain decoding of a single prompt would have taken, from the seconds of one plain step."""
    steps, seconds = len(result.tokens[0]), result.seconds["decode"]
    return (
        f"plain decoding would have taken about {steps * plain_step:.2f} s ({steps} steps of "
        f"{plain_step * 1e3:.0f} ms, as timed after this run); speculative decoding took {seconds:.2f} s: "
        f"{steps * plain_step / seconds:.2f} times the tokens/s"
    )


def against_plain(result: Result, plain: Result, times: dict[str, Any]) -> str:
    """The line of ``--compare`` on the two runs. ``times`` has the keys of ``specjax.record.TIMING``."""

    def written(run: Result) -> str:
        return f"{run.seconds['decode']:.2f} s ({speed(run):.1f} tokens/s)"

    same = "identical output" if times["identical"] else "different output (see docs/exactness.md)"
    ratio = f"{times['ratio']:.2f} times the tokens/s"
    return f"plain decoding: {written(plain)}; speculative: {written(result)}; {ratio}; {same}"


def calls_line(calls: dict[str, Any]) -> str:
    """The line of ``--profile``. ``calls`` has the keys of ``specjax.record.CALLS``."""
    widths = ", ".join(f"{seconds * 1e3:.1f} ms for {width}" for width, seconds in calls["verify"].items())
    return (
        f"a plain step {calls['plain_step'] * 1e3:.1f} ms; drafting {calls['draft'] * 1e3:.1f} ms; "
        f"verification by tokens {widths}"
    )
