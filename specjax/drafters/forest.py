"""Several drafters in one token tree, side by side below the last token (Miao et al. 2024, SpecInfer, section 3)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decode import random
from specjax.decode.draft_shape import grown, parents_of
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import Several
from specjax.drafting.combine import same_probs
from specjax.drafting.grow_tree import ChainOrTree
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Forest(Several):
    """Proposes the drafts of all members in one tree. The first tokens are siblings, judged in the members' order.

    The members draw independently of each other. Each sibling is judged by the q of its own member, so no draw may
    depend on another member's draw. If two members propose the same token after the same text, the children of both
    tokens stand below the first of the two.

    Args:
      members: two or more of ``TreeModel``, ``Eagle``, ``Medusa``, ``DFlash`` and ``PaSS``. These drafters do not
        assume that the kept tokens are their own. ``TreeModel(lm, (1,))`` drafts the tokens of ``DraftModel(lm)``.

    Raises:
      ValueError: there are fewer than two members, or a member is another drafter.
    """

    members: tuple[Any, ...]

    def __post_init__(self):
        members = tuple(self.members)
        object.__setattr__(self, "members", members)
        if not all(isinstance(m, ChainOrTree) for m in members) or len(members) < 2:
            names = ", ".join(type(m).__name__ for m in members)
            raise ValueError(
                f"a forest takes two or more of TreeModel, Eagle, Medusa, DFlash and PaSS, got ({names}); "
                "TreeModel(lm, (1,)) drafts what DraftModel(lm) does"
            )

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        plans = [member.plan(target, num_speculative_tokens) for member in self.members]
        taps = tuple(sorted({after for plan in plans for after in plan.taps}))
        return Plan(
            (1 + sum(plan.block - 1 for plan in plans),),
            taps,
            trees=num_speculative_tokens > 0,
            shaped_by_size=any(plan.shaped_by_size for plan in plans),
            shared_shapes=any(plan.shared_shapes for plan in plans),
        )

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        drafts, new_own, cache = [], [], state.cache
        for number, (member, its_own) in enumerate(zip(self.members, own, strict=True)):
            # Fold in a negative number: positions are never negative, so no other draw uses these keys.
            member_keys = random.fold(keys, -number) if number else keys
            asked = state._replace(cache=cache)
            draft, its_own, cache = member.propose(target, its_own, asked, member_keys, num_speculative_tokens)
            drafts.append(draft)
            new_own.append(its_own)
        tree = _side_by_side(drafts, target.vocab_size, num_speculative_tokens)
        return tree, tuple(new_own), cache


jax.tree_util.register_dataclass(Forest, data_fields=["members"], meta_fields=[])


def _side_by_side(drafts: list[Draft], vocab: int, depth: int) -> Draft:
    """One tree of several drafts, at most ``depth`` = K deep. V is ``vocab``."""
    nodes, parents, parts = 0, [], []
    for draft in same_probs(drafts, vocab):
        rows, size = draft.tokens.shape
        above = parents_of(draft.shape, rows, size)
        parents.append(jnp.where(above > 0, above + nodes, 0))
        parts.append(Draft(draft.tokens, draft.valid, draft.probs))  # its shape goes into ``parents``
        nodes += size
    joined = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *parts)
    return joined._replace(shape=grown(_merged(joined, jnp.concatenate(parents, axis=1), depth).astype(jnp.int32)))


def _merged(draft: Draft, parents: jax.Array, depth: int) -> jax.Array:
    """Puts the children of nodes with the same parent and the same token below the first of these nodes.

    The later ones of such equal nodes stay in the tree, without children. If the first one is refused, each later one
    is refused too, and each refusal changes the distribution of the next draw.

    Args:
      draft: the draft; its shape is not read.
      parents: i32[B, N], the parent node of each drafted token.
      depth: K.

    Returns:
      The new parents, i32[B, N].
    """
    tokens, itself = draft.tokens, jnp.eye(draft.tokens.shape[1], dtype=bool)[None]
    for _ in range(depth - 1):  # merging the nodes of a level can make nodes of the next level equal
        alike = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
        first = jnp.argmax(alike & draft.valid[:, None] | itself, axis=2).astype(jnp.int32)  # [B, N]
        above = jnp.take_along_axis(first, jnp.maximum(parents - 1, 0), axis=1) + 1
        parents = jnp.where(parents > 0, above, 0)
    return parents
