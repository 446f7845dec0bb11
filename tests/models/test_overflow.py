"""A drafted token of probability 0 whose activations overflow changes nothing of the text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.decode.draft_shape import CHAIN, FixedTreeShape
from specjax.decode.types import Draft, Plan
from specjax.drafters import NoDraft
from specjax.drafting.base import Stateless, static

BAD = 7
PROMPTS = [[1, 2, 3], [4, 5, 6, 1]]


def overflowing(kv_dtype=None):
    """A float16 model in which the activations of token BAD overflow, as those of rare tokens do."""
    lm = testing.tiny_lm(0, dtype=jnp.float16, tie_word_embeddings=False)
    embed = lm.params["embed"].at[BAD].set(jnp.where(jnp.arange(32) % 2 == 0, 65504, -65504).astype(jnp.float16))
    layers = dict(lm.params["layers"])
    down = jax.tree.map(lambda x: x * 1000, layers["0"]["mlp"]["down"])
    layers["0"] = {**layers["0"], "mlp": {**layers["0"]["mlp"], "down": down}}
    return dataclasses.replace(lm, params={**lm.params, "embed": embed, "layers": layers}, kv_dtype=kv_dtype)


@static
@dataclasses.dataclass(frozen=True)
class Bad(Stateless):
    """Proposes BAD and what stands below, as a chain or a tree, as point masses or as drawn."""

    parents: tuple[int, ...] | None
    drawn: bool

    def plan(self, target, size):
        return Plan((1 + (size if self.parents is None else len(self.parents)),), trees=self.parents is not None)

    def propose(self, target, own, state, keys, size):
        count = self.plan(target, size).block - 1
        tokens = jnp.broadcast_to(jnp.array([BAD, 3, BAD, 4, 5, 6][:count], jnp.int32), (len(state.lengths), count))
        probs = jax.nn.one_hot(tokens, target.config.vocab_size, dtype=jnp.float32) if self.drawn else None
        shape = CHAIN if self.parents is None else FixedTreeShape(self.parents)
        return Draft(tokens, jnp.ones(tokens.shape, bool), probs, shape), own, state.cache


def test_the_token_overflows():
    lm = overflowing()
    logits = lm(jnp.array([[1, BAD, 3]]), lm.alloc_cache(1, 8)).logits
    assert np.isfinite(logits).all(axis=2).tolist() == [[True, False, False]]


TREE = (0, 0, 1, 2, 2, 3)


@pytest.mark.parametrize(
    "drafter, kv_dtype, temperature",
    [
        (Bad(None, False), None, 0.0),
        (Bad(TREE, True), None, 1.0),
        pytest.param(Bad(None, True), None, 1.0, marks=pytest.mark.slow),
        pytest.param(Bad(TREE, False), None, 1.0, marks=pytest.mark.slow),
        pytest.param(Bad(TREE, True), None, 0.0, marks=pytest.mark.slow),
        pytest.param(Bad(TREE, False), "int8", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_draft_that_overflows_leaves_the_text_as_it_is(drafter, kv_dtype, temperature):
    lm = overflowing(kv_dtype)
    options = dict(
        num_speculative_tokens=3, max_new_tokens=12, temperature=temperature, ignore_eos=True,
        verifier="coupled", allowed_token_ids=[t for t in range(50) if t != BAD],
    )  # fmt: skip
    plain = specjax.generate(lm, PROMPTS, drafter=NoDraft(), **options)
    assert [len(t) for t in plain.tokens] == [12, 12]
    assert specjax.generate(lm, PROMPTS, drafter=drafter, **options).tokens == plain.tokens
    ruled = specjax.generate(lm, PROMPTS, drafter=drafter, **{**options, "verifier": "rejection"})
    assert [len(t) for t in ruled.tokens] == [12, 12]
