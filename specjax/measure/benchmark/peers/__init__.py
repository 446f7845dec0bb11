"""Other implementations on the same weights: plain and speculative decoding of one request, greedy."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.table import Table
from specjax.measure.benchmark.timed import Run


class Decoded(NamedTuple):
    """One run of a peer. The timed part of the run starts after the prefill and after the tokens that prefill gives."""

    # All new tokens.
    tokens: list[int]
    # The number of tokens that the timed part gave.
    timed: int
    # The seconds of the timed part.
    seconds: float
    # The number of target calls in the timed part.
    steps: int


class Peer(Protocol):
    """Another implementation. Making the object touches no device.

    Raises:
      ValueError: while the object is made, if a package or a folder that it needs is missing.
    """

    # The name of the implementation, with versions.
    name: str

    def load(self, case: Case) -> None:
        """Takes over the case's weights."""
        ...

    def decode(self, prompt: list[int], count: int, size: int) -> Decoded:
        """Generates ``count`` tokens after the prompt, and drafts ``size`` tokens at a time. 0 is plain decoding."""
        ...

    def free(self) -> None:
        """Gives the device's memory back."""
        ...


class Batching(Peer, Protocol):
    """A peer that decodes many requests at once."""

    def batch(self, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
        """Generates ``count`` tokens after each prompt, greedily, once what it compiles is compiled.

        Returns:
          The new tokens of each prompt, and the seconds from the first request to the last token.
        """
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
    """The peers, imported but without weights.

    Args:
      names: of ``NAMES``.
      gpt_fast: the folder of a checkout of gpt-fast, or None.

    Raises:
      ValueError: a package or the folder is missing, or the folder is given without the peer "gpt-fast".
    """
    if gpt_fast is not None and "gpt-fast" not in names:
        raise ValueError("--gpt-fast is used only with --peers gpt-fast; add it to --peers, or leave the folder out")
    return [_MAKERS[name](gpt_fast) for name in names]


def check(shapes: Sequence[Any], batch: int, devices: int, changes: Any) -> None:
    """Raises ValueError for a case that peers can't run.

    Args:
      shapes: the configurations of the target and the draft. Peers run Llamas.
      batch: B. Peers run one request.
      devices: the number of devices. Peers run on one.
      changes: the options that store weights or caches in eight bits, if any. Peers run without these.
    """
    others = {shape.model_type for shape in shapes} - {"llama"}
    if others:
        raise ValueError(f"--peers run models of the type llama, got {', '.join(sorted(others))}")
    if batch != 1 or devices != 1 or changes:
        raise ValueError(
            "--peers decode one request on one device in the models' own dtype, without quantisation; got "
            f"batch {batch}, {devices} device(s), quantisation {changes or 'none'}"
        )


def compare(peer: Peer, case: Case, table: Table, runs: Mapping[str, Run], repeats: int = 3) -> None:
    """Adds two rows: the peer's plain step and its round, with specjax's tokens a second over the peer's.

    Args:
      peer: the peer.
      case: the models and the request.
      table: the table that the figures go to.
      runs: specjax's runs "plain" and "T = 0", measured in this process.
      repeats: the number of timed runs of the peer.
    """
    peer.load(case)
    prompt = case.prompts()[0]
    floors = {"step": case.step_floor, "round": case.num_speculative_tokens * case.draft_floor + case.step_floor}
    for kind, size, ours in (("step", 0, runs["plain"]), ("round", case.num_speculative_tokens, runs["T = 0"])):
        peer.decode(prompt, case.max_new_tokens, size)  # this run compiles and is not counted
        found = [peer.decode(prompt, case.max_new_tokens, size) for _ in range(repeats)]
        speed = statistics.median(run.timed / run.seconds for run in found)
        run = min(found, key=lambda run: abs(run.timed / run.seconds - speed))
        text = [prompt[-1], *run.tokens]
        times = ours.tokens_per_second / speed
        right = sum(int(case.successor[a]) == b for a, b in zip(text[:-1], text[1:], strict=True))
        table.add(
            f"{peer.name}, a {kind}",
            run.seconds / run.steps,
            floors[kind],
            f"{speed:.1f} tokens/s, {run.timed / run.steps:.2f} a {kind}, specjax {times:.2f} x, "
            f"{right} of {len(run.tokens)} tokens as planted",
            tokens_per_second=speed,
            tokens_per_round=run.timed / run.steps,
            specjax_times=times,
            as_planted=right / len(run.tokens),
        )
    peer.free()
