"""The check of a verifier by itself: its verdicts on random tables, without any model."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import draft_shape, random
from specjax.decode.types import Draft, Verifier


def check_verdicts(verifier: Verifier, size: int = 3, vocab: int = 5, rows: int = 512) -> None:
    """Checks a verifier's verdicts on random tables of p and q.

    Tokens that are not valid and tokens with p = 0 must not be accepted. A token with p = 0 must not be drawn. If the
    verifier judges trees, it must give the same verdict when the chain is shown as a tree.

    Args:
      verifier: the verifier under test.
      size: K.
      vocab: V.
      rows: B.

    Raises:
      AssertionError: a verdict is wrong.
    """
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.full(vocab, 0.5), (rows, n)).astype(np.float32) for n in (size + 1, size))
    p[rng.random(p.shape) < 0.3] = 0
    p[..., 0] += 1e-3
    p /= p.sum(-1, keepdims=True)
    tokens = rng.integers(vocab, size=(rows, size)).astype(np.int32)
    valid = np.arange(size) < rng.integers(size + 1, size=rows)[:, None]
    q[~valid] = 0  # a drafter leaves q at 0 where it proposes nothing
    keys, lengths = random.request_keys(np.arange(rows)), jnp.full(rows, 7, jnp.int32)
    for probs in (jnp.asarray(q), None):
        draft = Draft(jnp.asarray(tokens), jnp.asarray(valid), probs)
        verdict = jax.jit(verifier.verify)(jnp.asarray(p), draft, keys, lengths)
        count, token = np.asarray(verdict.accepted), np.asarray(verdict.token)
        name = type(verifier).__name__
        assert (count <= valid.sum(1)).all() and (count >= 0).all(), f"{name}: accepted a slot that was never drafted"
        taken = np.arange(size) < count[:, None]
        assert (probs_of(p[:, :size], tokens)[taken] > 0).all(), f"{name}: accepted a token of p = 0"
        assert (p[np.arange(rows), count, token] > 0).all(), f"{name}: drew a token of p = 0"
        if verifier.trees:
            as_tree = draft._replace(shape=draft_shape.FixedTreeShape(tuple(range(size))))
            again = jax.jit(verifier.verify)(jnp.asarray(p), as_tree, keys, lengths)
            same = (again.accepted == count).all() and (again.token == token).all() and (again.node == count).all()
            assert same, f"{name}: judges a tree of width 1 differently from a chain"


def probs_of(probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The probability of each of tokens i[B, T] in probs f[B, T, V]. -> f[B, T]."""
    return np.take_along_axis(probs, tokens[..., None], -1)[..., 0]
