"""Every lossless verifier over a T5, on chains and on trees, and a cascade: the rest is the table of all families."""

import families
import pytest

from specjax import testing
from specjax.drafters import Cascade, DraftModel, PromptLookup, TreeModel
from specjax.testing import Trial
from specjax.verify import VERIFIERS

pytestmark = pytest.mark.slow
TARGET = families.tiny("t5")
TWIN = testing.noisy_twin(TARGET, 0.15)
CHAIN, TREE = DraftModel(TWIN, prefill_chunk=4), TreeModel(TWIN, (2, 2, 1), prefill_chunk=4)
CASCADE = Cascade(PromptLookup(prompt_lookup_min=1), TWIN, num_speculative_tokens=2)
CASES = [("chain", name) for name in testing.lossless_verifiers()]
CASES += [("tree", name) for name in testing.lossless_verifiers() if VERIFIERS[name].trees]


@pytest.mark.parametrize("shape, verifier", CASES)
def test_every_verifier_keeps_the_law(shape, verifier):
    drafter = CHAIN if shape == "chain" else TREE
    testing.check_law(Trial(TARGET, drafter, verifier, rows=100, draws=800, length=3))


def test_a_cascade_of_t5s_conforms():
    one = Trial(TARGET, CASCADE, rows=100, draws=800, length=3)
    testing.check_path_independence(one)
    testing.check_rows_alone(one)
