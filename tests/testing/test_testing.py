"""The tools that judge everything else: each says yes to what is right and no to what is wrong."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate, testing
from specjax.decode.types import Plan, Verdict
from specjax.drafters import DraftModel, LayerSkip, RandomDraft
from specjax.testing.tiny_models import TINY
from specjax.verify import pieces as chain
from specjax.verify.rejection import Rejection

TABLE = np.array([[0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4], [0, 0, 0, 1], [0.25, 0.25, 0.25, 0.25]])


@jax.jit
def logits_of(lm, tokens):
    return lm(tokens, lm.alloc_cache(*tokens.shape)).logits


def test_table_model_has_the_tables_law():
    logits = logits_of(testing.table_lm(TABLE), jnp.arange(4)[:, None])[:, 0]
    np.testing.assert_allclose(jax.nn.softmax(logits), TABLE, atol=1e-6)
    assert np.array_equal(np.asarray(jax.nn.softmax(logits)) == 0, TABLE == 0)
    wide = testing.table_lm(TABLE * 3, hidden_size=10, num_hidden_layers=2, num_attention_heads=2)
    logits = logits_of(wide, jnp.array([[3, 2, 1]]))[0]
    np.testing.assert_allclose(jax.nn.softmax(logits), TABLE[[3, 2, 1]], atol=1e-6)


@pytest.mark.parametrize("bad", [np.ones((2, 3)), -np.eye(2), np.zeros((2, 2)), np.full((2, 2), np.nan)])
def test_bad_tables_are_refused(bad):
    with pytest.raises(ValueError, match="table"):
        testing.table_lm(bad)
    with pytest.raises(ValueError, match="hidden_size"):
        testing.table_lm(np.eye(3), hidden_size=2)


def test_joint_law_of_a_table_is_the_chain_rule():
    law = testing.joint_law(testing.table_lm(TABLE), [3, 0], 3, temperature=1.0)
    by_hand = TABLE[0][:, None, None] * TABLE[:, :, None] * TABLE[None, :, :]
    np.testing.assert_allclose(law, by_hand, atol=1e-6)
    greedy = testing.joint_law(testing.table_lm(TABLE), [1], 3, temperature=0.0)
    assert greedy[3, 0, 0] == 1.0 and greedy.sum() == 1.0
    with pytest.raises(ValueError, match="enumerate"):
        testing.joint_law(testing.tiny_lm(), [1], 9)


def test_joint_law_sees_context_and_transforms():
    law = testing.joint_law(testing.table_lm(TABLE), [3], 2, temperature=1.0, no_repeat_ngram_size=1)
    assert law[3].sum() == 0 and np.diag(law).sum() == 0
    assert abs(law.sum() - 1) < 1e-6
    lm = testing.tiny_lm(0, vocab_size=4, std=0.7)
    assert (
        np.abs(
            testing.joint_law(lm, [1, 2], 2, temperature=1.0) - testing.joint_law(lm, [3, 2], 2, temperature=1.0)
        ).max()
        > 0.01
    )


def test_chi_square_is_uniform_under_the_law_and_tiny_off_it():
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.full(40, 0.3))
    p_values = [testing.chi_square(rng.multinomial(3000, law), law) for _ in range(300)]
    assert 0.44 < np.mean(p_values) < 0.56
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.09
    off = law * np.linspace(0.6, 1.4, 40)
    assert testing.chi_square(rng.multinomial(3000, off / off.sum()), law) < 1e-4


def test_chi_square_knows_the_textbook_and_its_edges():
    # 60 throws of a die: statistic 13.4 at 5 degrees of freedom, p = 0.0199 in the tables.
    assert abs(testing.chi_square([5, 8, 9, 8, 10, 20], np.full(6, 1 / 6)) - 0.0199) < 1e-4
    assert testing.chi_square([10, 1], [1.0, 0.0]) == 0.0
    assert testing.chi_square([10, 0], [1.0, 0.0]) == 1.0
    with pytest.raises(ValueError, match="sum to 1"):
        testing.chi_square([1, 2], [0.5, 0.2])


def test_sample_sequences_are_generates():
    lm = testing.tiny_lm(0, vocab_size=4, std=0.7)
    drawn = testing.sample_sequences(lm, [1, 2, 3], 10, 5, batch=4, seed=7, temperature=1.0)
    want = generate(lm, [[1, 2, 3]] * 10, max_new_tokens=5, seed=7, temperature=1.0, ignore_eos=True).tokens
    assert drawn.tolist() == want
    assert testing.count_sequences(np.array([[0, 1], [0, 1], [3, 3]]), 4)[0, 1] == 2


def test_count_traces_counts():
    f, x = jax.jit(lambda x: x * 2 + 1), np.ones(3, np.float32)
    with testing.count_traces() as first:
        f(x)
    with testing.count_traces() as second:
        f(x)
    assert first.compiled >= 1 and first.traced >= 1
    assert (second.compiled, second.traced) == (0, 0)


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
def test_planted_pair_follows_its_cycle_at_the_rate_asked_for(dtype):
    config = dataclasses.replace(TINY, vocab_size=400, hidden_size=128, max_position_embeddings=1024)
    draft = dataclasses.replace(config, hidden_size=96, num_hidden_layers=1, tie_word_embeddings=True)
    target, small, pi = testing.planted_pair(config, draft, alpha=0.75, dtype=dtype)
    assert target.dtype == small.dtype == dtype

    def follow(lm):
        return np.asarray(logits_of(lm, jnp.arange(400)[:, None])[:, 0].argmax(-1))

    assert np.array_equal(follow(target), pi)
    assert np.mean(follow(small) == pi) == 0.75
    seen, token = set(), 0
    for _ in range(400):
        token = int(pi[token])
        seen.add(token)
    assert len(seen) == 400, "one cycle through the whole vocabulary"
    weights = target.params["layers"]["0"]
    assert not weights["attention"]["o"]["weight"].any() and not weights["mlp"]["down"]["weight"].any()
    assert jnp.abs(weights["attention"]["qkv"]["weight"]).min(axis=-1).max() > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_planted_exit_follows_its_cycle_and_is_right_early_at_the_rate_asked_for(dtype):
    shape = dict(vocab_size=400, hidden_size=256, intermediate_size=160, num_hidden_layers=3)
    config = dataclasses.replace(TINY, max_position_embeddings=1024, **shape)
    lm, pi = testing.planted_exit(config, 2, alpha=0.75, dtype=dtype)
    tokens = jnp.arange(400)[:, None]
    exit_run = LayerSkip(exit_layer=2).run(lm.config.num_hidden_layers)
    full, early = (lm(tokens, lm.alloc_cache(400, 1), run=run).logits[:, 0] for run in (None, exit_run))
    assert np.array_equal(full.argmax(-1), pi) and np.mean(np.asarray(early.argmax(-1)) == pi) == 0.75
    assert float(jnp.min(jnp.take_along_axis(jax.nn.softmax(full), jnp.asarray(pi)[:, None], 1))) > 0.99
    narrow = dataclasses.replace(config, intermediate_size=100)
    for bad, why in (((config, 3, 0.5), "exit_layer"), ((config, 1, 2.0), "alpha"), ((narrow, 1, 0.5), "128 wide")):
        with pytest.raises(ValueError, match=why):
            testing.planted_exit(*bad)


def test_planted_pair_refuses_what_it_cannot_plant():
    with pytest.raises(ValueError, match="vocabulary"):
        testing.planted_pair(TINY, dataclasses.replace(TINY, vocab_size=51), 0.5)
    with pytest.raises(ValueError, match="alpha"):
        testing.planted_pair(TINY, TINY, 1.5)
    with pytest.raises(ValueError, match="permutation"):
        testing.planted_lm(TINY, np.zeros(50, int))


@dataclasses.dataclass(frozen=True)
class NoResidual(Rejection):
    """Draws corrections from p itself, as if the refused mass were still to be had."""

    def verify(self, p, draft, keys, lengths):
        accepted = super().verify(p, draft, keys, lengths).accepted
        return Verdict(accepted, chain.draw(keys, lengths + accepted, chain.row_at(p, accepted)))


@dataclasses.dataclass(frozen=True)
class TakesPadding(Rejection):
    """Accepts slots that hold no draft."""

    def verify(self, p, draft, keys, lengths):
        return super().verify(p, draft._replace(valid=jnp.ones_like(draft.valid)), keys, lengths)


def test_the_verdict_check_refuses_a_verifier_that_takes_padding():
    with pytest.raises(AssertionError, match="never drafted"):
        testing.check_verdicts(TakesPadding())


@partial(jax.tree_util.register_dataclass, data_fields=["tokens"], meta_fields=["by_value"])
@dataclasses.dataclass(frozen=True)
class ReadsALeaf(RandomDraft):
    """A drafter whose plan depends on a leaf in one of several ways."""

    tokens: jax.Array
    by_value: str

    def plan(self, target, num_speculative_tokens):
        highest = jnp.max(self.tokens)
        if self.by_value == "compared" and highest >= target.vocab_size:
            raise ValueError("a token that the target lacks")
        if self.by_value == "on the host":
            highest = np.asarray(highest)
        if self.by_value == "in the plan":
            return Plan((highest + 1,))
        if self.by_value == "guarded":
            return Plan((num_speculative_tokens + 1 + isinstance(highest, jax.core.Tracer),))
        return super().plan(target, num_speculative_tokens)


READS = "plan reads the value of a leaf.*may only read static values"


@pytest.mark.parametrize("by_value, says", [
    ("compared", READS), ("on the host", READS), ("in the plan", READS),
    ("guarded", r"the plan is .*\(4,\).*, but .*\(5,\).* inside a program"),
], ids=["compared", "on the host", "in the plan", "guarded"])  # fmt: skip
def test_a_plan_that_reads_a_leaf_is_refused_by_name(by_value, says):
    with pytest.raises(AssertionError, match=f"^ReadsALeaf with rejection, K = 3: {says}"):
        testing.check_drafter(ReadsALeaf(jnp.array([1, 3]), by_value))
    testing.check_plan(testing.Trial(testing.tiny_lm(0, vocab_size=4), ReadsALeaf(jnp.array([1, 3]), "nowhere")))


@pytest.mark.slow
def test_the_law_check_refuses_a_verifier_without_residual():
    lm = testing.tiny_lm(0, vocab_size=4, std=0.7)
    drafter = DraftModel(testing.noisy_twin(lm, 0.25), prefill_chunk=4)
    with pytest.raises(AssertionError, match="not plain sampling's law"):
        testing.check_law(testing.Trial(lm, drafter, NoResidual(), new_tokens=4))
