"""The engine over every family: paged caches, windows, and the text of each request as if it were alone."""

import families
import pytest

import specjax
from specjax import testing
from specjax.drafters import DraftModel

REQUESTS = [([1, 2, 0, 1, 2, 0, 3], 10), ([3], 8), ([2, 1, 1, 3], 12)]
NAMES = [pytest.param(n, marks=() if n == "gemma3_text" else pytest.mark.slow) for n in families.NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_each_request_has_the_text_that_it_has_alone(name):
    lm = families.tiny(name)
    drafter = DraftModel(testing.noisy_twin(lm, 0.15), prefill_chunk=64)
    options = dict(ignore_eos=True, temperature=0.9)
    with specjax.Engine(lm, drafter=drafter, slots=2, capacity=64, num_speculative_tokens=3) as engine:
        handles = [
            engine.submit(prompt, seed=seed, max_new_tokens=count, **options)
            for seed, (prompt, count) in enumerate(REQUESTS)
        ]
        got = [handle.result(300).tokens[0] for handle in handles]
    for seed, ((prompt, count), tokens) in enumerate(zip(REQUESTS, got, strict=True)):
        alone = specjax.generate(
            lm, [prompt], seed=seed, drafter=drafter, num_speculative_tokens=3, block_width=4, capacity=64,
            max_new_tokens=count, **options,
        )  # fmt: skip
        assert tokens == alone.tokens[0] and len(tokens) == count
