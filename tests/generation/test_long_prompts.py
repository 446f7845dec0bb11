"""What a long prompt costs the host before its request reaches the device."""

import cProfile
import pstats

from specjax import testing
from specjax.engine.ticket import job_for
from specjax.generation.options import Options

LM = testing.tiny_lm(0, max_position_embeddings=4096)


def python_calls(prompt):
    profile = cProfile.Profile()
    profile.runcall(job_for, LM, prompt, Options(max_new_tokens=1))
    return pstats.Stats(profile).total_calls


def test_checking_a_prompt_makes_no_python_call_for_each_token():
    python_calls([1, 2])  # what is imported or computed once
    assert python_calls([1, 2, 3] * 1000) < python_calls([1, 2, 3]) + 100
