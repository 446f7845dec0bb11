"""Block verification on tables, by enumeration, and over rounds that must not share a key."""

import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import every_draft, outcomes
from tables import chisquare, each_table, power_law, sample, tables

import specjax
from specjax.decode.types import Draft
from specjax.drafters import DraftModel
from specjax.testing import table_lm
from specjax.verify import Block, Rejection


@each_table
@pytest.mark.parametrize("size", [1, 2, 3])
def test_block_commits_with_the_targets_law(size, seed):
    """Whatever a round commits, followed by plain sampling, has the target's law: checked on all size + 1 tokens."""
    p, q = tables(seed)
    committed, _ = outcomes(Block(), *every_draft(p, q, size))
    law = np.zeros((3,) * (size + 1))
    for tokens, prob in committed:
        missing = size + 1 - len(tokens)
        law[tokens] += prob * (power_law(p, tokens[-1], missing) if missing else 1)
    np.testing.assert_allclose(law, power_law(p, 0, size + 1), atol=1e-6)


@each_table
def test_block_ends_at_each_rows_own_last_token(seed):
    """Chains cut short, at a place that depends on the tokens before it as at a drafted stop token, and none at all."""
    p, q = tables(seed)
    weight, p_rows, draft = every_draft(p, q, 3)
    tokens = np.asarray(draft.tokens)
    cut = np.cumsum(np.pad(tokens == 1, ((0, 0), (1, 0)))[:, :-1], 1) == 0  # nothing follows a drafted 1
    for valid in (cut, cut & (np.arange(3) < 2), np.zeros_like(cut)):
        # Garbage past the end must not matter: neither NaN nor the zeros of positions that were never scored.
        past = ~np.pad(valid, ((0, 0), (1, 0)), constant_values=True)[..., None]
        for garbage in (np.nan, 0.0):
            ragged = Draft(draft.tokens, jnp.asarray(valid), jnp.where(valid[..., None], draft.probs, garbage))
            committed, _ = outcomes(Block(), weight, jnp.where(past, garbage, p_rows), ragged)
            law = np.zeros((3,) * 4)
            for text, prob in committed:
                law[text] += prob * (power_law(p, text[-1], 4 - len(text)) if len(text) < 4 else 1)
            np.testing.assert_allclose(law, power_law(p, 0, 4), atol=1e-6)


@pytest.mark.parametrize(("vocab", "size"), [(3, 2), (3, 3), (4, 2), (4, 3)])
def test_block_keeps_at_least_as_many_as_rejection(vocab, size):
    """The paper's claim, on 20 pairs of tables."""
    gains = []
    for seed in range(20):
        arguments = every_draft(*tables(seed, vocab), size)
        gains.append(outcomes(Block(), *arguments)[1] - outcomes(Rejection(), *arguments)[1])
    assert min(gains) > -1e-6
    assert max(gains) > 0.05


def test_block_on_the_papers_own_example():
    """Sun et al. 2024, introduction: two tokens, no context, K = 2; 10/9 kept token by token, 11/9 as a block."""
    p, q = np.tile([1 / 3, 2 / 3], (2, 1)), np.tile([2 / 3, 1 / 3], (2, 1))
    arguments = every_draft(p, q, 2)
    assert outcomes(Rejection(), *arguments)[1] == pytest.approx(10 / 9, abs=1e-6)
    assert outcomes(Block(), *arguments)[1] == pytest.approx(11 / 9, abs=1e-6)


def test_block_equals_rejection_for_one_token():
    p, q = tables(2)
    arguments = every_draft(p, q, 1)
    assert outcomes(Block(), *arguments)[1] == pytest.approx(outcomes(Rejection(), *arguments)[1], abs=1e-6)


class OneDraftKey(Block):
    """Block without the round's start in its draft keys: wrong, and here to be found out."""

    def draft_keys(self, keys, lengths):
        return Rejection().draft_keys(keys, lengths)


class OneAcceptKey(Block):
    """The same for its uniforms."""

    def verify(self, p, draft, keys, lengths):
        verdict = Block.verify(self, p, draft, keys, jnp.zeros_like(lengths))
        return verdict._replace(token=Block.verify(self, p, draft, keys, lengths).token)


def test_block_over_generated_rounds():
    """Four tokens of ``generate`` in rounds of three drafted ones, on tables that refuse often."""
    p, q = tables(0)
    result = specjax.generate(
        table_lm(p), [[0]] * 6000, drafter=DraftModel(table_lm(q), prefill_chunk=4), verifier=Block(),
        num_speculative_tokens=3, max_new_tokens=4, temperature=1.0,
    )
    counts = np.histogramdd(np.array(result.tokens), bins=[np.arange(4)] * 4)[0]
    assert chisquare(counts.ravel(), power_law(p, 0, 4).ravel()) > 1e-4


@pytest.mark.parametrize("verifier", [Block(), OneDraftKey(), OneAcceptKey()], ids=lambda v: type(v).__name__)
def test_block_draws_anew_in_every_round(verifier):
    """Rounds that share a draft key or a uniform are far off the law, so this test would see them."""
    pvalues = [
        chisquare(sample(verifier, size, *tables(seed), 4, seed=seed).ravel(), power_law(tables(seed)[0], 0, 4).ravel())
        for size, seed in ((2, 0), (3, 2))
    ]
    assert min(pvalues) > 1e-4 if type(verifier) is Block else min(pvalues) < 1e-8
