"""The conformance table once more, with a target of each family: chains and trees over each, beyond its window."""

import dataclasses

import families
import pytest

from specjax import testing
from specjax.drafters import DraftModel, PromptLookup, TreeModel
from specjax.testing import Trial


def trial(family, drafter) -> Trial:
    target = families.tiny(family)
    twin = testing.noisy_twin(target, 0.15)
    made = {
        "prompt lookup": lambda: PromptLookup(prompt_lookup_min=1),
        "twin": lambda: DraftModel(twin, prefill_chunk=4),
        "tree": lambda: TreeModel(twin, (2, 2, 1), prefill_chunk=4),
    }
    return Trial(target, made[drafter](), rows=100, draws=800, length=3)


def replay(one: Trial) -> None:
    """The same seeds give the same tokens."""
    first, again = one.sequences(one.run()), one.sequences(one.run())
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


def self_draft(one: Trial) -> None:
    """The target's own drafts are all accepted."""
    if isinstance(one.drafter, DraftModel):
        testing.check_accepts_all(dataclasses.replace(one, drafter=DraftModel(one.target, prefill_chunk=4)))


CHECKS = {
    "law": testing.check_law,
    "rows alone": testing.check_rows_alone,
    "path independence": testing.check_path_independence,
    "self-draft": self_draft,
    "replay": replay,
    "greedy is plain": testing.check_same_as_plain,
}
DRAFTERS = ("prompt lookup", "twin", "tree")
DEFAULT = {("gemma3_text", "tree", "path independence")}


@pytest.mark.parametrize(
    "family, drafter, check",
    [
        pytest.param(f, d, c, marks=() if (f, d, c) in DEFAULT else pytest.mark.slow, id=f"{f}-{d}-{c}")
        for f in families.NAMES
        for d in DRAFTERS
        for c in CHECKS
        if c != "self-draft" or d == "twin"
    ],
)
def test_every_family_conforms(family, drafter, check):
    CHECKS[check](trial(family, drafter))
