"""The default model, which the tests of several files share."""

import pytest

from specjax.checkpoints.load import load


@pytest.fixture(scope="session")
def default_lm():
    """The default model in float32; fetched once, then from the user's cache."""
    try:
        return load("smollm2-135m-instruct", dtype="float32")
    except FileNotFoundError as e:
        pytest.skip(f"needs the default model: {e}")
