"""One object for what decodes: target, drafter, verifier and K, bound together."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import prefill
from specjax.decode import round as rounds
from specjax.decode.types import DecodeState, Drafter, Plan, Request, RoundInfo, Verifier
from specjax.models.model import Model


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["target", "drafter"],
    meta_fields=["verifier", "num_speculative_tokens", "top_logprobs", "block_width"],
)
@dataclasses.dataclass(frozen=True)
class Decoder:
    """Target, drafter, verifier and K, as a pytree: weights are its leaves, so a decoder may be an argument of jit.

    Args:
      target: the model whose distribution the output has.
      drafter: proposes tokens.
      verifier: judges them; static.
      num_speculative_tokens: K, drafted tokens that a round can accept at most; static.
      top_logprobs: how many of the likeliest tokens a round reports at each position; static.
      block_width: the tokens a row of every target call in a round, padding included; static. All calls then have one
        shape, and a product's last bits depend on its shape. None: the narrowest of the plan's widths that holds every
        row's draft.
    """

    target: Model
    drafter: Drafter
    verifier: Verifier
    num_speculative_tokens: int
    top_logprobs: int = 0
    block_width: int | None = None

    @property
    def plan(self) -> Plan:
        """Block widths, taps, and whether drafts are trees. Raises ValueError as ``Drafter.plan``."""
        return self.drafter.plan(self.target, self.num_speculative_tokens)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths at which a round can call the target, rising."""
        return self.plan.widths if self.block_width is None else (self.block_width,)

    @property
    def headroom(self) -> int:
        """The number of entries that a round may write past the entries of a row's tokens but the last."""
        return max(self.plan.block, self.widths[-1])

    def start(
        self, request: Request, tokens: jax.Array, chunk: int, keep_history: bool = True, logprobs: bool = False
    ) -> DecodeState:
        """The state after the prompts, by :func:`specjax.decode.prefill.start`; compiled."""
        return start_jit(self, request, tokens, chunk=chunk, keep_history=keep_history, logprobs=logprobs)

    def feed(self, state: DecodeState, starts: jax.Array, chunk: int) -> DecodeState:
        """One chunk of each prompt, by :func:`specjax.decode.prefill.feed`; compiled. The state is donated."""
        return feed_jit(self, state, starts, chunk=chunk)

    def round(self, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        """One round, by :func:`specjax.decode.round.round`; compiled. The state is donated."""
        return round_jit(self, state)

    def run(self, state: DecodeState) -> DecodeState:
        """Rounds until no row is active, all on the device; compiled. The state is donated."""
        return run_jit(self, state)


def run(decoder: Decoder, state: DecodeState) -> DecodeState:
    """Rounds until no row is active."""
    return lax.while_loop(lambda state: jnp.any(state.active), lambda state: rounds.round(decoder, state)[0], state)


# The state is donated, so its caches are updated in place; weights never are.
start_jit = jax.jit(prefill.start, static_argnames=("chunk", "keep_history", "logprobs"))
feed_jit = jax.jit(prefill.feed, static_argnames="chunk", donate_argnames="state")
round_jit = jax.jit(rounds.round, donate_argnames="state")
run_jit = jax.jit(run, donate_argnames="state")


def lower_start(decoder: Decoder, request: Request, tokens: jax.Array, chunk: int, logprobs: bool) -> Any:
    """Compiles :meth:`Decoder.start` and runs nothing. -> the shapes of the state, for :func:`lower_rounds`."""
    given = decoder, request, tokens
    fixed = dict(chunk=chunk, keep_history=True, logprobs=logprobs)
    started = start_jit.lower(*given, **fixed).compile()
    # Where arrays lie is part of a program, but on one device nothing is pinned to a device.
    return started.out_info if decoder.target.mesh is not None else start_jit.eval_shape(*given, **fixed)


def lower_rounds(decoder: Decoder, state: Any, streaming: bool) -> None:
    """Compiles :meth:`Decoder.run`, or :meth:`Decoder.round` if streaming, and runs nothing."""
    (round_jit if streaming else run_jit).lower(decoder, state).compile()
