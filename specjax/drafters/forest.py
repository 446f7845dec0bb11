"""Several drafters in one token tree, side by side below the last token (Miao et al. 2024, SpecInfer, section 3)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax import random, tree
from specjax.drafters.base import Chain, each
from specjax.drafters.grow import ChainOrTree
from specjax.models.llama import Output
from specjax.models.lm import LM
from specjax.types import DecodeState, Draft, Outcome, Request
from specjax.verify.chain import draft_probs


@dataclasses.dataclass(frozen=True)
class Forest(Chain):
    """Proposes what each of several drafters does, in one tree: their first tokens are siblings, judged in their order.

    The members draw independently of each other: a sibling is judged by the q that it alone was drawn from, so none may
    depend on another's draw. Where two propose the same token, what both have below it stands below the first.

    Args:
      members: ``TreeModel``, ``Eagle``, ``Medusa`` or ``PaSS``, which make no assumption about whose tokens were kept.
        ``TreeModel(lm, (1,))`` is a plain ``DraftModel``.

    Raises:
      ValueError: for fewer than two members, or others.
    """

    members: tuple[Any, ...]

    def __post_init__(self):
        members = tuple(self.members)
        object.__setattr__(self, "members", members)
        if any(isinstance(m, Chain) and not isinstance(m, ChainOrTree) for m in members) or len(members) < 2:
            names = ", ".join(type(m).__name__ for m in members)
            raise ValueError(
                f"a forest takes two or more of TreeModel, Eagle, Medusa and PaSS, got ({names}); "
                "TreeModel(lm, (1,)) drafts what DraftModel(lm) does"
            )

    def widths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        return (1 + sum(m.widths(num_speculative_tokens)[-1] - 1 for m in self.members),)

    def taps(self, target: LM) -> tuple[int, ...]:
        return tuple(sorted({after for m in self.members for after in m.taps(target)}))

    def check(self, target: LM) -> None:
        for member in self.members:
            member.check(target)

    def init(self, target: LM, batch: int, capacity: int, num_speculative_tokens: int) -> tuple:
        return tuple(m.init(target, batch, capacity, num_speculative_tokens) for m in self.members)

    def follow(self, target: LM, own: tuple, request: Request, starts: jax.Array, out: Output) -> tuple:
        return tuple(m.follow(target, s, request, starts, out) for m, s in zip(self.members, own, strict=True))

    def resume(self, target: LM, state: DecodeState) -> DecodeState:
        return each(self.members, state, lambda member, state: member.resume(target, state))

    def propose(
        self, target: LM, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DecodeState]:
        drafts: list[Draft] = []

        def ask(member, state: DecodeState) -> DecodeState:
            # No position is negative, so these keys are nobody else's.
            apart = random.fold(keys, -len(drafts)) if drafts else keys
            draft, state = member.propose(target, state, apart, num_speculative_tokens)
            drafts.append(draft)
            return state

        state = each(self.members, state, ask)
        return _side_by_side(drafts, target.config.vocab_size, num_speculative_tokens), state

    def commit(self, target: LM, state: DecodeState, outcome: Outcome | None) -> DecodeState:
        return each(self.members, state, lambda member, state: member.commit(target, state, outcome))


jax.tree_util.register_dataclass(Forest, data_fields=["members"], meta_fields=[])


def _side_by_side(drafts: list[Draft], vocab: int, depth: int) -> Draft:
    """One tree, ``depth`` deep, of several; point masses beside sampled drafts are written out as one-hot."""
    certain, nodes, parents = all(d.probs is None for d in drafts), 0, []
    for i, draft in enumerate(drafts):
        size = draft.tokens.shape[1]
        own = tree.as_tree(draft, size).parents
        assert own is not None
        parents.append(jnp.where(own > 0, own + nodes, 0))
        drafts[i] = draft._replace(probs=None if certain else draft_probs(draft, vocab), parents=None)
        nodes += size
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *drafts)
    return joined._replace(parents=_merged(joined, jnp.concatenate(parents, axis=1), depth).astype(jnp.int32))


def _merged(draft: Draft, parents: jax.Array, depth: int) -> jax.Array:
    """Parents i32[B, N] with every node's children put below the first of its equals: same parent, same token.

    The equals stay, since what one refuses of a token the next must refuse too.
    """
    tokens, itself = draft.tokens, jnp.eye(draft.tokens.shape[1], dtype=bool)[None]
    for _ in range(depth - 1):  # what stands a level deeper can be alike once its parents are one
        alike = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
        first = jnp.argmax(alike & draft.valid[:, None] | itself, axis=2).astype(jnp.int32)  # [B, N]
        above = jnp.take_along_axis(first, jnp.maximum(parents - 1, 0), axis=1) + 1
        parents = jnp.where(parents > 0, above, 0)
    return parents
