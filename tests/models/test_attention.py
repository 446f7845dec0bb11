"""Attention as one kernel against plain JAX: interpreted on a CPU, as compiled where there is a GPU that runs it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, case, in_pages

import specjax
from specjax import testing
from specjax.drafters import DynamicTree, LayerSkip, PromptLookup
from specjax.models import attention, fused_attention
from specjax.models import cache as kv
from specjax.models import lm as language_model
from specjax.models.attention import Block
from specjax.models.quantized import quantize
from specjax.testing.muted import Muted

INTERPRET = jax.default_backend() != "gpu"
ON_HOPPER = attention.kernels() == "cuda" and attention._capability() == 9.0


def plain(qkv, angles, mask, keys, values, starts):
    """The plain function with the kernel's arguments."""
    return attention.by_xla(qkv, Block(starts, angles, mask), keys, values)


def attend(qkv, angles, mask, keys, values, starts):
    """What the model calls, with the kernel's arguments."""
    return attention.attend(qkv, Block(starts, angles, mask), keys, values)


@pytest.fixture(
    params=["triton", pytest.param("mosaic", marks=pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU"))]
)
def kernel(request, monkeypatch):
    """A kernel's function."""
    monkeypatch.setenv("SPECJAX_HOPPER_KERNELS", "1")

    def triton(*args):
        return fused_attention.attend(*args, interpret=INTERPRET)

    def mosaic(qkv, angles, mask, keys, values, starts, table=None):
        _, block, _, width, dim = qkv.shape
        if attention.implementation("cuda", block, width - 2, dim, keys.shape[2], table is not None) != "mosaic":
            pytest.skip("left to the other kernel")
        return attention._module("mosaic").attend(qkv, angles, mask, keys, values, starts, table)

    return triton if request.param == "triton" else mosaic


def numbers(x):
    return np.asarray(x, np.float32)


def bits(x):
    return np.asarray(x).view(np.uint16)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_plain_function(kernel, name):
    qkv, angles, mask, keys, values, starts = args = case(*CASES[name])
    expected = jax.jit(plain)(*args)
    stale = (jnp.arange(keys.shape[2]) >= starts[:, None])[:, None, :, None]  # [B, 1, S, 1]
    fill = [jnp.where(stale, jnp.nan, buffer).astype(buffer.dtype) for buffer in (keys, values)]
    fused = jax.jit(kernel)(qkv, angles, mask, *fill, starts)
    # Weights are rounded to 16 bits before they are divided by their total, not after.
    np.testing.assert_allclose(numbers(fused[0]), numbers(expected[0]), atol=0.02)
    for got, want in zip(fused[1:], expected[1:], strict=True):
        ends = (starts + qkv.shape[1])[:, None, None, None]
        used = np.broadcast_to(jnp.arange(keys.shape[2])[:, None] < ends, got.shape)
        tolerance = dict(rtol=0, atol=0) if INTERPRET else dict(rtol=0.01, atol=0.02)  # of the rotation's rounding
        np.testing.assert_allclose(numbers(got)[used], numbers(want)[used], **tolerance)
        zeros = numbers(got)[~used] == 0 if kernel.__name__ == "mosaic" else False  # beside the block, of NaN
        assert (np.isnan(numbers(got)[~used]) | zeros).all(), "nothing is written past the block"


IN_PAGES = ("a tree", "a long cache, cut among programs")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in IN_PAGES else pytest.mark.slow) for n in CASES])
def test_the_kernel_gives_the_same_bits_from_pages(kernel, name):
    """Rows share the pages of a common beginning, and the last row is idle: it has null pages alone, full of NaN."""
    lengths, block, heads, group, dim, capacity, masked = CASES[name]
    width = -(-capacity // kv.PAGE)
    args = case((*lengths, 70), block, heads, group, dim, width * kv.PAGE, masked)
    qkv, angles, mask, *buffers, starts = args
    second, first = np.argsort(lengths)[-2:] if len(lengths) > 1 else (0, 0)  # the longest row, and the one after it
    common = lengths[second] // kv.PAGE
    table = 1 + np.random.default_rng(0).permutation(len(starts) * width).reshape(-1, width)
    table[second, :common], table[-1] = table[first, :common], 0
    stale = (jnp.arange(width * kv.PAGE) >= starts[:, None])[:, None, :, None]  # [B, 1, S, 1]
    buffers = [x.at[second, :, : common * kv.PAGE].set(x[first, :, : common * kv.PAGE]) for x in buffers]
    buffers = [jnp.where(stale, jnp.nan, x).astype(x.dtype) for x in buffers]
    pools = [in_pages(x[:-1], table[:-1], table.max() + 2) for x in buffers]

    attend = jax.jit(kernel)
    want, *want_rows = attend(qkv, angles, mask, *buffers, starts)
    got, *got_pools = attend(qkv, angles, mask, *pools, starts, jnp.asarray(table, jnp.int32))
    assert np.isfinite(numbers(want)).all()
    np.testing.assert_array_equal(bits(got[:-1]), bits(want[:-1]))
    nobodys = np.setdiff1d(np.arange(1, len(pools[0])), table)
    for pool, rows in zip(got_pools, want_rows, strict=True):
        np.testing.assert_array_equal(bits(kv.by_rows(pool, table[:-1])), bits(rows[:-1]))
        assert np.isnan(numbers(pool)[nobodys]).all()


@pytest.mark.parametrize("masked", [False, True])
def test_a_block_may_reach_past_the_table_of_its_row(kernel, masked):
    """17 tiles in four parts of five: the last part reaches past the table too."""
    qkv, angles, mask, *buffers, starts = case((17 * 64 - 2,), 6, 2, 4, 64, 17 * 64, masked)
    table = np.arange(17, 0, -1)[None]
    pools = [in_pages(x, table, 18) for x in buffers]

    def plain(qkv, angles, mask, keys, values, starts, table):
        return attention.by_xla(qkv, Block(starts, angles, mask, None, table), keys, values)

    args = qkv, angles, mask, *pools, starts, jnp.asarray(table, jnp.int32)
    (got, *got_pools), (want, *want_pools) = jax.jit(kernel)(*args), jax.jit(plain)(*args)
    np.testing.assert_allclose(numbers(got), numbers(want), atol=0.02)
    for got, want in zip(got_pools, want_pools, strict=True):
        tolerance = dict(rtol=0, atol=0) if INTERPRET else dict(rtol=0.01, atol=0.02)  # of the rotation's rounding
        np.testing.assert_allclose(numbers(got)[1:], numbers(want)[1:], **tolerance)


def test_a_long_row_is_cut_however_many_rows_there_are():
    """Short caches are cut only as far as that fills the GPU."""
    assert [fused_attention.parts_of(8, size) for size in (512, 1024, 8192)] == [1, 4, 16]
    assert [fused_attention.parts_of(64, size) for size in (512, 1024, 8192)] == [1, 4, 16]
    assert [fused_attention.parts_of(512, size) for size in (512, 1024, 8192)] == [1, 2, 16]


def test_a_rows_bits_do_not_depend_on_its_place_or_on_its_neighbours(kernel):
    """A row reaches all parts of its cache or only the first. No part that it does not reach counts."""
    qkv, angles, _, *buffers, starts = case((1000, 70, 3), 2, 1, 4, 64, 1024, False)
    stale = (jnp.arange(1024) >= starts[:, None])[:, None, :, None]
    buffers = [jnp.where(stale, jnp.nan, x).astype(x.dtype) for x in buffers]
    attend, order = jax.jit(kernel), jnp.array([2, 0, 1])
    want, *_ = attend(qkv, angles, None, *buffers, starts)
    got, *_ = attend(qkv[order], tuple(x[order] for x in angles), None, *(x[order] for x in buffers), starts[order])
    np.testing.assert_array_equal(bits(got), bits(want[order]))
    alone, *_ = attend(*jax.tree.map(lambda x: x[1:2], (qkv, angles, None, *buffers, starts)))
    np.testing.assert_array_equal(bits(alone), bits(want[1:2]))
    expected = plain(qkv, angles, None, *(jnp.nan_to_num(x) for x in buffers), starts)[0]
    np.testing.assert_allclose(numbers(want), numbers(expected), atol=0.02)


BAD = {"NaN": np.nan, "infinite": np.inf}


@pytest.mark.parametrize(
    "name, how, bad",
    [
        ("nothing cached yet", "xla", "NaN"),
        ("nothing cached yet", "int8 cache", "infinite"),
        ("nothing cached yet", "kernel", "infinite"),
        ("a tree", "xla", "infinite"),
        ("a tree", "int8 cache", "NaN"),
        ("a tree", "kernel", "NaN"),
        ("a long cache, cut among programs", "kernel", "NaN"),
    ],
)
def test_a_token_without_numbers_reaches_only_those_that_see_it(kernel, name, how, bad):
    """Bit for bit, in the block and once the token is cut off; and whoever sees it has no numbers either."""
    qkv, angles, mask, keys, values, starts = case(*CASES[name])
    block, at = qkv.shape[1], qkv.shape[1] - 2  # the token before the last is bad
    if mask is None:
        mask = jnp.arange(keys.shape[2]) <= (starts[:, None] + jnp.arange(block))[..., None]
    sees = jnp.take_along_axis(mask, (starts + at)[:, None, None], axis=2)[..., 0] | (jnp.arange(block) == at)
    if how == "int8 cache":
        keys, values = (quantize(x, "int8") for x in (keys, values))
    attend = jax.jit(kernel if how == "kernel" else plain)
    wanted, *_ = attend(qkv, angles, mask, keys, values, starts)
    poisoned = qkv.at[:, at].set(BAD[bad])
    got, *buffers = attend(poisoned, angles, mask, keys, values, starts)
    assert (numbers(got) == numbers(wanted))[~np.asarray(sees)].all()
    assert not np.isfinite(numbers(got)).all(axis=2)[np.asarray(sees)].any()
    shorter, first = starts + 1, qkv[:, :1]  # the first token stays, the bad one is now stale
    own = mask[:, 1:2] & (jnp.arange(mask.shape[2]) <= shorter[:, None])[:, None]
    clean = attend(qkv, angles, mask, keys, values, starts)[1:]
    turn = tuple(x[:, :1] for x in angles)
    assert block < 3 or (
        numbers(attend(first, turn, own, *buffers, shorter)[0]) == numbers(attend(first, turn, own, *clean, shorter)[0])
    ).all()


@pytest.mark.parametrize("start, capacity", [(77, 128), (125, 256), (600, 1024)])
def test_a_tokens_bits_do_not_depend_on_where_its_block_begins(kernel, start, capacity):
    """So a text doesn't depend on how many of its tokens were drafted (docs/exactness.md, claim A)."""
    qkv, angles, _, keys, values, starts = case((start,), 4, 2, 4, 64, capacity, False)
    attend = jax.jit(kernel)
    whole, keys, values = attend(qkv, angles, None, keys, values, starts)

    def later(x):  # the same tokens from the third on, and others behind them
        return jnp.concatenate([x[:, 2:], x[:, :2]], axis=1)

    again = attend(later(qkv), tuple(map(later, angles)), None, keys, values, starts + 2)[0]
    assert (numbers(whole[:, 2:]) == numbers(again[:, :2])).all()


@pytest.fixture
def small(monkeypatch):
    """A model that the kernel serves; and a way to run it as plain JAX or with the kernel.

    Each has a longest text of its own, which changes no number: so no compiled program of the one serves the other.
    """
    lm = testing.tiny_lm(3, head_dim=32)
    lm = dataclasses.replace(lm, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), lm.params))

    def run(how, function):
        monkeypatch.setattr(attention, "kernels", lambda: how)
        config = dataclasses.replace(lm.config, max_position_embeddings=1234 + (how is None))
        return function(dataclasses.replace(lm, config=config))

    return run


