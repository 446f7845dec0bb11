"""What must hold for every tiny configuration of a family: docs/models.md lists it, and nothing is lost in files."""

import json
from pathlib import Path

import jax
from conversions import run_script

import specjax
from convert import llama_weights as weights
from specjax.models.configs import from_hf, to_hf


def check_documented(names):
    """Each configuration has a row in the table of docs/models.md."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert [name for name in names if name not in rows] == []


def check_round_trip(folder, model):
    """The configuration and every tensor of transformers' ``model``, saved in ``folder``, survive a round trip."""
    config = from_hf(json.loads((folder / "config.json").read_text()))
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    back = weights.to_hf(config, specjax.load(folder).params)
    original = {n: w.detach().numpy() for n, w in model.state_dict().items() if n in back}
    assert all((back[n] == w).all() for n, w in original.items()) and len(original) == len(back)


def check_converted(folder, where):
    """What ``scripts/convert.py`` writes is what loads directly, as it is and in eight bits. -> both models."""
    lm = specjax.load(folder, dtype="float32")
    assert run_script(folder, where / "own") == 0
    own = specjax.load(where / "own")
    assert own.config == lm.config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), own.params, lm.params))
    assert run_script(folder, where / "int8", "--quantize", "int8") == 0
    small, direct = specjax.load(where / "int8"), specjax.load(folder, dtype="float32", quantize="int8")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), small.params, direct.params))
    return lm, small
