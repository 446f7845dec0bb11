"""Turns a user's request into a :class:`specjax.generation.job.Job`, with every check that the host can make."""

import dataclasses
import datetime
from collections.abc import Callable, Iterable
from typing import Any

from specjax.decode import random
from specjax.decode.decoder import Decoder
from specjax.decode.numeric import check_switches, is_int
from specjax.decode.types import Drafter, Plan, Verifier
from specjax.drafters import NoDraft, PromptLookup, auto
from specjax.generation import known_ids, logprobs, prompts, requests
from specjax.generation.job import Job
from specjax.generation.options import OF_BEAMS, Options, changed, seeds
from specjax.generation.stops import stop_strings
from specjax.models.lm import LM
from specjax.text.chat import is_conversation
from specjax.text.text_stream import check_unicode
from specjax.verify import VERIFIERS

SWITCHES = ("allow_unknown_ids", "ignore_eos", "chat", "lossy")  # the options that are True or False
# Drafters that have a name: how each is made for a model.
DRAFTERS: dict[str, Callable[[LM], Drafter]] = {
    "none": lambda lm: NoDraft(),
    "ngram": lambda lm: PromptLookup(),
    "auto": auto,
}


def job_of(
    lm: LM, given: Any, options: Options, keys_of: Callable[[list[int]], Any] = random.request_keys
) -> Job:
    """The job of some prompts.

    Args:
      lm: the target model.
      given: the prompts, as in :func:`specjax.prepare`.
      options: how to generate.
      keys_of: makes the random keys of the rows' seeds. The engine makes them later, in a program of its own.

    Raises:
      ValueError: an option or a prompt can't be used. Nothing has run on the device by then.
    """
    if not hasattr(lm, "max_positions"):
        raise ValueError(f"lm must be a model, such as specjax.load gives, got {lm!r:.200}")
    _check_no_beams(options)
    check_switches(**{name: getattr(options, name) for name in SWITCHES})
    drafter, verifier, size = _decoding(lm, options)
    _check_stops(lm, options)
    logprobs.check(options.logprobs)
    given = prompts.on_host(given)
    options = _dated(lm, given, options)
    template = {name: getattr(options, name) for name in ("parse_special", "tools", "date", "chat_template_kwargs")}
    ids = prompts.encode_prompts(lm, given, options.chat, **template)
    if not options.allow_unknown_ids:
        known_ids.check_prompts(lm, ids)
    options = dataclasses.replace(options, seed=seeds(options.seed, len(ids)))
    best = logprobs.best_wanted(options.logprobs, lm.vocab_size)
    decoder = Decoder(lm, drafter, verifier, size, best, options.block_width)
    request, tokens, chunk = requests.build(lm, ids, options, decoder.headroom, keys_of)
    return Job(decoder, ids, request, tokens, chunk, options)


def _check_no_beams(options: Options) -> None:
    """Raises ValueError if an option of beam search is given: what a job decodes is one text a row."""
    given = changed(options, OF_BEAMS)
    if "num_beams" in given:
        raise ValueError(
            f"num_beams={options.num_beams!r}: only specjax.generate searches with beams; jobs, streams, warm-ups and "
            "engines decode one text a row; leave num_beams out, or call specjax.generate"
        )
    if given:
        raise ValueError(f"{', '.join(given)} is for beam search; pass num_beams of at least 2, or leave it out")


def _decoding(lm: LM, options: Options) -> tuple[Drafter, Verifier, int]:
    """The drafter, the verifier and K. For plain decoding: ``NoDraft``, which proposes nothing, and K = 0."""
    asked = "none" if options.drafter is None else options.drafter
    made = DRAFTERS[asked](lm) if isinstance(asked, str) and asked in DRAFTERS else asked
    drafter = _with("propose", "drafter", made, DRAFTERS)
    named = VERIFIERS.get(options.verifier) if isinstance(options.verifier, str) else None
    verifier = _with("verify", "verifier", named or options.verifier, VERIFIERS)
    size = options.num_speculative_tokens
    if not is_int(size) or size < 0:
        raise ValueError(f"num_speculative_tokens must be an integer >= 0 (0 is plain decoding), got {size!r}")
    if not (verifier.lossless or options.lossy):
        raise ValueError(f"{verifier!r} changes the output's distribution; pass lossy=True to allow this")
    size = min(int(size), lm.max_positions)
    plan = drafter.plan(lm, max(size, 1))
    if size == 0 or isinstance(drafter, NoDraft):
        drafter, size = NoDraft(), 0
        plan = drafter.plan(lm, size)
    if plan.trees and not verifier.trees:
        able = ", ".join(repr(name) for name, known in VERIFIERS.items() if known.trees)
        raise ValueError(
            f"{verifier!r} judges chains, and {type(drafter).__name__} drafts trees ({plan.block - 1} tokens, {size} "
            f"deep); choose one of {able}, or a drafter of chains"
        )
    _check_width(options.block_width, drafter, plan, lm.max_positions)
    return drafter, verifier, size


def _check_width(asked: Any, drafter: Drafter, plan: Plan, most: int) -> None:
    """Raises ValueError unless the option ``block_width`` is None or can hold the drafter's widest block.

    A wider block has at most ``most`` tokens, as many as the model's context.
    """
    if asked is None:
        return
    highest = plan.block if plan.trees else max(plan.block, most)
    if not (is_int(asked) and plan.block <= asked <= highest):
        raise ValueError(
            f"block_width must be {'' if plan.trees else 'at least '}{plan.block} for {type(drafter).__name__}, whose "
            f"widest block is the last token and {plan.block - 1} drafted ones, got {asked!r}"
            + ("; a block of a tree can't be padded" if plan.trees else f"; give a width of at most {highest}")
        )


def _with(method: str, option: str, value: Any, names: Iterable[str]) -> Any:
    """The value of an option, an object with ``method``. ``names`` are those that stand for objects.

    Raises:
      ValueError: the value is no such object.
    """
    if isinstance(value, type) and hasattr(value, method):
        raise ValueError(f"{option} must be an object, and {value.__name__} is a class; give {value.__name__}(...)")
    if not hasattr(value, method):
        raise ValueError(
            f"{option} must be one of {', '.join(map(repr, names))} or an object with .{method}, got {value!r}"
        )
    return value


def _check_stops(lm: LM, options: Options) -> None:
    """Raises ValueError if a stop string is empty or no string, or if the model has no tokenizer to find strings."""
    if options.stop is not None and lm.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none; use eos_token_id")
    if not all(isinstance(s, str) and s for s in stop_strings(options)):
        raise ValueError(f"stop must be a non-empty string or a list of non-empty strings, got {options.stop!r}")
    for text in stop_strings(options):
        check_unicode("stop", text)


def _dated(lm: LM, given: Any, options: Options) -> Options:
    """The options, with today's date if the chat template asks for the date and the user gave none.

    The result states this date, so that the run can be repeated on another day.
    """
    in_chat = options.chat or any(map(is_conversation, prompts.listed(given)))
    if in_chat and options.date is None and lm.tokenizer is not None and lm.tokenizer.asks_for_date:
        return dataclasses.replace(options, date=datetime.date.today().isoformat())
    return options