HOW = "cpu" if INTERPRET else "cuda"


def test_a_model_and_its_gradient_are_the_same_with_the_kernel(small):
    def both(lm):
        tokens = jax.random.randint(jax.random.key(0), (2, 6), 0, lm.config.vocab_size)
        cache = kv.with_lengths(lm.alloc_cache(2, 24), jnp.array([0, 9], jnp.int32))
        return jax.jit(jax.value_and_grad(lambda lm: jnp.sum(lm(tokens, cache).logits ** 2) / 100))(lm)

    (plain, gradient), (fused, other) = small(None, both), small(HOW, both)
    np.testing.assert_allclose(fused, plain, rtol=0.03)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
        assert np.linalg.norm(numbers(a) - numbers(b)) <= 0.1 * np.linalg.norm(numbers(a))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [pytest.param(LayerSkip(exit_layer=2), marks=pytest.mark.slow), None])
def test_with_the_kernel_a_model_accepts_its_own_drafts(small, drafter):
    """Its own chain, and rows that leave at different lengths; whatever rounding differs between block widths."""
    prompts = [[1, 2, 3, 4, 5], [7, 8]]

    def texts(lm):
        drafting = specjax.drafters.DraftModel(lm) if drafter is None else drafter
        return specjax.generate(lm, prompts, drafter=drafting, num_speculative_tokens=3, max_new_tokens=12)

    run = small(HOW, texts)
    assert all(len(tokens) == 12 for tokens in run.tokens)
    assert min(m.draft_acceptance_rate for m in run.metrics) > 0.9


