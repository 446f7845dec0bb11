"""One block width for all target calls: greedy texts and log-probabilities don't depend on the drafter, bit for bit."""

import numpy as np
import pytest
from drafter_table import TARGET, TWIN

import specjax
from specjax import testing
from specjax.drafters import DraftModel, PromptLookup, TreeModel

# Large enough that products of one row and of four rows round differently.
LM = testing.tiny_lm(3, vocab_size=64, hidden_size=64, intermediate_size=128)
PROMPTS = [[1, 2, 3, 4, 1, 2], [9], [5, 6, 5, 6, 5, 6, 5]]
DRAFTERS = {
    "lookup": (PromptLookup(prompt_lookup_min=1), 3),
    "shorter drafts": (PromptLookup(prompt_lookup_min=1), 2),
    "noisy twin": (DraftModel(testing.noisy_twin(LM, 0.02)), 3),
}


def run(drafter, size, **options):
    return specjax.generate(
        LM, PROMPTS, drafter=drafter, num_speculative_tokens=size, max_new_tokens=40, ignore_eos=True, logprobs=True,
        capacity=128, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_one_block_width_gives_one_text(name):
    plain, drafted = run(None, 0, block_width=4), run(*DRAFTERS[name], block_width=4)
    assert drafted.tokens == plain.tokens
    assert drafted.logprobs == plain.logprobs  # to the last bit
    assert sum(metrics.num_accepted_tokens for metrics in drafted.metrics) > 0


def test_other_widths_round_differently():
    """The test above would fail without ``block_width``: then the plain step is a call of one token."""
    plain, drafted = run(None, 0), run(*DRAFTERS["noisy twin"])
    same = [np.array_equal(a, b) for a, b in zip(plain.logprobs, drafted.logprobs, strict=True)]
    assert not all(same)


def test_a_row_may_end_where_no_wider_block_would_fit():
    """A block of any width starts at the row's last token, so the room past the limit grows with the width."""
    for width in (4, 9):
        full = specjax.generate(LM, PROMPTS, max_new_tokens=None, ignore_eos=True, block_width=width)
        assert [len(p) + len(t) for p, t in zip(PROMPTS, full.tokens, strict=True)] == [LM.max_positions] * 3


@pytest.mark.parametrize(
    "drafter, width, message",
    [
        (TWIN, 3, "block_width must be at least 4 for DraftModel"),
        (TWIN, "wide", "block_width must be at least 4"),
        (TreeModel(TWIN.lm, (2, 2, 1)), 20, r"block_width must be \d+ for TreeModel.*a tree can't be padded"),
    ],
)
def test_a_width_that_does_not_fit_is_refused(drafter, width, message):
    with pytest.raises(ValueError, match=message):
        specjax.prepare(TARGET, [[1, 2]], drafter=drafter, num_speculative_tokens=3, block_width=width)
