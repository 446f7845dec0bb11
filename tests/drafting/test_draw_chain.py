"""Chains that are drawn from the logits of few tokens."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import random, sampling
from specjax.decode.sampling_params import Context, SamplingParams
from specjax.drafting.draw_chain import draw_chain, spreading

ROWS, VOCAB, IDS = 3, 40, jnp.array([3, 38, 7, 0, 12, 29, 21, 5], jnp.int32)


@pytest.mark.parametrize("penalty", [None, 1.5])
def test_a_chain_of_few_tokens_is_that_of_the_whole_vocabulary(penalty, monkeypatch):
    """With filters, and with a penalty that names tokens. The drawn tokens and their q are the same.

    The steps of the whole vocabulary are written out, and those of the few tokens are a loop.
    """
    widths, ranked = set(), sampling.ranked
    monkeypatch.setattr(sampling, "ranked", lambda x, *rest: (widths.add(x.shape[-1]), ranked(x, *rest))[1])
    logits = jax.random.normal(jax.random.key(0), (ROWS, len(IDS))) * 3
    unset = SamplingParams(*[None] * len(SamplingParams._fields))
    params = unset._replace(
        temperature=jnp.array([0.0, 0.8, 1.3]), top_k=jnp.array([8, 5, 3], jnp.int32), top_p=jnp.array([1.0, 0.7, 0.9]),
        repetition_penalty=None if penalty is None else jnp.full(ROWS, penalty),
    )  # fmt: skip
    tokens, lengths = jnp.broadcast_to(IDS[:4], (ROWS, 4)), jnp.array([4, 3, 2], jnp.int32)

    def context(path):
        return Context(tokens, lengths, lengths, path, jnp.zeros(ROWS, jnp.int32))

    state = SimpleNamespace(request=SimpleNamespace(sampling=params), tokens=tokens, lengths=lengths, context=context)

    def drawn(of_logits, ids, unroll=False):
        def next_logits(carry, previous, last, position):
            return of_logits(jnp.roll(logits, carry, axis=1)), carry + 1

        keys = random.request_keys([1, 2, 3])
        return draw_chain(next_logits, jnp.int32(0), state, keys, 4, VOCAB, ids=ids, unroll=unroll)[0]

    few = drawn(lambda x: x, IDS)
    assert widths == {len(IDS) if penalty is None else VOCAB}, "the filters search the few tokens alone"
    whole = drawn(spreading(IDS, VOCAB), None, unroll=True)
    np.testing.assert_array_equal(few.tokens, whole.tokens)
    np.testing.assert_allclose(few.probs, whole.probs, atol=1e-6)
    np.testing.assert_allclose(few.confidence, whole.confidence, atol=1e-6)
    assert (np.count_nonzero(few.probs, axis=2)[1:] < len(IDS)).all(), "the filters leave fewer tokens"