def test_texts_are_equal_to_the_last_bit_whatever_was_drafted(small):
    """Claim A: in one program a muted draft's text is the draft's."""
    prompts = [[1, 2, 3, 4, 5, 1, 2, 3], [7, 8, 7, 8, 7], [9]]

    def texts(mute):
        return lambda lm: specjax.generate(
            lm, prompts, drafter=Muted(specjax.drafters.DraftModel(lm), jnp.array(mute)), num_speculative_tokens=4,
            max_new_tokens=20, ignore_eos=True,
        ).tokens  # fmt: skip

    assert small(HOW, texts(True)) == small(HOW, texts(False))


def test_texts_are_equal_to_the_last_bit_in_pages(small, monkeypatch):
    """Log-probabilities too, so not only the likeliest token is compared."""
    contiguous = kv.alloc

    def paged(*args):
        cache = kv.paged(contiguous(*args), args[1], 16)
        table = 1 + np.random.default_rng(0).permutation(15)[: cache.table.size]
        return cache.replace(table=jnp.asarray(table, jnp.int32).reshape(cache.table.shape))

    def texts(lm):
        prompts = [[1, 2, 3, 4] * 15, [7, 8, 7, 8, 7]]
        run = specjax.generate(lm, prompts, drafter=PromptLookup(), max_new_tokens=12, ignore_eos=True, logprobs=True)
        return run.tokens, run.logprobs

    want = small(HOW, texts)
    monkeypatch.setattr(language_model, "alloc", paged)
    assert small(HOW, texts) == want


