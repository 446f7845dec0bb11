"""Settings of drafters and their policies: those of the wrong kind are refused at once."""

import numpy as np
import pytest

from specjax import drafters, testing
from specjax.drafters import Cascade, NGramTable, PromptLookup


@pytest.mark.parametrize("make, says", [
    (lambda: drafters.Heuristic(smallest=0), "smallest must be an integer of at least 1, got 0"),
    (lambda: drafters.EntropyGuided(gamma_min=0), "integers 1 <= gamma_min"),
    (lambda: drafters.EntropyGuided(gamma_max=2.5), "integers 1 <= gamma_min"),
    (lambda: drafters.Confidence(2), "threshold must be a number from 0 to 1, got 2"),
    (lambda: drafters.Confidence("x"), "threshold must be a number"),
    (lambda: drafters.CostModel(c=-1), "c must be a number from 0"),
    (lambda: drafters.CostModel(c=0.1, weight=0), "weight must be a number"),
    (lambda: drafters.LayerSkip(exit_layer=1.5), "exit_layer must be an integer of at least 1, got 1.5"),
    (lambda: drafters.LayerSkip(skip_mlp=1), "skip_mlp must be a list of numbers of layers, got 1"),
    (lambda: drafters.LayerSkip(temperature=-1.0), "draft temperature must be a number from 0"),
    (lambda: drafters.SinkWindow(temperature=float("nan")), "draft temperature must be a number from 0"),
    (lambda: NGramTable.count([[1, 2]], 8, temperature="0.5"), "draft temperature must be a number from 0"),
    (lambda: NGramTable.count([[1, 2]], 8, keep=1.5), "keep must be an integer of at least 1, got 1.5"),
    (lambda: Cascade(PromptLookup(), testing.tiny_lm(), 2.5), "tokens must be an integer of at least 1, got 2.5"),
    (lambda: PromptLookup(True, True), "prompt lookup needs integers"),
    (lambda: drafters.DynamicTree(True, 3), "breadth of a dynamic tree must be an integer of at least 1, got True"),
])  # fmt: skip
def test_settings_of_the_wrong_kind_are_refused_where_the_drafter_is_made(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_integers_of_numpy_count_as_integers():
    assert PromptLookup(np.int64(3), np.int64(2)) == PromptLookup(3, 2)
    assert drafters.Lookahead(np.int64(8)) == drafters.Lookahead(8)
