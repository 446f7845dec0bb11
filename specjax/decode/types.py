"""The shared shapes: what a drafter proposes, what a verifier answers, what a round carries and reports.

B is the number of rows. K is ``num_speculative_tokens``, the most drafted tokens that a round can accept in one row.
N is the number of drafted tokens of a row: K for a chain, more for a tree. V is the vocabulary size, L the token
capacity. Axis 0 of every array is the row, so rows can be taken, inserted and permuted by ``specjax.decode.rows``.
"""

from typing import Any, NamedTuple, Protocol

import jax

from specjax.decode.draft_shape import CHAIN, Shape
from specjax.decode.likeliest import Top
from specjax.decode.sampling import Context, SamplingParams
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output


class Plan(NamedTuple):
    """What follows from a drafter, a target and K before anything runs."""

    # Block widths that are compiled, rising to N + 1. A round runs the narrowest one that holds every row's draft.
    widths: tuple[int, ...]
    # The drafter sees the target's hidden states after these numbers of layers (``Outcome.taps``).
    taps: tuple[int, ...] = ()
    # Whether drafts may be trees. A verifier that judges only chains is then refused.
    trees: bool = False
    # Whether the drafter has probabilities of its own, by which a policy can judge how sure the drafter is.
    gives_probs: bool = True
    # Whether the drafter calls a model on arrays whose shape depends on K, so that a draft's last bits depend on K.
    shaped_by_size: bool = False
    # Whether such a shape is chosen anew in each round, by all rows: then a draft's last bits depend on other rows.
    shared_shapes: bool = False

    @property
    def block(self) -> int:
        """Tokens of the widest block, N + 1: a round may write as many entries past a row's last token but one."""
        return self.widths[-1]


class Draft(NamedTuple):
    """The tokens that a drafter proposes for each row: a chain of K tokens, or a tree of N tokens at most K deep.

    In a tree the last committed token is node 0, and drafted token i is node i + 1. Parents stand before their
    children, and the children of one node are judged in the order in which they stand.
    """

    # i32[B, N] The drafted tokens.
    tokens: jax.Array
    # bool[B, N] Whether each token is proposed. If a token is not proposed, all its descendants are ignored too. The
    # target may still run on ignored tokens; the target's answers to them are in ``Outcome.answers``.
    valid: jax.Array
    # f32[B, N, V] q, the distribution that each token was drawn from. For a child that is q given the siblings drawn
    # before it: without replacement, q with the siblings' mass removed, renormalised. None: every token is certain
    # (a point mass), as in greedy drafts and n-grams.
    probs: jax.Array | None
    # Which drafted tokens stand before which: a chain, a fixed tree, or a tree grown on the device.
    shape: Shape = CHAIN
    # i32[B] The target runs on at least this many drafted tokens, even on invalid ones. Jacobi and Lookahead need the
    # answers there. None: no token needs to run that is not valid.
    run_at_least: jax.Array | None = None
    # f32[B, N] The probability of each token by the softmax of ``sampling.unsharpened``: how sure the drafter was
    # before temperature and filters. None: q is all there is to know.
    confidence: jax.Array | None = None
    # f32[B, N] The entropy of that unsharpened distribution over log V, from 0 to 1; NaN where there is none.
    entropy: jax.Array | None = None


class Verdict(NamedTuple):
    """A verifier's answer."""

    # i32[B] How many drafted tokens are accepted.
    accepted: jax.Array
    # i32[B] The target's own token after them: a correction, or a bonus if the whole draft is accepted.
    token: jax.Array
    # i32[B] For a tree, the last accepted node. This node and the nodes above it are the accepted ones. None: a chain.
    node: jax.Array | None = None


class Request(NamedTuple):
    """What is asked for in each row. All values are traced: other values of the same shapes compile nothing."""

    # key[B] The row's random key. Keys are never advanced: draws are addressed by position (specjax.random).
    key: jax.Array
    # How the row's tokens are sampled.
    sampling: SamplingParams
    # i32[B, E] Tokens that end the row, padded with NO_TOKEN.
    stop_ids: jax.Array
    # i32[B] The length at which the row ends, prompt included. Slices are clamped silently, so the capacity must leave
    # room for a whole block past every limit: limit + N + 1 <= L.
    limit: jax.Array
    # i32[B] The number of prompt tokens.
    prompt_lengths: jax.Array


