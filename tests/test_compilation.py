"""The persistent compilation cache: nothing is kept until asked, and then nothing is compiled twice."""

import jax
import numpy as np
import pytest

import specjax
from specjax import testing


@pytest.fixture
def no_cache_after():
    kept = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in kept}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_found_again(tmp_path, no_cache_after):
    x = np.ones(3, np.float32)

    def compiled_anew() -> testing.compilation.Compilations:
        """As in a process of its own: jit remembers by function object."""
        with testing.count_traces() as seen:
            jax.jit(lambda x: x * 2 + 1)(x)
        return seen

    assert compiled_anew().fetched == 0  # something was compiled before the folder was named
    specjax.compilation_cache(tmp_path / "made" / "here")
    first, second = compiled_anew(), compiled_anew()
    assert first.compiled == second.compiled == 1
    assert (first.fetched, second.fetched) == (0, 1)
    assert any((tmp_path / "made" / "here").iterdir())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, no_cache_after):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        specjax.compilation_cache(tmp_path / "file" / "folder")
