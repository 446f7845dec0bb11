"""The persistent compilation cache: opt-in for the library, on for the scripts, and then nothing is compiled twice."""

import warnings

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

import specjax
from specjax import testing
from specjax.generation.compilation import compilation_cache_of_script


@pytest.fixture(autouse=True)
def no_cache_before_and_after(monkeypatch):
    fresh = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": None,
        "jax_persistent_cache_min_compile_time_secs": 1.0,
    }
    before = {name: getattr(jax.config, name) for name in fresh}
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    for values in (fresh, before):
        for name, value in values.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()
        if values is fresh:
            yield


def compiled_anew() -> testing.traces.Compilations:
    """As in a process of its own: jit remembers by function object."""
    with testing.count_traces() as seen:
        jax.jit(lambda x: x * 2 + 1)(np.ones(3, np.float32))
    assert seen.compiled == 1
    return seen


def test_the_library_keeps_nothing_until_asked():
    assert jax.config.jax_compilation_cache_dir is None
    compiled_anew()
    assert compiled_anew().fetched == 0


def test_programs_are_found_again(tmp_path):
    compiled_anew()  # before the folder is named
    specjax.compilation_cache(tmp_path / "made" / "here")
    assert [compiled_anew().fetched, compiled_anew().fetched] == [0, 1]
    assert any((tmp_path / "made" / "here").iterdir())


def test_a_folder_that_is_named_twice_is_watched_once(tmp_path):
    specjax.compilation_cache(tmp_path)
    once = warnings.showwarning
    specjax.compilation_cache(tmp_path)
    assert warnings.showwarning is once


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        specjax.compilation_cache(tmp_path / "file" / "folder")


def test_scripts_keep_programs_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    compilation_cache_of_script(None)
    assert [compiled_anew().fetched, compiled_anew().fetched] == [0, 1]
    assert any((tmp_path / "compiled").iterdir())


def test_scripts_keep_programs_elsewhere_or_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "users"))
    compilation_cache_of_script(str(tmp_path / "given"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "given")
    compilation_cache_of_script(None)  # as with JAX_COMPILATION_CACHE_DIR
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "given")
    compilation_cache_of_script("none")
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache_of_script(None)
    assert jax.config.jax_compilation_cache_dir is None and not (tmp_path / "users").exists()


def test_scripts_run_without_a_cache_where_the_users_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "file"))
    compilation_cache_of_script(None)
    assert jax.config.jax_compilation_cache_dir is None
    with pytest.raises(OSError):
        compilation_cache_of_script(str(tmp_path / "file" / "folder"))


@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_half_an_entry_is_replaced_without_a_word(tmp_path, left):
    """What a killed process leaves, or what another process is still writing."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        specjax.compilation_cache(tmp_path)
        compiled_anew()
        (entry,) = tmp_path.glob("*-cache")
        whole = entry.read_bytes()
        entry.write_bytes(whole[: int(len(whole) * left)])
        assert [compiled_anew().fetched, compiled_anew().fetched] == [0, 1]
    assert not seen
