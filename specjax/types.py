"""The shared shapes: what a drafter proposes, what a verifier answers, what a round carries and reports.

B rows, K the most drafted tokens that a round can accept, N drafted tokens in all (K unless a draft is a tree), V
vocabulary, L token capacity. Axis 0 of every leaf is the row.
"""

from typing import Any, NamedTuple, Protocol

import jax

from specjax.models.cache import KVCache
from specjax.models.llama import Output
from specjax.models.lm import LM
from specjax.sampling import SamplingParams


class Draft(NamedTuple):
    """The proposed tokens of a row: a chain of K, or a tree of N at most K deep (:mod:`specjax.tree`).

    In a tree the last committed token is node 0 and token i is node i + 1. Parents come before their children, and
    children of one node are judged in the order in which they stand. A child's q is what it was drawn from given its
    earlier siblings: renormalised without them, if no two are to be alike.
    """

    tokens: jax.Array  # i32[B, N]
    valid: jax.Array  # bool[B, N]: proposed at all; nothing below a False counts, though ``Outcome.answers`` has it
    probs: jax.Array | None  # f32[B, N, V], the very q each token was drawn from; None: point masses (greedy, n-gram)
    parents: jax.Array | None = None  # i32[B, N] node numbers; None: a chain
    least: jax.Array | None = None  # i32[B] drafted tokens that are run, valid or not, as their answers are wanted
    # How sure the drafter was, whatever temperature and filters made of q (None: q is all there is to know).
    confidence: jax.Array | None = None  # f32[B, N] of each token, by the softmax of ``sampling.unsharpened``
    entropy: jax.Array | None = None  # f32[B, N] the entropy of that law over log V, from 0 to 1; NaN without a law


class Verdict(NamedTuple):
    """A verifier's answer."""

    count: jax.Array  # type: ignore[assignment]  # i32[B] drafted tokens accepted
    token: jax.Array  # i32[B] the correction, or the bonus after full acceptance
    node: jax.Array | None = None  # i32[B] of a tree, the last node accepted: it and those above it are the ``count``


class Request(NamedTuple):
    """What is asked for, as arrays. All of it is traced: other values of these shapes compile nothing.

    Capacity L leaves room for a whole block past every limit, since slices are clamped silently: limit + N + 1 <= L.
    """

    key: jax.Array  # key[B]; never advanced
    sampling: SamplingParams
    stop_ids: jax.Array  # i32[B, E], padded with NO_TOKEN
    limit: jax.Array  # i32[B] length at which the row ends, prompt included
    prompt_lengths: jax.Array  # i32[B]
    tokens: jax.Array  # i32[B, L]; meaningful below the row's length


class DecodeState(NamedTuple):
    """All that a round carries. On entry ``cache`` covers ``lengths - 1`` tokens: the last one is not yet fed."""

    # The request.
    key: jax.Array
    sampling: SamplingParams
    stop_ids: jax.Array
    limit: jax.Array
    prompt_lengths: jax.Array
    # Evolving.
    tokens: jax.Array  # i32[B, L]
    lengths: jax.Array  # i32[B]
    active: jax.Array  # bool[B]
    failed: jax.Array  # bool[B]: stopped because no token had a finite logit
    cache: KVCache  # the target's
    drafter: Any  # the drafter's own state
    # The record (specjax.metrics reads it): one entry a round.
    rounds: jax.Array  # i32[B]
    drafted: jax.Array  # i32[B, L] drafted tokens that were verified in each round; of a tree, its levels
    accepted: jax.Array  # i32[B, L] of those, accepted and committed
    logprobs: jax.Array | None  # f32[B, L] of each committed token under the raw logits; None unless asked for


class Outcome(NamedTuple):
    """What a drafter learns of a round, beside the new state. Of a tree: along its accepted path, as of a chain.

    What a drafter makes no use of is not computed for it.
    """

    count: jax.Array  # type: ignore[assignment]  # i32[B] drafted tokens accepted and committed
    drafted: jax.Array  # i32[B] drafted tokens that were verified; of a tree, its levels
    p: jax.Array  # f32[B, K+1, V] what the target was sampled from, at every position of the block
    logits: jax.Array  # f32[B, K+1, V] before the transforms
    hidden: jax.Array  # [B, K+1, H] the target's last hidden states
    taps: dict[int, jax.Array]  # [B, K+1, H] its hidden states after as many layers as the drafter's ``taps`` name
    draft: Draft  # what was judged, another drafter's if this one stands beside others
    # i32[B, N+1] the target's likeliest token at each node of it, valid or not; 0 past the width that was run.
    answers: jax.Array


