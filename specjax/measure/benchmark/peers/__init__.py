"""Other implementations on the very same weights: plain and speculative decoding, greedy, one request."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.table import Table
from specjax.measure.benchmark.timed import Run


class Decoded(NamedTuple):
    """One run of a peer. Seconds, steps and ``timed`` leave out the prefill, and what came along with it."""

    tokens: list[int]  # all new ones
    timed: int  # how many of them came in those seconds
    seconds: float
    steps: int  # target calls in those seconds


class Peer(Protocol):
    """Made without touching a device; raises ValueError if what it needs is missing."""

    name: str  # with versions

    def load(self, case: Case) -> None:
        """Takes over the case's weights."""
        ...

    def decode(self, prompt: list[int], count: int, size: int) -> Decoded:
        """``count`` tokens after the prompt, by a draft of ``size`` tokens at a time; 0 is plain decoding."""
        ...

    def free(self) -> None:
        """Gives the device's memory back."""
        ...


def _transformers(gpt_fast: str | None) -> Peer:
    from specjax.measure.benchmark.peers.hugging_face import Transformers

    return Transformers()


def _gpt_fast(folder: str | None) -> Peer:
    from specjax.measure.benchmark.peers.gpt_fast import GptFast

    return GptFast(folder)


_MAKERS: dict[str, Callable[[str | None], Peer]] = {"transformers": _transformers, "gpt-fast": _gpt_fast}
NAMES = tuple(_MAKERS)


def load(names: Sequence[str], gpt_fast: str | None) -> list[Peer]:
    """The peers by name, imported but without weights; ``gpt_fast`` is the folder of a checkout.

    Raises:
      ValueError: a package or the folder is missing.
    """
    if gpt_fast is not None and "gpt-fast" not in names:
        raise ValueError("--gpt-fast is used only with --peers gpt-fast")
    return [_MAKERS[name](gpt_fast) for name in names]


def check(batch: int, devices: int, changes: Any) -> None:
    """Raises ValueError for a case that peers can't run: they take one request, on one device, weights as they are."""
    if batch != 1 or devices != 1 or changes:
        raise ValueError("--peers decode one request on one device in the models' own dtype, without quantisation")


def compare(peer: Peer, case: Case, table: Table, runs: Mapping[str, Run], repeats: int = 3) -> None:
    """Two rows: the peer's plain step and its round, with our tokens a second over its own.

    Args:
      runs: our "plain" and "T = 0", measured in this process.
    """
    peer.load(case)
    prompt = case.prompts()[0]
    floors = {"step": case.step_floor, "round": case.num_speculative_tokens * case.draft_floor + case.step_floor}
    for what, size, ours in (("step", 0, runs["plain"]), ("round", case.num_speculative_tokens, runs["T = 0"])):
        peer.decode(prompt, case.max_new_tokens, size)  # compiles all that the others need, and is not counted
        found = [peer.decode(prompt, case.max_new_tokens, size) for _ in range(repeats)]
        speed = statistics.median(run.timed / run.seconds for run in found)
        run = min(found, key=lambda run: abs(run.timed / run.seconds - speed))
        text = [prompt[-1], *run.tokens]
        times = ours.tokens_per_second / speed
        right = sum(int(case.successor[a]) == b for a, b in zip(text[:-1], text[1:], strict=True))
        table.add(
            f"{peer.name}, a {what}",
            run.seconds / run.steps,
            floors[what],
            f"{speed:.1f} tokens/s, {run.timed / run.steps:.2f} a {what}, specjax {times:.2f} x, "
            f"{right} of {len(run.tokens)} tokens as planted",
            tokens_per_second=speed,
            tokens_per_round=run.timed / run.steps,
            specjax_times=times,
            as_planted=right / len(run.tokens),
        )
    peer.free()
