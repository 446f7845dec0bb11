"""Token trees: their shape, their verdicts against exact laws, and rounds on a random GQA model.

The conformance table runs tree drafters through every law of decoding; here is what it can't see.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax import generate, stream, testing
from specjax.decode import random, sampling
from specjax.decode import round as one_round
from specjax.decode.draft_shape import CHAIN, FixedTreeShape, grown, parents_of
from specjax.decode.types import Draft
from specjax.drafters import Adaptive, DraftModel, DynamicTree, FirstOf, Forest, Heuristic, PromptLookup, TreeModel
from specjax.drafting.grow_tree import draw_children
from specjax.generation.generate import prepare
from specjax.measure import acceptance, timing
from specjax.models import cache as kv
from specjax.models.quantized import dequantize
from specjax.verify import VERIFIERS, Coupled, Rejection

LM = testing.tiny_lm(0, max_position_embeddings=64, num_hidden_layers=1)
TWIN = testing.noisy_twin(LM, 0.05)
TREE = TreeModel(TWIN, (3, 2, 1))
PROMPTS = [[5], [3, 9], [4, 8, 1, 4, 8, 1, 30, 2, 7, 7, 7, 11, 6, 40, 41, 4, 8]]
SAMPLED = {"temperature": [1.0, 0.0, 0.7], "seed": [1, 2, 3], "num_speculative_tokens": 3, "max_new_tokens": 40}


def run(drafter, lm=LM, **options):
    out = generate(lm, PROMPTS, drafter=drafter, **{**SAMPLED, **options})
    for metrics in out.metrics:
        metrics.check()
    return out


# ---- shapes ----


def random_draft(seed: int, rows: int = 3, size: int = 9) -> Draft:
    rng = np.random.default_rng(seed)
    parents = rng.integers(0, np.arange(1, size + 1), (rows, size))
    tokens = rng.integers(0, 50, (rows, size))
    valid = jnp.asarray(rng.random((rows, size)) < 0.8)
    return Draft(jnp.asarray(tokens, jnp.int32), valid, None, grown(jnp.asarray(parents, jnp.int32)))


def ways(draft: Draft, row: int) -> list[list[int]]:
    """The nodes on the way to each node, itself included, by hand."""
    found: list[list[int]] = [[]]
    for node, parent in enumerate(np.asarray(draft.shape.parents)[row], 1):
        found.append([*found[parent], node])
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_node_of_a_random_tree_stands_at_its_depth(seed):
    draft, capacity = random_draft(seed), 20
    starts = jnp.array([4, 0, 7])
    shape = draft.shape
    positions, mask = shape.attention(starts, capacity)
    flags = np.pad(~np.asarray(draft.valid), ((0, 0), (1, 0)))
    path, below = shape.path(draft.tokens, 9), shape.below(jnp.asarray(flags))
    for row in range(3):
        for node, way in enumerate(ways(draft, row)):
            assert positions[row, node] == starts[row] + len(way)
            sees = {*range(starts[row]), *(int(starts[row]) + n for n in (0, *way))}
            assert set(np.flatnonzero(mask[row, node]).tolist()) == sees
            drafted = [int(draft.tokens[row, n - 1]) for n in way]
            assert path[row, node].tolist() == drafted + [sampling.NO_TOKEN] * (9 - len(way))
            if node:
                assert below[row, node - 1] == any(flags[row, n] for n in way[:-1])


def test_a_chain_has_the_shape_of_a_tree_of_width_1():
    draft = random_draft(0)
    flags = jnp.pad(~draft.valid, ((0, 0), (1, 0)))
    chain, above = CHAIN, jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (3, 9))
    for tree in (FixedTreeShape(tuple(range(9))), grown(above)):
        assert (chain.depths(9) == tree.depths(9)).all() and (chain.below(flags) == tree.below(flags)).all()
        assert (chain.path(draft.tokens, 9) == tree.path(draft.tokens, 9)).all()
        assert (parents_of(chain, 3, 9) == parents_of(tree, 3, 9)).all()


def test_a_fixed_tree_has_the_shape_of_the_same_tree_grown_in_every_row():
    draft, above = random_draft(1), (0, 0, 1, 2, 2, 3, 5, 0, 8)
    fixed, rows = FixedTreeShape(above), jnp.broadcast_to(jnp.array(above, jnp.int32), (3, 9))
    same, flags = grown(rows), jnp.pad(~draft.valid, ((0, 0), (1, 0)))
    assert all(isinstance(x, np.ndarray) for x in (fixed.parents, fixed.ancestors, fixed.depth)), "nothing is traced"
    assert (fixed.depths(9) == same.depths(9)).all() and (fixed.below(flags) == same.below(flags)).all()
    assert (fixed.path(draft.tokens, 5) == same.path(draft.tokens, 5)).all()
    starts, valid = jnp.array([4, 0, 7]), draft.valid & ~fixed.below(flags)
    for a, b in zip(fixed.attention(starts, 20), same.attention(starts, 20), strict=True):
        assert (a == b).all()
    for node in range(10):
        for a, b in zip(*(s.line(jnp.full(3, node), valid, 5) for s in (fixed, same)), strict=True):
            assert (a == b).all()


def test_the_line_shown_of_a_tree():
    """Accepted nodes first, then what was drafted below them, then whatever the level holds."""
    shape, valid = FixedTreeShape((0, 0, 1, 2, 2, 3, 5)), jnp.array([[True] * 6 + [False]])
    nodes = {0: [1, 3, 6, 0], 2: [2, 4, 6, 0], 5: [2, 5, 6, 0], 3: [1, 3, 6, 0]}
    for node, want in nodes.items():
        line, reached = shape.line(jnp.array([node]), valid, 4)
        assert line[0].tolist() == want and reached[0].tolist() == [True, True, True, False]


# ---- verdicts ----

ROWS = 20_000
KEYS, AT = random.request_keys(np.arange(ROWS)), jnp.full(ROWS, 9)


def siblings(q, width: int, with_replacement: bool) -> Draft:
    """Children of the last token, drawn as drafters draw them, with the keys that they are given."""
    params = sampling.SamplingParams(jnp.ones(ROWS))
    context = sampling.Context(jnp.zeros((ROWS, 1), jnp.int32), AT * 0, AT * 0, jnp.zeros((ROWS, 1, 0), jnp.int32))
    keys = random.at_children(Rejection().draft_keys(KEYS, AT), AT, 1)
    logits = jnp.broadcast_to(jnp.log(q), (ROWS, 1, len(q)))
    tokens, given = draw_children(
        logits, params, context, keys, np.zeros(width, int), np.arange(width), with_replacement
    )
    return Draft(tokens, jnp.ones(tokens.shape, bool), given, FixedTreeShape((0,) * width))


@pytest.mark.parametrize("with_replacement", [False, True])
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("table", [
    ([0.05, 0.5, 0.25, 0.15, 0.05], [0.6, 0.05, 0.05, 0.2, 0.1]),
    ([0.65, 0.2, 0.05, 0.05, 0.05], [0.05, 0.18, 0.3, 0.3, 0.17]),  # a second sibling may well be refused too
], ids=["skewed", "refused twice"])  # fmt: skip
def test_the_first_token_has_the_targets_law(table, width, with_replacement):
    p, q = np.array(table)
    draft = jax.jit(siblings, static_argnums=(1, 2))(jnp.asarray(q, jnp.float32), width, with_replacement)
    rows = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (ROWS, width + 1, 5))
    verdict = jax.jit(Rejection().verify)(rows, draft, KEYS, AT)
    drafted = np.asarray(draft.tokens)[np.arange(ROWS), np.maximum(verdict.node, 1) - 1]
    first = np.where(verdict.accepted == 1, drafted, verdict.token)
    assert stats.chisquare(np.bincount(first, minlength=5), ROWS * p).pvalue > 1e-4
    distinct = np.array([len(set(row)) == width for row in np.asarray(draft.tokens)])
    assert distinct.all() != with_replacement
    if width == 5 and not with_replacement:
        assert (verdict.accepted == 1).all(), "all tokens are there, so one is accepted"
    for rank in range(1, width):  # a duplicate of a refused token has nothing left
        again = (np.asarray(draft.tokens)[:, :rank] == np.asarray(draft.tokens)[:, rank, None]).any(1)
        assert not (again & (np.asarray(verdict.node) == rank + 1)).any()


def test_coupled_follows_the_targets_own_draws_to_the_deepest_node():
    """Two children hold the drawn token, and only the second goes on with the right one."""
    p = jnp.broadcast_to(jax.nn.one_hot(jnp.array([2, 1, 1, 1, 3, 3]), 4), (1, 6, 4))
    draft = Draft(jnp.array([[2, 2, 0, 1, 3]]), jnp.ones((1, 5), bool), None, FixedTreeShape((0, 0, 1, 2, 4)))
    verdict = Coupled().verify(p, draft, random.request_keys([0]), jnp.array([3]))
    assert (int(verdict.accepted[0]), int(verdict.node[0]), int(verdict.token[0])) == (3, 5, 3)
    cut = draft._replace(valid=jnp.array([[True, True, True, False, True]]))
    verdict = Coupled().verify(p, cut, random.request_keys([0]), jnp.array([3]))
    assert (int(verdict.accepted[0]), int(verdict.node[0]), int(verdict.token[0])) == (1, 1, 1)


@pytest.mark.parametrize("verifier", [name for name, v in VERIFIERS.items() if not v.trees])
def test_verifiers_of_chains_refuse_trees(verifier):
    with pytest.raises(ValueError, match="judges chains, and TreeModel drafts trees .* choose one of 'rejection'"):
        prepare(LM, PROMPTS, drafter=TREE, verifier=verifier, lossy=True, num_speculative_tokens=3)
    prepare(LM, PROMPTS, drafter=TreeModel(TWIN, (1, 1)), verifier="rejection", num_speculative_tokens=3)


# ---- rounds ----


@pytest.mark.parametrize("verifier", ["rejection", pytest.param("coupled", marks=pytest.mark.slow)])
def test_a_tree_of_width_1_is_the_chain_token_for_token(verifier):
    chain, one = (run(d, verifier=verifier) for d in (DraftModel(TWIN), TreeModel(TWIN, (1,))))
    assert one.tokens == chain.tokens
    assert [m.per_step_accepted for m in one.metrics] == [m.per_step_accepted for m in chain.metrics]


@pytest.mark.parametrize("drafter, kv_dtype", [
    (TREE, None),
    pytest.param(TreeModel(TWIN, (4, 2), temperature=0.0), "int8", marks=pytest.mark.slow),
    pytest.param(FirstOf(PromptLookup(), TREE), None, marks=pytest.mark.slow),
], ids=["drawn", "best, int8 cache", "lookup first"])  # fmt: skip
def test_trees_give_plain_decodings_tokens_and_logprobs(drafter, kv_dtype):
    lm = dataclasses.replace(LM, kv_dtype=kv_dtype)
    plain, out = (run(d, lm, verifier="coupled", logprobs=True) for d in (None, drafter))
    assert out.tokens == plain.tokens
    for a, b in zip(out.logprobs, plain.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 if lm.kv_dtype else 1e-4)
    assert sum(m.num_accepted_tokens for m in out.metrics) > 20


@jax.jit
def read_anew(lm, tokens, lengths):
    """The cache of a model that reads whole rows at once."""
    return lm(tokens, kv.with_lengths(lm.alloc_cache(*tokens.shape), lengths * 0)).cache


@pytest.mark.parametrize("kv_dtype", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_after_a_tree_the_cache_holds_the_accepted_path(kv_dtype):
    """Siblings lie between the accepted entries until these are moved together."""
    two_layers = testing.tiny_lm(0)
    drafter = TreeModel(testing.noisy_twin(two_layers, 0.05), (3, 2, 1))
    lm = dataclasses.replace(two_layers, kv_dtype=kv_dtype)
    job = prepare(lm, PROMPTS, drafter=drafter, **SAMPLED)
    state, moved = job.start(), 0
    for _ in range(10):
        state, info = job.decoder.round(state)
        moved += int(jnp.sum(info.accepted > 1))
        anew = read_anew(lm, state.tokens, state.lengths)
        held = np.arange(state.tokens.shape[1]) < np.asarray(state.lengths)[:, None] - 1
        for mine, fresh in zip(state.cache.keys + state.cache.values, anew.keys + anew.values, strict=True):
            a, b = (np.asarray(dequantize(x)).swapaxes(1, 2)[held] for x in (mine, fresh))
            np.testing.assert_allclose(a, b, atol=0.03 if kv_dtype else 1e-4)
    assert moved > 4


@pytest.mark.slow
def test_a_row_fills_buffers_that_hold_not_one_token_more():
    job = prepare(LM, PROMPTS, drafter=TREE, **SAMPLED)
    capacity = int(jnp.max(job.request.limit)) + job.decoder.plan.block
    assert job.decoder.plan.block == 16 and job.tokens.shape[1] >= capacity
    tight = dataclasses.replace(job, tokens=job.tokens[:, :capacity], chunk=16)
    out = job.decoder.run(tight.start())
    want = run(TREE).tokens
    got = [row[len(p) : end] for row, p, end in zip(out.tokens.tolist(), PROMPTS, out.lengths.tolist(), strict=True)]
    assert got == want
    with pytest.raises(ValueError, match="16 for a block"):
        prepare(LM, PROMPTS, drafter=TREE, **SAMPLED, capacity=capacity - 1)


def test_an_exact_tie_in_a_tree_goes_to_the_lowest_id():
    """Every logit is there twice: ids 2i and 2i + 1."""
    head = LM.params["lm_head"]
    lm = dataclasses.replace(LM, params={**LM.params, "lm_head": jnp.repeat(head[::2], 2, axis=0)})
    out = run(TreeModel(lm, (3, 2, 1)), lm, temperature=0.0)
    assert out.tokens == run(None, lm, temperature=0.0).tokens
    assert all(token % 2 == 0 for row in out.tokens for token in row)
    assert all(m.draft_acceptance_rate == 1.0 for m in out.metrics)


def test_greedy_siblings_are_the_best_tokens_in_order():
    """At temperature 0 nothing is left to draw after the first, and the tree would be a chain."""
    job = prepare(LM, PROMPTS, drafter=TREE, num_speculative_tokens=1, temperature=0.0)
    state = job.start()
    draft = jax.jit(TREE.propose, static_argnums=4)(LM, state.drafter, state, job.request.key, 1)[0]
    full = generate(TWIN, PROMPTS, max_new_tokens=1).tokens
    assert draft.valid.all() and draft.tokens[:, 0].tolist() == [row[0] for row in full]
    assert (jnp.take_along_axis(draft.probs, draft.tokens[..., None], 2) == 1).all()
    assert all(len(set(row)) == 3 for row in draft.tokens.tolist())


# ---- what is told of a round ----


def test_a_trees_record_and_trace_are_those_of_its_accepted_path():
    live = stream(LM, PROMPTS, drafter=TREE, **SAMPLED)
    events = list(live)
    assert [[e.token for e in events if e.row == i] for i in range(3)] == run(TREE).tokens
    for rounds, metrics in zip(live.trace, live.result().metrics, strict=True):
        metrics.check()
        assert max(metrics.per_step_drafted) == 3
        for entry in rounds:
            for token in entry["drafted"]:
                assert 0 < token["q"] <= 1 and 0 <= token["p"] <= 1


@pytest.mark.slow
def test_a_trees_round_can_be_timed_and_its_alpha_cannot():
    options = {**SAMPLED, "max_new_tokens": 20}
    job = prepare(LM, PROMPTS, drafter=FirstOf(PromptLookup(), TREE), **options)
    calls = timing.calls(job, count=1, repeats=1)
    assert list(calls["verify"]) == ["4", "16"]
    with pytest.raises(ValueError, match="alpha is defined for chains"):
        acceptance.measure(LM, PROMPTS, TREE, 3, 4)


def test_what_cannot_hold_a_tree_says_so():
    with pytest.raises(ValueError, match="Adaptive chooses how long a chain is, and TreeModel"):
        generate(LM, PROMPTS, drafter=Adaptive(TREE, Heuristic()), num_speculative_tokens=3)
    with pytest.raises(ValueError, match="has 51 children"):
        generate(LM, PROMPTS, drafter=TreeModel(TWIN, (51,)), num_speculative_tokens=1)
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            TreeModel(TWIN, (2,), temperature=bad)


def test_a_forest_takes_trees_alone():
    with pytest.raises(ValueError, match=r"got \(TreeModel, DraftModel\); TreeModel\(lm, \(1,\)\) drafts what"):
        Forest((TREE, DraftModel(TWIN)))
    with pytest.raises(ValueError, match="takes two or more"):
        Forest((TREE,))


@pytest.mark.slow
def test_a_forest_of_self_drafts_is_accepted_whole_and_keeps_the_better_member():
    """Its second member is judged only where the first fails, so right tokens from either are kept."""
    both = [Forest(pair) for pair in ((TreeModel(LM, (1,)), TREE), (TREE, TreeModel(LM, (1,))))]
    options = dict(num_speculative_tokens=3, max_new_tokens=24)
    plain = generate(LM, PROMPTS, **options).tokens
    for forest in both:
        out = generate(LM, PROMPTS, drafter=forest, **options)
        assert out.tokens == plain
        assert all(m.draft_acceptance_rate == 1.0 for m in out.metrics)


@pytest.mark.parametrize("shape", [3, None, 2.0, {3: 2}, LM, "321"])
def test_what_is_no_tree_is_refused_in_one_sentence(shape):
    with pytest.raises(ValueError, match=r"^a tree must be widths such as \(3, 2, 1\).* got "):
        TreeModel(LM, shape)


@pytest.mark.parametrize("widths", [[[]], [], (3, 2.5), (True,), (2, 0)])
def test_widths_are_integers(widths):
    with pytest.raises(ValueError, match=r"^widths must be one or more integers of at least 1.* got "):
        TreeModel(LM, widths)


def test_a_dynamic_tree_knows_which_nodes_stand_above_which():
    drafter = TreeModel(TWIN, DynamicTree(3, 11))
    job = prepare(LM, PROMPTS, drafter=drafter, num_speculative_tokens=4)
    shape = jax.jit(one_round.propose)(job.decoder, job.start())[0].shape
    again = grown(shape.parents)
    assert (shape.ancestors == again.ancestors).all() and (shape.depth == again.depth).all()