class RoundInfo(NamedTuple):
    """One round as an observer sees it. A tree is shown as one token a level: those accepted, then at each level the
    first drafted below them, or the first of all where there is none (``tree.Tree.line``)."""

    starts: jax.Array  # i32[B] length before the round
    tokens: jax.Array  # i32[B, K+1]; the first ``committed`` count
    committed: jax.Array  # i32[B]
    accepted: jax.Array  # i32[B]
    draft: jax.Array  # i32[B, K] tokens as proposed
    drafted: jax.Array  # i32[B] how many of them were verified: the depth of the row's draft
    p: jax.Array  # f32[B, K] the target's probability of each
    q: jax.Array  # f32[B, K] the draft's
    entropy: jax.Array  # f32[B, K] entropy of each drafted position's q over log V, from 0 to 1
    logprobs: jax.Array  # f32[B, K+1] raw log-probability of each token
    active: jax.Array  # bool[B] after the round
    failed: jax.Array  # bool[B]


class Drafter(Protocol):
    """Proposes tokens. A pytree: weights are its leaves, configuration is static; its state travels separately.

    Laws, each tested for every drafter (specjax.testing): axis 0 of every state leaf is the row; what is reported as
    q is the array that was sampled from; whether a position is proposed (``valid``) may depend on the tokens before
    it, never on its own or later ones; rollback goes by absolute lengths; the proposal after any history equals the
    proposal of a fresh ``init`` on the same prefix; rows don't see each other.

    Of the state that ``propose`` and ``commit`` return, only ``drafter`` is theirs to change, and the entries of the
    target's cache from ``lengths - 1`` on, which are stale: the target's own call writes them next.
    """

    def widths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        """Block widths to compile, rising to N + 1; a round runs the narrowest that holds every row's draft: what is
        valid of it, and the first ``Draft.least``.

        N = K unless the drafts are trees.

        Raises:
          ValueError: if it can't draft K deep.
        """
        ...

    def taps(self, target: LM) -> tuple[int, ...]:
        """After how many of the target's layers it wants to see the hidden states, in ``Outcome.taps``."""
        ...

    def check(self, target: LM) -> None:
        """Raises ValueError, before any device work, if this drafter can't serve this target."""
        ...

    def init(self, target: LM, batch: int, capacity: int, num_speculative_tokens: int) -> Any:
        """The state of ``batch`` empty rows, for sequences of up to ``capacity`` tokens."""
        ...

    def follow(self, target: LM, own: Any, request: Request, starts: jax.Array, out: Output) -> Any:
        """Sees the target read a block of the prompt, tokens from ``starts`` i32[B] on; what comes past a row's last
        token but one is padding. Returns its own state; nothing needs to be learned here that ``resume`` can't."""
        ...

    def resume(self, target: LM, state: DecodeState) -> DecodeState:
        """Makes up for what it did not see: prompts that it did not follow, rounds of which it learned no outcome.

        Under a cascade it is asked to before each proposal, elsewhere never.
        """
        ...

    def propose(
        self, target: LM, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DecodeState]:
        """Up to K tokens after each row's last; one for absolute position n is drawn with ``random.at(keys, n)``.

        Siblings in a tree may share one draw of noise, as Gumbel-top-k does, or fold their rank in
        (``random.siblings``). So may nodes of one depth with different parents: only one of these is ever judged.
        """
        ...

    def commit(self, target: LM, state: DecodeState, outcome: Outcome | None) -> DecodeState:
        """Learns of the round that led to ``state``; None if rows were only cut back, as under a cascade."""
        ...


class Verifier(Protocol):
    """Judges a draft against the target's distribution: arrays in, verdict out. A frozen dataclass, static in jit."""

    lossless: bool
    trees: bool  # whether it judges trees

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        """The key[B] that drafters draw with, from the rows' keys and lengths i32[B]."""
        ...

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        """Accepts a prefix of the draft and draws one more token.

        Args:
          p: f32[B, N+1, V] target probabilities at each node, conditioned on the drafted tokens up to it.
          draft: nothing valid stands below anything invalid, and p is finite at the parent of whatever is valid.
          keys: key[B], the rows' own.
          lengths: i32[B]: a drafted token of depth d stands at absolute position lengths + d - 1.
        """
        ...
