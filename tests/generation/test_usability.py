"""What a user of the library meets in Python: names, prompts, options, and models as values."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

import specjax
from specjax import testing
from specjax.drafters import NGramTable, Oracle

LM = testing.tiny_lm(0)


@pytest.mark.parametrize(
    "prompts",
    [
        jnp.array([[1, 2, 3], [4, 5, 6]]),
        [jnp.array([1, 2, 3]), jnp.array([4, 5, 6], jnp.uint8)],
        [[jnp.int32(1), 2, 3], (4, jnp.int32(5), 6)],
    ],
)
def test_prompts_may_be_arrays_of_jax(prompts):
    job = specjax.prepare(LM, prompts)
    assert job.prompts == [[1, 2, 3], [4, 5, 6]]


def test_arrays_that_are_no_token_ids_are_refused():
    for prompts, message in ((jnp.array([[1.0]]), "token ids"), (jnp.array([1, 2]), r"pass \[\[...\]\]")):
        with pytest.raises(ValueError, match=message):
            specjax.prepare(LM, prompts)


@pytest.mark.parametrize("function", [specjax.generate, specjax.stream, specjax.warmup])
def test_an_unknown_option_is_a_value_error_that_names_the_nearest(function):
    with pytest.raises(ValueError, match="'max_tokens' is no option.* 'max_new_tokens'"):
        function(LM, [[1]], max_tokens=3)
    with pytest.raises(ValueError, match="'zzz' is no option.*specjax.Options"):
        function(LM, [[1]], zzz=3)


def test_a_model_is_shown_in_two_lines():
    for lm in (LM, LM.quantize("int8")):
        text = repr(lm)
        assert len(text.splitlines()) == 2 and len(text) < 240 and "2 layers" in text and "vocabulary of 50" in text
    assert "int8" in repr(LM.quantize("int8")) and len(repr(specjax.drafters.DraftModel(LM))) < 400
    assert len(repr(NGramTable.count([[1, 2]], 50))) < 200


def test_models_and_drafters_can_be_compared_and_hashed():
    other = testing.tiny_lm(0)
    assert LM == LM and LM != other and len({LM, other, LM}) == 2
    a, b = Oracle.of([[1, 2]]), Oracle.of([[1, 2]])
    assert a == a and a != b and NGramTable.count([[1, 2]], 50) != NGramTable.count([[1, 2]], 50)
    drafting = specjax.drafters.DraftModel(LM)
    assert drafting == specjax.drafters.DraftModel(LM) != specjax.drafters.DraftModel(other)


def test_the_package_alone_gives_all_its_modules():
    program = """
import sys, specjax
assert "specjax.testing" not in sys.modules and "specjax.report.record" not in sys.modules  # no slower to import
assert specjax.Drafter and specjax.Verifier
for name, place in specjax.MODULES.items():
    assert getattr(specjax, name).__name__ == "specjax." + place and name in dir(specjax)
assert not hasattr(specjax, "nothing")
try:
    specjax.testin
except AttributeError as problem:
    assert "testin" in str(problem)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
