"""``generate`` with ``num_beams``: checks what beam search can't be combined with, runs it, and packs the result."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from specjax.decode.beam_round import BeamSearch
from specjax.decode.beams import Finished, Rules
from specjax.decode.numeric import LARGEST_INT, Number, in_range, is_int
from specjax.decode.types import Drafter, History, Request
from specjax.generation import requests
from specjax.generation.job import Job
from specjax.generation.metrics import Metrics
from specjax.generation.options import OF_BEAMS, Options, changed
from specjax.generation.prepare import job_of
from specjax.generation.result import NoDistributionError, Result
from specjax.generation.stops import stop_token_ids
from specjax.models import axes
from specjax.models.lm import LM

# The options that beam search does not take, and why.
REFUSED = {
    "verifier": "the target's own search judges the drafts",
    "block_width": "all calls of the target have one width",
    "stop": "only the host could look for strings; eos_token_id names tokens that end a text",
    "logprobs": "Result.scores has the log-probability of each text",
    "top_k": "all tokens compete",
    "top_p": "all tokens compete",
    "min_p": "all tokens compete",
    "capacity": "the room of a prompt's beams follows from num_beams and max_new_tokens",
}
PENALTY = Number(1.0, np.float32, lambda value: in_range(value, -5, 5), "a number from -5 to 5")


def beam_search(lm: LM, prompts: Any, options: Options) -> Result:
    """Beam search, with speculation if there is a drafter. Arguments, result and errors: :func:`specjax.generate`."""
    _check(options)
    without = {name: getattr(Options(), name) for name in OF_BEAMS}
    job = job_of(lm, prompts, dataclasses.replace(options, **without))
    search, request, tokens, rules = _search(job, options)
    began = time.perf_counter()
    read = search.decoder.start(request, tokens, job.chunk)
    jax.block_until_ready(read.lengths)
    prefilled = time.perf_counter()
    state = search.run(search.start(read, rules))
    finished, history = axes.on_host((state.finished, state.history), lm.mesh)
    seconds = {"prefill": prefilled - began, "decode": time.perf_counter() - prefilled}
    return _result(job, int(options.num_return_sequences), finished, history, seconds)


def _check(options: Options) -> None:
    """Raises ValueError if an option can't be used in beam search. Nothing has run on the device by then."""
    for name in changed(options, tuple(REFUSED)):
        raise ValueError(f"{name} can't be combined with num_beams: {REFUSED[name]}; leave {name} out")
    if np.any(np.asarray(options.temperature, object) != 0):
        raise ValueError(
            f"temperature must be 0 in beam search, which samples nothing, got {options.temperature!r}; leave "
            "temperature or num_beams out"
        )
    if not (is_int(options.num_beams) and options.num_beams >= 1):
        raise ValueError(f"num_beams must be an integer of at least 1, got {options.num_beams!r}")
    if not (is_int(options.num_return_sequences) and 1 <= options.num_return_sequences <= options.num_beams):
        raise ValueError(
            f"num_return_sequences must be an integer from 1 to num_beams, which is {options.num_beams}, got "
            f"{options.num_return_sequences!r}"
        )
    wide = options.num_draft_beams
    if wide is not None and not (is_int(wide) and wide >= options.num_beams):
        raise ValueError(
            f"num_draft_beams must be an integer of at least num_beams, which is {options.num_beams}, or None, got "
            f"{wide!r}"
        )
    early = options.early_stopping
    if not (isinstance(early, bool) or (isinstance(early, str) and early == "never")):
        raise ValueError(f"early_stopping must be True, False or 'never', got {options.early_stopping!r}")


