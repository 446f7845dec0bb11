"""Requests that arrive at random follow the exact joint law of plain sampling."""

import random

import numpy as np
import pytest
from drafter_table import DRAFTERS, TARGET, TARGETS

import specjax
from specjax.testing.checks import REJECT_BELOW
from specjax.testing.laws import chi_square, count_sequences, joint_law
from specjax.testing.trial import PROMPTS, SETTINGS

LENGTH, DRAWS = 4, 400
NAMES = ("plain", "top-p", "bias")


@pytest.mark.parametrize(
    "drafter, verifier",
    [
        ("noisy twin", "rejection"),
        pytest.param("prompt lookup", "rejection", marks=pytest.mark.slow),
        pytest.param("noisy twin", "block", marks=pytest.mark.slow),
        pytest.param("tree", "rejection", marks=pytest.mark.slow),
        pytest.param("head", "coupled", marks=pytest.mark.slow),
    ],
)
def test_joint_law_under_random_arrivals(drafter, verifier):
    target, rng = TARGETS.get(drafter, TARGET), random.Random(0)
    asked = [(name, i) for name in NAMES for i in range(DRAWS)]
    rng.shuffle(asked)
    drawn = {name: [] for name in NAMES}
    with specjax.Engine(
        target, drafter=DRAFTERS[drafter], verifier=verifier, num_speculative_tokens=3, slots=16, capacity=64,
        prefill_chunk=64, max_waiting=len(asked),
    ) as engine:  # fmt: skip
        handles = []
        for number, (name, _) in enumerate(asked):
            options = dict(temperature=1.0, ignore_eos=True, seed=number, max_new_tokens=LENGTH + number % 3)
            prompt = PROMPTS[list(SETTINGS).index(name) % len(PROMPTS)]
            handles.append(engine.submit(prompt, **{**options, **SETTINGS[name]}))
        for (name, _), handle in zip(asked, handles, strict=True):
            drawn[name].append(handle.result(300).tokens[0][:LENGTH])
    for name, rows in drawn.items():
        prompt = PROMPTS[list(SETTINGS).index(name) % len(PROMPTS)]
        law = joint_law(target, prompt, LENGTH, **{"temperature": 1.0, **SETTINGS[name]})
        p_value = chi_square(count_sequences(np.array(rows), 4), law)
        assert p_value > REJECT_BELOW, f"not plain sampling's law under {name!r} (p = {p_value:.1e})"
