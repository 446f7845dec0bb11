"""Several drafters in one token tree, side by side below the last token (Miao et al. 2024, SpecInfer, section 3)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decode import random
from specjax.decode.draft_shape import grown, parents_of
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.base import FixedWidth
from specjax.drafting.combine import same_probs
from specjax.drafting.grow_tree import ChainOrTree
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output


@dataclasses.dataclass(frozen=True)
class Forest(FixedWidth):
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
        if not all(isinstance(m, ChainOrTree) for m in members) or len(members) < 2:
            names = ", ".join(type(m).__name__ for m in members)
            raise ValueError(
                f"a forest takes two or more of TreeModel, Eagle, Medusa and PaSS, got ({names}); "
                "TreeModel(lm, (1,)) drafts what DraftModel(lm) does"
            )

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        plans = [member.plan(target, num_speculative_tokens) for member in self.members]
        taps = tuple(sorted({after for plan in plans for after in plan.taps}))
        return Plan((1 + sum(plan.block - 1 for plan in plans),), taps, trees=num_speculative_tokens > 0)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> tuple:
        return tuple(m.init(target, batch, capacity, num_speculative_tokens) for m in self.members)

    def follow(self, target: Model, own: tuple, state: DecodeState, starts: jax.Array, out: Output) -> tuple:
        return tuple(m.follow(target, s, state, starts, out) for m, s in zip(self.members, own, strict=True))

    def resume(self, target: Model, own: tuple, state: DecodeState) -> tuple:
        return tuple(m.resume(target, s, state) for m, s in zip(self.members, own, strict=True))

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        drafts, after, cache = [], [], state.cache
        for number, (member, its_own) in enumerate(zip(self.members, own, strict=True)):
            # Fold in a negative number: positions are never negative, so no other draw uses these keys.
            apart = random.fold(keys, -number) if number else keys
            asked = state._replace(cache=cache)
            draft, its_own, cache = member.propose(target, its_own, asked, apart, num_speculative_tokens)
            drafts.append(draft)
            after.append(its_own)
        tree = _side_by_side(drafts, target.vocab_size, num_speculative_tokens)
        return tree, tuple(after), cache

    def commit(self, target: Model, own: tuple, state: DecodeState, outcome: Outcome | None) -> tuple:
        return tuple(m.commit(target, s, state, outcome) for m, s in zip(self.members, own, strict=True))


jax.tree_util.register_dataclass(Forest, data_fields=["members"], meta_fields=[])


def _side_by_side(drafts: list[Draft], vocab: int, depth: int) -> Draft:
    """One tree, ``depth`` deep, of several drafts."""
    nodes, parents, parts = 0, [], []
    for draft in same_probs(drafts, vocab):
        rows, size = draft.tokens.shape
        above = parents_of(draft.shape, rows, size)
        parents.append(jnp.where(above > 0, above + nodes, 0))
        parts.append(Draft(draft.tokens, draft.valid, draft.probs))  # its shape is part of the whole's
        nodes += size
    joined = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *parts)
    return joined._replace(shape=grown(_merged(joined, jnp.concatenate(parents, axis=1), depth).astype(jnp.int32)))


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
