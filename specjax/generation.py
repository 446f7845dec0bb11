"""``generate`` and ``stream``: prompts in, tokens and text out. The host's side of :mod:`specjax.decode`."""

import dataclasses
import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, requests, trace
from specjax.drafters import NoDraft, PromptLookup
from specjax.metrics import Metrics, own_origin
from specjax.models.lm import LM
from specjax.requests import Options
from specjax.text import TextStream
from specjax.types import DecodeState, Drafter, Request, RoundInfo, Verifier
from specjax.verify import VERIFIERS

DRAFTERS = {"none": NoDraft(), "ngram": PromptLookup()}


@dataclasses.dataclass(frozen=True)
class Result:
    """What was generated; entry i of every list belongs to prompt i."""

    tokens: list[list[int]]  # new tokens, a stop token included
    texts: list[str] | None  # their text without special tokens; None if the model has no tokenizer
    finish_reasons: list[str | None]  # "stop" (stop token or stop string), "length"; None: the stream was left early
    metrics: list[Metrics]
    logprobs: list[list[float]] | None  # natural log, under the model's raw logits; None unless asked for
    prompt_tokens: list[list[int]]
    seconds: dict[str, float]  # wall time of "prefill" and "decode", with compilation unless ``warmup`` came first


@dataclasses.dataclass(frozen=True)
class Event:
    """One token of a stream."""

    row: int
    token: int
    text: str  # what this token adds; "" while a character is incomplete
    from_draft: bool  # drafted and accepted, or the target's own
    finish_reason: str | None  # set on a row's last token
    origin: str  # "accepted", "correction", "bonus" or "plain": as of Metrics.origins