def _search(job: Job, options: Options) -> tuple[BeamSearch, Request, Any, Rules]:
    """The search, the request, the prompts i32[B, S] with room for all beams, and the rules.

    Raises:
      ValueError: the drafter can't draft for beams, or a prompt has no room for a new token.
    """
    drafter, size, width = job.decoder.drafter, job.decoder.num_speculative_tokens, int(options.num_beams)
    _check_drafter(drafter, size, options)
    wide = 2 * width if options.num_draft_beams is None else int(options.num_draft_beams)
    new = job.request.limit - job.request.prompt_lengths
    if (new < 1).any():
        row = int(np.argmin(new))
        raise ValueError(
            f"prompt {row} has no room for a new token: give max_new_tokens of at least 1, and a prompt shorter than "
            f"the model's context of {job.decoder.target.max_positions}"
        )
    needed = int(np.max(job.request.prompt_lengths + width * new.astype(object))) + width + size * wide
    if needed > LARGEST_INT:
        raise ValueError(
            f"num_beams={width} needs room for {needed} tokens a prompt, more than {LARGEST_INT}; give fewer beams, "
            "fewer draft beams or fewer new tokens"
        )
    batch, longest = job.tokens.shape
    tokens = np.zeros((batch, requests.bucket(max(needed, longest), job.chunk)), np.int32)
    tokens[:, :longest] = job.tokens
    penalty = PENALTY.array("length_penalty", options.length_penalty, batch)
    rules: list[Any] = [
        np.ones(batch, np.float32) if penalty is None else penalty,
        np.full(batch, options.early_stopping is True),
        np.full(batch, options.early_stopping == "never"),
    ]
    stops = len(stop_token_ids(job.decoder.target, job.options))  # without padding: each one means W more candidates
    request = job.request._replace(stop_ids=job.request.stop_ids[:, :stops])
    return BeamSearch(job.decoder, width, wide), request, tokens, Rules(*rules)


def _check_drafter(drafter: Drafter, size: int, options: Options) -> None:
    """Raises ValueError if a drafter can't draft for beams, or an option of drafts is given without a drafter."""
    if not hasattr(drafter, "propose_beams"):
        raise ValueError(
            f"{type(drafter).__name__} can't draft for beams; give specjax.drafters.DraftModel(lm), or None for plain "
            "beam search"
        )
    if temperature := getattr(drafter, "temperature", None):
        raise ValueError(
            f"a draft temperature has no effect on beams, got {type(drafter).__name__} with {temperature!r}; leave the "
            "temperature out"
        )
    if size == 0 and options.num_draft_beams is not None:
        raise ValueError(
            f"num_draft_beams={options.num_draft_beams} needs a draft: give specjax.drafters.DraftModel(lm), and "
            "num_speculative_tokens of at least 1; or leave num_draft_beams out"
        )


def _result(job: Job, count: int, finished: Finished, history: History, seconds: dict[str, float]) -> Result:
    """The best ``count`` texts of each prompt.

    Raises:
      NoDistributionError: there are fewer. The error holds the result, in which the missing texts have no tokens.
    """
    seeds: Any = job.options.seed  # one a prompt
    tokenizer, stops = job.decoder.target.tokenizer, stop_token_ids(job.decoder.target, job.options)
    tokens, reasons, scores = [], [], finished.scores[:, :count].ravel().tolist()
    for row, prompt in enumerate(job.prompts):
        for i in range(count):
            there = np.isfinite(finished.scores[row, i])
            tokens.append(finished.tokens[row, i, len(prompt) : finished.lengths[row, i]].tolist() if there else [])
            reasons.append(("stop" if tokens[-1][-1] in stops else "length") if there else None)
    size, metrics = job.decoder.num_speculative_tokens, []
    for drafted, accepted, rounds in zip(history.drafted, history.accepted, history.rounds, strict=True):
        accepted = accepted[:rounds]
        metrics += [Metrics.from_record(drafted[:rounds], accepted, int(sum(accepted)) + int(rounds), size)] * count
    result = Result(
        tokens=tokens,
        texts=None if tokenizer is None else [tokenizer.decode(ids) for ids in tokens],
        finish_reasons=reasons,
        metrics=metrics,
        logprobs=None,
        prompt_tokens=[prompt for prompt in job.prompts for _ in range(count)],
        stop_token_ids=stops,
        date=job.options.date,
        seconds=seconds,
        seeds=[seed for seed in seeds for _ in range(count)],
        scores=scores,
    )
    missing = sorted({i // count for i, reason in enumerate(reasons) if reason is None})
    if missing:
        raise NoDistributionError(
            f"fewer than num_return_sequences={count} texts have a finite score for "
            + ", ".join(f"prompt {row}" for row in missing)
            + ": the weights hold NaN or infinity, or the options forbid too many tokens; ask for fewer texts",
            result,
        )
    return result