class History(NamedTuple):
    """The history of a run: one entry a round, and one a token. ``specjax.generation.metrics`` reads it."""

    # i32[B] How many rounds the row took part in.
    rounds: jax.Array
    # i32[B, L] Drafted tokens that were verified in each round; for a tree, the depth of the draft.
    drafted: jax.Array
    # i32[B, L] How many of them were accepted and committed.
    accepted: jax.Array
    # f32[B, L] The log-probability of each committed token under the raw logits. None unless asked for.
    logprobs: jax.Array | None
    # [B, L, n] The likeliest tokens at the position of each committed token. None unless asked for.
    top: Top | None


class DecodeState(NamedTuple):
    """All that one round hands to the next.

    On entry to a round the target's cache holds entries for ``lengths - 1`` tokens: the last token is not yet fed.
    """

    # What is asked for. It stays the same for as long as the row runs.
    request: Request
    # i32[B, L] Prompt and committed tokens; meaningful below the row's length.
    tokens: jax.Array
    # i32[B] How many tokens are committed, prompt included.
    lengths: jax.Array
    # bool[B] Whether the row still runs.
    active: jax.Array
    # bool[B] Whether the row ended because no token had a finite logit.
    failed: jax.Array
    # The target's cache.
    cache: KVCache
    # The drafter's own state.
    drafter: Any
    # The history of the run. None: nobody reads it, and each round's RoundInfo is read instead.
    history: History | None

    def context(self, path: jax.Array) -> Context:
        """The tokens before each scored position, where drafted tokens i32[B, T, D] (then NO_TOKEN) lead there."""
        return Context(self.tokens, self.lengths, self.request.prompt_lengths, path, self.cache.first)


class Scored(NamedTuple):
    """A draft and what the target says to it."""

    # The draft, without the tokens that can't be committed or have no distribution before them.
    draft: Draft
    # The target's answers at all N + 1 nodes.
    out: Output
    # f32[B, N+1, V] p, the distribution that is sampled after each node; NaN throughout where no token is possible.
    p: jax.Array


class Judged(NamedTuple):
    """A draft after its verdict. A tree is treated from here on as the chain of its accepted tokens."""

    # What the verifier answered.
    verdict: Verdict
    # The draft as a chain of K tokens: the accepted ones, then the first drafted below them at each level.
    draft: Draft
    # f32[B, K+1, V] p at the positions of that chain.
    p: jax.Array
    # The target's answers at the positions of that chain. Its cache holds the accepted tokens' entries in order.
    out: Output


class Outcome(NamedTuple):
    """What a drafter learns of a round, beside the new state. Unused fields cost nothing: XLA leaves them out."""

    # i32[B] Drafted tokens that were accepted and committed.
    accepted: jax.Array
    # i32[B] Drafted tokens that were verified; for a tree, the depth of the draft.
    drafted: jax.Array
    # f32[B, K+1, V] The distribution that the target was sampled from, at every position of the accepted chain.
    p: jax.Array
    # [B, K+1, H] The target's last hidden states at these positions.
    hidden: jax.Array
    # [B, K+1, H] The target's hidden states after each number of layers in ``Plan.taps``.
    taps: dict[int, jax.Array]
    # The draft that was verified. Inside ``FirstOf`` it may be the other drafter's.
    draft: Draft
    # i32[B, N+1] The target's likeliest token after each node, also after invalid ones; 0 where the target did not run.
    answers: jax.Array


class RoundInfo(NamedTuple):
    """One round as an observer sees it. A tree is shown as the chain of ``Judged.draft``: one token a level."""

    # i32[B] The row's length before the round.
    starts: jax.Array
    # i32[B, K+1] The new tokens; the first ``committed`` of them count.
    tokens: jax.Array
    # i32[B] How many tokens were committed.
    committed: jax.Array
    # i32[B] How many of these were drafted.
    accepted: jax.Array
    # i32[B, K] The drafted tokens.
    draft: jax.Array
    # i32[B] How many drafted tokens were verified: the depth of the row's draft.
    drafted: jax.Array
    # f32[B, K] The target's probability of each drafted token.
    p: jax.Array
    # f32[B, K] The draft's probability of each drafted token.
    q: jax.Array
    # f32[B, K] The entropy of each drafted position's q over log V, from 0 to 1.
    entropy: jax.Array
    # f32[B, K+1] The log-probability of each new token under the raw logits.
    logprobs: jax.Array
    # bool[B] Whether the row runs on after the round.
    active: jax.Array
    # bool[B] Whether the row has ended because no token had a finite logit.
    failed: jax.Array
    # [B, K+1, n] The likeliest tokens at the position of each new token. None unless asked for.
    top: Top | None = None