class NoDistributionError(ValueError):
    """A row was left without any token of finite logit; ``result`` holds what was generated until then."""

    def __init__(self, message: str, result: Result):
        super().__init__(message)
        self.result = result


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked request, ready for the compiled functions."""

    lm: LM
    drafter: Drafter
    verifier: Verifier
    num_speculative_tokens: int
    prompts: list[list[int]]
    request: Request
    chunk: int
    options: Options

    @property
    def block(self) -> int:
        """Tokens of the widest block that is verified: K + 1, or more for trees."""
        return self.drafter.widths(self.num_speculative_tokens)[-1]

    def compile(self, streaming: bool = False) -> None:
        """Compiles :meth:`start` and :meth:`run` (or :meth:`round`), and runs nothing: jobs may do so in threads."""
        given = self.lm, self.drafter, self.request, self.num_speculative_tokens
        fixed = dict(chunk=self.chunk, logprobs=self.options.logprobs)
        started = decode.start_jit.lower(*given, **fixed).compile()
        # Where arrays lie is part of a program, but on one device nothing is pinned to it.
        state = started.out_info if self.lm.mesh is not None else decode.start_jit.eval_shape(*given, **fixed)
        loop = decode.round_jit if streaming else decode.run_jit
        loop.lower(self.lm, self.drafter, self.verifier, self.num_speculative_tokens, state).compile()

    def start(self, request: Request) -> DecodeState:
        size, logprobs = self.num_speculative_tokens, self.options.logprobs
        return decode.start_jit(self.lm, self.drafter, request, size, chunk=self.chunk, logprobs=logprobs)

    def run(self, state: DecodeState) -> DecodeState:
        return decode.run_jit(self.lm, self.drafter, self.verifier, self.num_speculative_tokens, state)

    def round(self, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        return decode.round_jit(self.lm, self.drafter, self.verifier, self.num_speculative_tokens, state)


def prepare(lm: LM, prompts: Any, options: Options) -> Job:
    """Checks everything that the host can check; raises ValueError before any device work."""
    drafter = _named("drafter", "none" if options.drafter is None else options.drafter, DRAFTERS, "propose")
    verifier = _named("verifier", options.verifier, VERIFIERS, "verify")
    size = options.num_speculative_tokens
    if not requests.is_int(size) or size < 0:
        raise ValueError(f"num_speculative_tokens must be an integer >= 0 (0 is plain decoding), got {size!r}")
    if not (verifier.lossless or options.lossy):
        raise ValueError(f"{verifier!r} changes the output's distribution; pass lossy=True if that is what you want")
    if options.stop is not None and lm.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none; use eos_token_id")
    if not all(isinstance(s, str) and s for s in stop_strings(options)):
        raise ValueError(f"stop must be a non-empty string or a list of such, got {options.stop!r}")
    drafter.check(lm)
    ids = requests.encode_prompts(lm, prompts, options.chat)
    size = min(int(size), lm.config.max_position_embeddings)
    if size == 0 or isinstance(drafter, NoDraft):
        drafter, size = DRAFTERS["none"], 0
    width = drafter.widths(size)[-1]
    if width > size + 1 and not verifier.trees:
        able = ", ".join(repr(name) for name, known in VERIFIERS.items() if known.trees)
        raise ValueError(
            f"{verifier!r} judges chains, and {type(drafter).__name__} drafts trees ({width - 1} tokens, {size} deep); "
            f"choose one of {able}, or a drafter of chains"
        )
    request, chunk = requests.build(lm, ids, options, headroom=width)
    return Job(lm, drafter, verifier, size, ids, request, chunk, options)


def stop_strings(options: Options) -> tuple[str, ...]:
    return (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())


def _named(what: str, value: Any, table: dict[str, Any], method: str) -> Any:
    value = table.get(value, value) if isinstance(value, str) else value
    if not hasattr(value, method):
        raise ValueError(
            f"{what} must be one of {', '.join(map(repr, table))} or an object with .{method}, got {value!r}"
        )
    return value


def generate(lm: LM, prompts: str | Sequence, **options) -> Result:
    """Decodes all prompts together, speculatively; the whole loop runs on the device.

    Args:
      lm: the target model.
      prompts: a string, a list of strings, or a list of token-id lists.
      **options: fields of :class:`specjax.requests.Options`.

    Returns:
      Tokens, texts, finish reasons and acceptance records.

    Raises:
      ValueError: for any option or prompt that can't be used, before any device work.
      NoDistributionError: if a row ends up with no finite logit (NaN weights, contradictory masks).
    """
    job = prepare(lm, prompts, Options(**options))
    if stop_strings(job.options):  # strings can only be looked for on the host
        rounds = Stream(job)
        for _ in rounds:
            pass
        return rounds.result()
    began = time.perf_counter()
    state = job.start(job.request)
    jax.block_until_ready(state.lengths)
    prefilled = time.perf_counter()
    state = job.run(state)
    record = ("tokens", "lengths", "failed", "rounds", "drafted", "accepted", "logprobs")
    host = jax.device_get({name: getattr(state, name) for name in record})
    seconds = {"prefill": prefilled - began, "decode": time.perf_counter() - prefilled}
    rows = [_Row(job) for _ in job.prompts]
    for i, (row, prompt) in enumerate(zip(rows, job.prompts, strict=True)):
        new = slice(len(prompt), host["lengths"][i])
        row.tokens = host["tokens"][i, new].tolist()
        row.drafted, row.accepted = (host[name][i, : host["rounds"][i]].tolist() for name in ("drafted", "accepted"))
        row.logprobs = host["logprobs"][i, new].tolist() if job.options.logprobs else []
        row.failed = bool(host["failed"][i])
        row.finish_reason = None if row.failed else row.reason_of_end(job, i)
    return _result(job, rows, seconds)


def stream(lm: LM, prompts: str | Sequence, **options) -> "Stream":
    """Like :func:`generate`, token by token: iterate over the events; ``.result()`` gives the record at any time."""
    return Stream(prepare(lm, prompts, Options(**options)))


def warmup(lm: LM, prompts: str | Sequence, streaming: bool = False, **options) -> None:
    """Compiles what ``generate`` (or ``stream``) with these arguments will run, and runs one block of it, on the first
    two tokens of each prompt.

    The first execution of a compiled program is slow too: kernels and weights are touched for the first time.
    """
    job = prepare(lm, prompts, Options(**options))
    lengths = jnp.minimum(job.request.prompt_lengths, 2)  # the programs don't depend on them, and reading takes time
    limit = jnp.minimum(job.request.limit, lengths + job.num_speculative_tokens + 2)
    request = job.request._replace(prompt_lengths=lengths, limit=limit)
    state = job.start(request)
    by_round = streaming or bool(stop_strings(job.options))
    state = job.round(state)[0] if by_round else job.run(state)
    jax.block_until_ready(state.lengths)


class _Row:
    """One request's output as the host knows it."""

    def __init__(self, job: Job):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.finish_reason: str | None = None
        self.failed = False
        self.text = TextStream(job.lm.tokenizer, stop_strings(job.options)) if job.lm.tokenizer is not None else None

    def reason_of_end(self, job: Job, index: int) -> str:
        stop_ids = np.asarray(job.request.stop_ids)[index]
        return "stop" if self.tokens and self.tokens[-1] in stop_ids else "length"


