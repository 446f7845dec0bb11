"""The engine's tokens per second beside those of one ``generate`` call with all prompts, and the delay of a prefix hit.

Both decode the same prompts with the same drafter. ``generate`` reads all prompts together and then decodes with one
program on the device. The engine reads the prompts one after the other, between rounds, and the host sees each round.
"""

import time
from typing import Any

from specjax.drafters import NoDraft
from specjax.engine.engine import Engine
from specjax.generation.generate import prepare
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.peers import Batching
from specjax.measure.benchmark.table import Table


def serving(case: Case, table: Table, batches: tuple[int, ...], chunk: int | None) -> None:
    """Times both for each number of requests, with plain decoding and with each of the case's drafters.

    Args:
      case: the models and the request.
      table: the table that the figures go to.
      batches: the numbers of requests at once. The engine has as many slots.
      chunk: the prompt tokens that one call of the engine reads; None: the engine's default.
    """
    size = case.num_speculative_tokens
    ways: dict[str, dict[str, Any]] = {"plain": dict(drafter=NoDraft(), num_speculative_tokens=0)}
    for draft in case.drafts:
        name = f"{draft.name}, K = {size}".removeprefix(", ")
        ways[name] = dict(drafter=draft.drafter(size), num_speculative_tokens=size)
    for batch in batches:
        prompts, plain = case.prompts(batch), 0.0
        for name, way in ways.items():
            library, texts = _library(case, prompts, way)
            figures, same = _engine(case, prompts, way, chunk, texts)
            plain = plain or figures["decoding"]
            table.add(
                f"engine, {name}, {batch} requests, a round",
                figures["round"],
                None,
                f"decoding {figures['decoding']:.1f} tokens/s, generate {library:.1f}, ratio "
                f"{figures['decoding'] / library:.3f}, {figures['decoding'] / plain:.2f} x plain; with prompts "
                f"{figures['whole']:.1f} tokens/s; first token after "
                f"{figures['first'] * 1e3:.1f} ms (median), same texts: {same}",
                **figures,
                generate=library,
                times_plain=figures["decoding"] / plain,
            )


def against(peer: Batching, case: Case, table: Table, batches: tuple[int, ...]) -> None:
    """Times a peer's own batching of the same prompts, beside the engine's rows, which the table has already.

    Args:
      peer: the peer. It decodes plainly.
      case, table, batches: as of :func:`serving`.
    """
    peer.load(case)
    for batch in batches:
        prompts = case.prompts(batch)
        texts, seconds = peer.batch(prompts, case.max_new_tokens)
        speed = sum(map(len, texts)) / seconds
        planted = sum(text == case.planted_text(p, len(text)) for p, text in zip(prompts, texts, strict=True))
        ours = {
            row["name"].split(", ")[1]: row["whole"] / speed
            for row in table.rows
            if row["name"].startswith("engine, ") and f", {batch} requests" in row["name"]
        }
        times = ", ".join(f"{name} {ratio:.2f} x" for name, ratio in ours.items())
        table.add(
            f"{peer.name}, {batch} requests, a token of each",
            seconds / case.max_new_tokens,
            None,
            f"with prompts {speed:.1f} tokens/s, engine: {times}; {planted} of {batch} texts as planted",
            whole=speed,
            specjax_times=ours,
        )
    peer.free()


def _library(case: Case, prompts: list[list[int]], way: dict[str, Any]) -> tuple[float, list[list[int]]]:
    """The tokens per second of decoding in ``generate``, prompts left out, and the texts."""
    job = prepare(case.target, prompts, max_new_tokens=case.max_new_tokens, ignore_eos=True, **way)
    job.warmup()
    runs = [job.generate() for _ in range(2)]
    best = min(runs, key=lambda run: run.seconds["decode"])
    return sum(map(len, best.tokens)) / best.seconds["decode"], best.tokens


def _engine(
    case: Case, prompts: list[list[int]], way: dict[str, Any], chunk: int | None, texts: list[list[int]]
) -> tuple[dict[str, float], bool]:
    """The engine's figures, and whether its texts are ``texts``.

    "decoding" is the tokens per second while all requests run: from the moment at which the last request got its first
    tokens to the moment at which the first request ended. "whole" counts from the first submission to the last token.
    """
    capacity = case.given_length + case.max_new_tokens
    with Engine(
        case.target, slots=len(prompts), capacity=capacity, prefill_chunk=chunk, prefix_cache=False, **way
    ) as engine:
        for _ in range(2):
            before, began = engine.stats().rounds, time.perf_counter()
            stamps: list[list[float]] = [[] for _ in prompts]
            handles = [
                engine.submit(p, max_new_tokens=case.max_new_tokens, ignore_eos=True, listener=clock(stamps[row]))
                for row, p in enumerate(prompts)
            ]
            results = [handle.result() for handle in handles]
            seconds, rounds = time.perf_counter() - began, engine.stats().rounds - before
    full, idle = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    inside = sum(full < moment <= idle for times in stamps for moment in times)
    firsts = sorted(times[0] - began for times in stamps)
    figures = {
        "decoding": inside / max(idle - full, 1e-9),
        "whole": sum(map(len, stamps)) / seconds,
        "round": seconds / rounds,
        "first": firsts[len(firsts) // 2],
    }
    return figures, [result.tokens[0] for result in results] == texts


def clock(stamps: list[float]) -> Any:
    """A listener that notes the time of each token."""
    return lambda event: stamps.append(time.perf_counter())