@pytest.mark.slow
def test_a_tree_with_the_kernel_keeps_the_plain_text(small):
    """In bfloat16 another rounding may choose another token at a near tie, so most of the text, not all of it."""

    def text(drafter):
        return lambda lm: specjax.generate(
            lm, [[1, 2, 3]], drafter=drafter and drafter(lm), num_speculative_tokens=3, max_new_tokens=12
        ).tokens[0]

    tree = small(HOW, text(lambda lm: specjax.drafters.TreeModel(lm, DynamicTree(2, 6))))
    plain = small(HOW, text(None))
    assert sum(a == b for a, b in zip(tree, plain, strict=True)) >= 6


def test_what_the_kernel_does_not_serve_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention, "attend", lambda *_, **__: pytest.fail("not served"))
    qkv, angles, mask, keys, values, starts = case(*CASES["one token"])

    def result(*args):
        return jax.eval_shape(attend, *args)[0].shape

    assert attention.kernels() == "cuda"
    assert result(qkv.astype(jnp.float32), angles, mask, keys, values, starts) == (1, 1, 512)
    other = keys.astype(jnp.float16), values.astype(jnp.float16)
    assert result(qkv, angles, mask, *other, starts) == (1, 1, 512)
    wide = jnp.repeat(qkv, 9, axis=1), tuple(jnp.repeat(x, 9, axis=1) for x in angles)  # 36 queries a head
    assert result(*wide, mask, keys, values, starts) == (1, 9, 512)
    mesh = jax.make_mesh((1,), ("model",))
    for spec in (jax.P("model"), jax.P(None, None, "model")):
        with pytest.raises(ValueError, match="expected by kv heads"):
            kv.alloc(testing.tiny_lm(0).config, 1, 8, jnp.float32, jax.NamedSharding(mesh, spec))
    monkeypatch.setenv("SPECJAX_FUSED_ATTENTION", "0")
    assert attention.kernels() is None
    monkeypatch.delenv("SPECJAX_FUSED_ATTENTION")
    assert attention.kernels() == "cuda"


def test_an_additive_bias_and_no_rotation_are_those_of_the_formula():
    """As models with relative positions, or learned ones, need them."""
    rng = np.random.default_rng(0)
    batch, size, kv_heads, group, dim, slots = 2, 3, 2, 2, 8, 12
    qkv = rng.normal(size=(batch, size, kv_heads, group + 2, dim)).astype(np.float32)
    keys, values = (rng.normal(size=(batch, kv_heads, slots, dim)).astype(np.float32) for _ in range(2))
    bias = rng.normal(size=(1, kv_heads * group, size, slots)).astype(np.float32)
    starts = np.array([4, 7], np.int32)
    block = Block(jnp.asarray(starts), None, None, jnp.asarray(bias))
    out, *buffers = attention.attend(jnp.asarray(qkv), block, jnp.asarray(keys), jnp.asarray(values))
    for row, start in enumerate(starts):
        for head in range(kv_heads):
            k, v = keys[row, head].copy(), values[row, head].copy()
            k[start : start + size], v[start : start + size] = qkv[row, :, head, group], qkv[row, :, head, group + 1]
            np.testing.assert_array_equal(buffers[0][row, head], k)
            for g in range(group):
                scores = qkv[row, :, head, g] @ k.T * dim**-0.5 + bias[0, head * group + g]
                scores[np.arange(slots) > start + np.arange(size)[:, None]] = -np.inf
                weights = np.exp(scores - scores.max(1, keepdims=True))
                want = weights / weights.sum(1, keepdims=True) @ v
                got = np.asarray(out).reshape(batch, size, kv_heads, group, dim)[row, :, head, g]
                np.testing.assert_allclose(got, want, atol=1e-5)
