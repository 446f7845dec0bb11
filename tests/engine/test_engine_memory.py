"""The engine's memory: what the report says, and that requests leave nothing behind."""

import resource

import jax
import pytest
from drafter_table import TARGET, TWIN
from live_arrays import live

import specjax
from specjax import memory, testing

SIZES = dict(num_speculative_tokens=3, slots=4, capacity=128, prefill_chunk=64)


def test_the_report_is_what_is_allocated():
    before, _ = live()
    target = testing.tiny_lm(0, vocab_size=32, hidden_size=64, num_hidden_layers=4)
    with specjax.Engine(target, drafter=specjax.drafters.DraftModel(testing.noisy_twin(target)), **SIZES) as engine:
        engine.submit([1, 2, 3], max_new_tokens=4).result()
        assert memory.report(engine)["total"] == pytest.approx(live()[0] - before, rel=0.05)
    del engine
    assert live()[0] - before < 1.1 * sum(x.nbytes for x in jax.tree.leaves(target)) * 2


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests_leave_memory_flat(count):
    def serve(engine, many):
        options = dict(max_new_tokens=2, temperature=1.0)
        given = (dict(prompt=[i % 4, 1], seed=i, logprobs=i % 7 == 0, **options) for i in range(many))
        return sum(len(result.tokens[0]) for _, result in engine.generate(given))

    with specjax.Engine(TARGET, drafter=TWIN, **SIZES) as engine:
        engine.warmup()
        serve(engine, 100)
        bytes_before, arrays_before = live()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert serve(engine, count) >= count
        bytes_after, arrays_after = live()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak  # KiB
    assert arrays_after <= arrays_before + 20 and bytes_after <= bytes_before + 100_000
    assert grown < 40 * 1024
