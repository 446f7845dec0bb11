"""Target and draft as tables, and rounds on them: verifiers by themselves, without models.

The tables are bigram: row t is the law after token t.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax.decode import random
from specjax.decode.types import Draft

each_table = pytest.mark.parametrize("seed", range(6))


def tables(seed: int, vocab: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """p and q, f[V, V]. Odd seeds have zeros, in both and at different places."""
    rng = np.random.default_rng(seed)
    p, q = (rng.dirichlet(np.full(vocab, 0.7), vocab) for _ in range(2))
    if seed % 2:
        p[0, 1] = q[0, 2] = q[1, 0] = p[2, 0] = q[2, 0] = 0
    return p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)


def chisquare(counts: np.ndarray, probs: np.ndarray) -> float:
    """The p-value of counts under probs; cells expected below 5 are pooled, and what can't happen must not."""
    expected = np.asarray(probs, np.float64) / np.sum(probs, dtype=np.float64) * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    keep = expected > 0
    return stats.chisquare(counts[keep], expected[keep]).pvalue


def power_law(p: np.ndarray, first: int, length: int) -> np.ndarray:
    """The exact law of ``length`` tokens after ``first`` under plain sampling, f[V, ..., V]."""
    law = p[first]
    for _ in range(length - 1):
        law = law[..., None] * p
    return law


# Everything sampled has these shapes, padded with impossible tokens and invalid slots: few programs to compile.
ROWS, SIZE, VOCAB = 20_000, 5, 5
KEYS = random.request_keys(np.arange(ROWS))
ONES = jnp.ones(ROWS, jnp.int32)


def pad(table: np.ndarray) -> jax.Array:
    """f[..., V] to f32[..., VOCAB]; a square table gets rows too."""
    more = [(0, 0)] * (table.ndim - 1) + [(0, VOCAB - table.shape[-1])]
    if table.ndim == 2:
        more[0] = (0, VOCAB - table.shape[0])
    return jnp.asarray(np.pad(table, more), jnp.float32)


@functools.partial(jax.jit, static_argnames="verifier")
def drafts(verifier, q, tokens, lengths, keys) -> Draft:
    """SIZE tokens a row from the table q f32[V, V], with the keys that a drafter is given."""
    draft_keys = verifier.draft_keys(keys, lengths)

    def step(last, i):
        row = q[last]  # [B, V]
        token = random.categorical(random.at(draft_keys, (lengths + i)[:, None]), row[:, None])[:, 0]
        return token, (token, row)

    _, (drawn, rows) = jax.lax.scan(step, tokens, jnp.arange(SIZE))
    return Draft(drawn.T, jnp.ones(drawn.T.shape, bool), rows.swapaxes(0, 1))


def greedy_drafts(q, tokens) -> Draft:
    """The most likely tokens, as point masses."""
    best, columns = np.argmax(q, axis=1), [np.asarray(tokens)]
    for _ in range(SIZE):
        columns.append(best[columns[-1]])
    drafted = jnp.asarray(np.stack(columns[1:], 1), jnp.int32)
    return Draft(drafted, jnp.ones(drafted.shape, bool), None)


@functools.partial(jax.jit, static_argnames="verifier")
def judge(verifier, p, draft, keys, lengths):
    return verifier.verify(p, draft, keys, lengths)[:2]  # of a chain there is no node


def table_round(verifier, size, p, q, tokens=0 * ONES, lengths=ONES, keys=KEYS, greedy=False):
    """Drafts ``size`` tokens and judges them. -> (draft, (count, token)), on the host."""
    draft = greedy_drafts(q, tokens) if greedy else drafts(verifier, q, tokens, lengths, keys)
    draft = draft._replace(valid=draft.valid & (np.arange(SIZE) < size))
    rows = p[jnp.concatenate([tokens[:, None], draft.tokens], 1)]
    return jax.device_get((draft, judge(verifier, rows, draft, keys, lengths)))


def sample(verifier, size, p, q, length, greedy=False, seed=0) -> np.ndarray:
    """Counts of the first ``length`` tokens after token 0, i[V, ..., V], over rounds as ``generate`` runs them."""
    vocab, p, q = len(p), pad(p), pad(q)
    keys, every = random.request_keys(np.arange(ROWS) + seed * ROWS), np.arange(ROWS)
    text, lengths = np.zeros((ROWS, 2 + length + SIZE), np.int32), np.ones(ROWS, np.int32)
    while lengths.min() <= length:
        last = jnp.asarray(text[every, lengths - 1])
        draft, (count, token) = table_round(verifier, size, p, q, last, jnp.asarray(lengths), keys, greedy)
        block = np.where(np.arange(SIZE) < count[:, None], draft.tokens, token[:, None])
        block = np.append(block, token[:, None], 1)  # [B, SIZE + 1]
        running = lengths <= length
        for i in range(SIZE + 1):
            rows = running & (i <= count)
            text[rows, (lengths + i)[rows]] = block[rows, i]
        lengths = lengths + running * (count + 1)
    return np.histogramdd(text[:, 1 : 1 + length], bins=[np.arange(vocab + 1)] * length)[0]
