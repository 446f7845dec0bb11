"""The exact law of a round on trees over bigram tables (tests/support/tables.py), chains included.

Every draft of one topology is one row of a batch, weighted with its probability. The uniforms are integrated away.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from tables import power_law

from specjax.decode.draft_shape import FixedTreeShape
from specjax.decode.types import Draft
from specjax.verify import traversal

# The parent of each drafted token.
SHAPES = {
    "chain of 3": (0, 1, 2),
    "two chains of 2": (0, 0, 1, 2),
    "widths 2, 2": (0, 0, 1, 1, 2, 2),
    "three children, uneven": (0, 0, 0, 2, 2),
    "two children, three levels": (0, 0, 1, 2, 3, 3),
}


def every_tree(p, q, above, replace=False):
    """All drafts of the tree with parents ``above`` after token 0, as drafters draw them, with or without replacement.

    A sibling is not valid if its elder siblings left no token to draw.

    Returns:
      Their probability f64[R], p f32[R, N+1, V] and the Draft.
    """
    tokens = np.array(list(itertools.product(range(len(p)), repeat=len(above))))  # [R, N]
    before = np.concatenate([np.zeros((len(tokens), 1), int), tokens], 1)  # [R, N+1]
    weight, given, valid = np.ones(len(tokens)), np.zeros((*tokens.shape, len(p))), np.ones(before.shape, bool)
    for i, parent in enumerate(above):
        left = q[before[:, parent]].copy()  # [R, V]
        for elder in [] if replace else [j for j in range(i) if above[j] == parent]:
            left[np.arange(len(tokens)), tokens[:, elder]] = 0
        mass = left.sum(1, keepdims=True)
        given[:, i] = left / np.where(mass > 0, mass, 1)
        valid[:, i + 1] = valid[:, parent] & (mass[:, 0] > 0)
        drawn = given[np.arange(len(tokens)), i, tokens[:, i]]
        weight = weight * np.where(valid[:, i + 1], drawn, tokens[:, i] == 0)  # one draft stands for all invalid ones
    possible = weight > 0
    p_rows, given = (jnp.asarray(x[possible], jnp.float32) for x in (p[before], given))
    tokens, valid = jnp.asarray(tokens[possible], jnp.int32), jnp.asarray(valid[possible, 1:])
    return weight[possible], p_rows, Draft(tokens, valid, given, FixedTreeShape(tuple(above)))


def walk(above) -> list[int]:
    """The nodes in the order of the walk: each after all nodes below it."""

    def below(node):
        for child, parent in enumerate(above, 1):
            if parent == node:
                yield from below(child)
        yield node

    return list(below(0))


def traversal_law(p, draft):
    """The chance of each node to be the last one kept, f64[R, N+1], and the law of the next token, f64[R, N+1, V]."""
    h, left = (np.asarray(x, np.float64) for x in jax.jit(traversal.thresholds)(p, draft))
    kept, missed = np.zeros(h.shape), np.ones(len(h))
    for node in walk(draft.shape.above):
        kept[:, node], missed = missed * h[:, node], missed * (1 - h[:, node])
    return kept, left


def rejection_law(p, draft):
    """The same under recursive rejection from the root down, by hand (Miao et al. 2024)."""
    p, q, tokens = (np.asarray(x, np.float64) for x in (p, draft.probs, draft.tokens))
    rows, tokens = np.arange(len(p)), tokens.astype(int)
    kept, left = np.zeros(p.shape[:2]), p.copy()
    kept[:, 0] = 1
    for node in range(p.shape[1]):
        for child in [i for i, parent in enumerate(draft.shape.above) if parent == node]:
            r, q_x = left[:, node], q[rows, child, tokens[:, child]]
            h = np.where(q_x > 0, np.minimum(1, r[rows, tokens[:, child]] / np.where(q_x > 0, q_x, 1)), 0)
            kept[:, child + 1], kept[:, node] = kept[:, node] * h, kept[:, node] * (1 - h)
            rest = np.maximum(r - q[:, child], 0)
            mass = rest.sum(1, keepdims=True)
            left[:, node] = np.where(mass > 1e-12, rest / np.where(mass > 1e-12, mass, 1), r)
    return kept, left


def expected_tokens(law, weight, p, draft) -> float:
    """The expected number of accepted tokens of a round."""
    return float(weight @ law(p, draft)[0] @ draft.shape.depth[0])


def committed_law(law, table, weight, p, draft) -> np.ndarray:
    """What a round commits, followed by plain sampling: the law of the next K + 1 tokens, f64[V, ..., V]."""
    kept, left = law(p, draft)
    tokens, length = np.asarray(draft.tokens), int(draft.shape.depth.max()) + 1
    total = np.zeros((len(table),) * length)
    for node in range(kept.shape[1]):
        path = np.flatnonzero(draft.shape.ancestors[0, node])[1:] - 1
        missing = length - len(path) - 1
        after = np.array([power_law(table, y, missing) if missing else 1.0 for y in range(len(table))])
        reached = np.flatnonzero(kept[:, node])  # elsewhere there may be NaN
        chance = (weight * kept[:, node])[reached, None] * left[reached, node]  # [R, V]
        chance = chance.reshape(*chance.shape, *(1,) * missing) * after
        np.add.at(total, tuple(tokens[reached][:, path].T), chance if len(path) else chance.sum(0))
    return total