class Stream:
    """An iterator of :class:`Event` over a running request. Leaving it early is fine."""

    def __init__(self, job: Job):
        self._infos: list[RoundInfo] = []  # of NumPy arrays
        self._trace: list[list[dict]] = [[] for _ in job.prompts]
        self._described = 0  # so many of the infos are in the trace
        self._job = job
        self._rows = [_Row(job) for _ in job.prompts]
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._events = self._run()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def result(self) -> Result:
        """What has been streamed so far."""
        return _result(self._job, self._rows, self._seconds)

    @property
    def trace(self) -> list[list[dict]]:
        """Each row's rounds so far, as in the record of a run (``specjax.record.ROUND``), up to the last token read."""
        for info in self._infos[self._described :]:
            for row, entry in zip(self._trace, trace.rounds_of(info, self._job.lm.tokenizer), strict=True):
                row += [entry] if entry else []
        self._described = len(self._infos)
        rows = zip(self._trace, self._rows, self._job.prompts, strict=True)
        return [trace.cut(rounds, len(prompt) + len(row.tokens)) for rounds, row, prompt in rows]

    def _run(self) -> Iterator[Event]:
        job, began = self._job, time.perf_counter()
        state = job.start(job.request)
        running = np.asarray(job.request.limit) > np.asarray(job.request.prompt_lengths)
        for row, alive in zip(self._rows, running, strict=True):
            row.finish_reason = None if alive else "length"
        if not running.any():
            return
        jax.block_until_ready(state.lengths)
        self._seconds["prefill"] = time.perf_counter() - began
        began = time.perf_counter()
        state, info = job.round(state)
        while True:
            state, following = job.round(state)  # dispatched before the last one is read, so the device never waits
            info = jax.device_get(info)
            self._seconds["decode"] = time.perf_counter() - began
            self._infos.append(info)
            for index, row in enumerate(self._rows):
                if row.finish_reason is None and not row.failed:
                    yield from self._advance(index, row, info)
            if all(row.finish_reason is not None or row.failed for row in self._rows):
                break
            info = following
        self.result()  # raises if a row failed

    def _advance(self, index: int, row: _Row, info: RoundInfo) -> Iterator[Event]:
        row.failed = bool(info.failed[index])
        if row.failed:
            return
        row.drafted.append(int(info.drafted[index]))
        row.accepted.append(int(info.accepted[index]))
        committed, accepted = int(info.committed[index]), int(info.accepted[index])
        origins = ["accepted"] * accepted + [own_origin(accepted, int(info.drafted[index]))]
        for i in range(committed):
            row.tokens.append(int(info.tokens[index, i]))
            if self._job.options.logprobs:
                row.logprobs.append(float(info.logprobs[index, i]))
            piece = row.text.push(row.tokens[-1]) if row.text else ""
            if row.text and row.text.stopped:
                row.finish_reason = "stop"
            elif i == committed - 1 and not info.active[index]:
                row.finish_reason = row.reason_of_end(self._job, index)
            if row.text and row.finish_reason:
                piece += row.text.flush()
            yield Event(index, row.tokens[-1], piece, i < accepted, row.finish_reason, origins[i])
            if row.finish_reason:
                return


def _result(job: Job, rows: list[_Row], seconds: dict[str, float]) -> Result:
    tokenizer = job.lm.tokenizer
    metrics = [
        Metrics.from_record(row.drafted, row.accepted, len(row.tokens), job.num_speculative_tokens) for row in rows
    ]
    result = Result(
        tokens=[list(row.tokens) for row in rows],
        texts=None if tokenizer is None else [tokenizer.decode(row.tokens) for row in rows],
        finish_reasons=[row.finish_reason for row in rows],
        metrics=metrics,
        logprobs=[list(row.logprobs) for row in rows] if job.options.logprobs else None,
        prompt_tokens=job.prompts,
        seconds=dict(seconds),
    )
    failed = [(i, len(row.tokens)) for i, row in enumerate(rows) if row.failed]
    if failed:
        raise NoDistributionError(
            "no token has a finite logit in "
            + ", ".join(f"row {i} after {n} new tokens" for i, n in failed)
            + ": the weights hold NaN or infinity, or bias, masks and filters together forbid every token",
            result,
        )
    return result


# help() shows the options by name.
for _function in (generate, stream, warmup):
    _signature = inspect.signature(_function)
    _given = [p for p in _signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    _options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in dataclasses.fields(Options)
    ]
    setattr(_function, "__signature__", _signature.replace(parameters=[*_given, *_options]))  # noqa: B010