class Drafter(Protocol):
    """Proposes tokens. A pytree: weights are its leaves, and configuration is static.

    A drafter's own state, ``own``, goes in as an argument and comes out as a result. Axis 0 of every array in it is the
    row. ``state`` is the round's; a drafter only reads it. Laws, each tested for every drafter (specjax.testing):

    - The array reported as q is the array that the token was drawn from.
    - Whether a token is proposed may depend on the tokens before it, never on the token itself or on later ones.
    - Rollback goes by absolute lengths.
    - The proposal after any history equals the proposal of a fresh ``init`` on the same prefix.
    - Rows don't see each other.
    """

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        """Block widths, taps, and whether drafts are trees.

        Raises:
          ValueError: this drafter can't serve this target, or can't draft K tokens deep. Nothing has run by then.
        """
        ...

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> Any:
        """The own state of ``batch`` empty rows, for sequences of up to ``capacity`` tokens."""
        ...

    def follow(self, target: Model, own: Any, state: DecodeState, starts: jax.Array, out: Output) -> Any:
        """Sees the target read a block of each prompt.

        Args:
          target: the target.
          own: the own state.
          state: holds the prompts.
          starts: i32[B], the position of the block's first token in each row.
          out: the target's answers to the block. What comes past a row's last prompt token but one is padding.

        Returns:
          The new own state. Nothing needs to be learned here that ``resume`` can't make up for.
        """
        ...

    def resume(self, target: Model, own: Any, state: DecodeState) -> Any:
        """Makes up for prompts that the drafter did not follow and rounds of which it learned no outcome.

        A cascade calls this before each proposal; nobody else does.
        """
        ...

    def propose(
        self, target: Model, own: Any, state: DecodeState, keys: Any, num_speculative_tokens: int
    ) -> tuple[Draft, Any, KVCache]:
        """Up to K tokens after each row's last one.

        A token for absolute position n is drawn with ``random.at(keys, n)``.

        Siblings in a tree may share one draw of noise, as in Gumbel-top-k, or fold their rank in (``random.siblings``).
        The verifier says whether nodes of one depth with different parents may share noise, so a tree draws such nodes
        with ``random.at_children``.

        Args:
          target: the target.
          own: the own state.
          state: the round's.
          keys: key[B], or ``random.Apart`` of them, to draw with: ``Verifier.draft_keys``.
          num_speculative_tokens: K.

        Returns:
          The draft, the new own state, and the target's cache, ``state.cache`` unless the drafter ran the target. The
          drafter may have changed entries from ``lengths - 1`` on: these are stale, and verification writes them again.
        """
        ...

    def commit(self, target: Model, own: Any, state: DecodeState, outcome: Outcome | None) -> Any:
        """Learns of the round that led to ``state``; None: rows were only cut back, as under a cascade.

        Returns:
          The new own state.
        """
        ...


class Verifier(Protocol):
    """Judges a draft against the target's distribution: arrays in, verdict out. A frozen dataclass, static in jit."""

    lossless: bool
    trees: bool  # whether it judges trees

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> Any:
        """The key[B] that drafters draw with, from the rows' keys and lengths i32[B].

        A verifier that may judge the children of several nodes of one depth returns ``random.Apart`` of these keys.
        """
        ...

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        """Accepts a part of the draft, from its start on, and draws one more token.

        Args:
          p: f32[B, N+1, V] target probabilities at each node, given the drafted tokens up to that node.
          draft: no valid token stands below an invalid one, and p is finite at the parent of every valid token.
          keys: key[B], the rows' own.
          lengths: i32[B]. A drafted token of depth d stands at absolute position lengths + d - 1.
        """
        ...
