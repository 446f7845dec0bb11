"""Settings of the whole process in JAX change no token: kinds of random keys, 64 bits, strict ranks and dtypes."""

import contextlib

import jax
import numpy as np
import pytest
from drafter_table import DRAFTERS, TARGET, TARGETS

from specjax.decode import prefill, random
from specjax.decode import round as rounds
from specjax.generation.generate import prepare


@contextlib.contextmanager
def high_range_noise():
    """JAX has no context manager for this setting, and programs that are compiled already don't see its change."""
    jax.config.update("jax_high_dynamic_range_gumbel", True)
    try:
        yield
    finally:
        jax.config.update("jax_high_dynamic_range_gumbel", False)


SETTINGS = {
    "keys of kind rbg": lambda: jax.default_prng_impl("rbg"),
    "keys of kind unsafe_rbg": lambda: jax.default_prng_impl("unsafe_rbg"),
    "threefry in its old order": lambda: jax.threefry_partitionable(False),
    "another form of noise": lambda: high_range_noise(),
    "64 bits": lambda: jax.enable_x64(True),
    "ranks are not promoted": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes are not promoted": lambda: jax.numpy_dtype_promotion("strict"),
}
TOGETHER = tuple(name for name in SETTINGS if name != "keys of kind unsafe_rbg")  # one kind of keys at a time
QUICK = ("noisy twin",)
# That a round has the same types under the settings costs little to see, and that it has the same values is then slow.
TRACED = ("prompt lookup", "tree", "twin, cost model", "twin, entropy", "cascade", "early exit", "medusa, tree")
TRACED += ("retrieval",)


@contextlib.contextmanager
def under(*names: str):
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        yield


def job_of(drafter: str, verifier: str):
    """Three rows: greedy, sampled, and sampled with a filter and a penalty."""
    return prepare(
        TARGETS.get(drafter, TARGET), [[1, 2, 3, 1, 2], [0, 3, 2, 2], [2]], drafter=DRAFTERS[drafter],
        verifier=verifier, num_speculative_tokens=3, max_new_tokens=16, temperature=[0.0, 1.0, 0.7],
        top_p=[None, None, 0.9], presence_penalty=0.1, no_repeat_ngram_size=[0, 0, 5], seed=[3, 5, 7], ignore_eos=True,
        logprobs=True,
    )  # fmt: skip


def run(drafter: str, verifier: str) -> tuple:
    """Tokens and log-probabilities."""
    out = job_of(drafter, verifier).generate()
    return out.tokens, [np.asarray(row, np.float32).tolist() for row in out.logprobs]


def sets() -> list:
    """By default all settings at once; one by one, which says which of them is at fault, is slow."""
    found = []
    for drafter in DRAFTERS:
        found.append(pytest.param(drafter, TOGETHER, marks=() if drafter in QUICK else pytest.mark.slow, id=drafter))
    for name in SETTINGS:
        found.append(pytest.param("noisy twin", (name,), marks=pytest.mark.slow, id=f"noisy twin-{name}"))
    return found


@pytest.mark.parametrize(("drafter", "names"), sets())
def test_tokens_and_logprobs_are_those_without_the_setting(drafter, names):
    verifier = "block" if drafter == "noisy twin" else "rejection"
    expected = run(drafter, verifier)
    with under(*names):
        assert run(drafter, verifier) == expected


@pytest.mark.parametrize("drafter", TRACED)
def test_a_round_is_traced_with_the_types_that_it_has_without_the_settings(drafter):
    """Nothing is promoted, and state and history have the types of before; that they have the values is slow to see."""

    def traced():
        job = job_of(drafter, "rejection")

        def whole(decoder, request, tokens):
            return rounds.round(decoder, prefill.start(decoder, request, tokens, job.chunk))

        leaves = jax.tree.leaves_with_path(jax.eval_shape(whole, job.decoder, job.request, job.tokens))
        return [(jax.tree_util.keystr(path), x.shape, x.dtype) for path, x in leaves]

    expected = traced()
    with under(*TOGETHER):
        assert traced() == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_are_those_without_the_setting(name):
    def draws():
        keys = random.at(random.request_keys([0, 5, 7]), np.arange(6, dtype=np.int32).reshape(3, 2))
        return jax.device_get((random.uniform(keys), random.gumbel(random.fold(keys[:, 0], 3)[:, None], 5)))

    expected = draws()
    with under(name):
        found = draws()
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("keys", (jax.random.split(jax.random.key(0, impl="rbg"), 1), np.zeros((1, 2), np.uint32)))
def test_keys_of_another_kind_are_refused_by_name(keys):
    job = prepare(TARGET, [[1, 2]], drafter=DRAFTERS["noisy twin"])
    with pytest.raises(ValueError, match="threefry2x32.*got.*(rbg|uint32).*request_keys"):
        prefill.start(job.decoder, job.request._replace(key=keys), job.tokens, job.chunk)
