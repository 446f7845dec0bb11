"""What the documents say is true: their code runs, their names exist, and the method in one page is that of specjax."""

import pkgutil
import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from drafter_table import TARGET

import specjax
from specjax import testing
from specjax.drafters import DraftModel

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def python_blocks(page: str) -> list[str]:
    """The Python code of a page of docs/."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_the_method_on_one_page_gives_the_tokens_of_specjax(scale):
    """Round by round, for a draft that is mostly right and for one that is mostly wrong."""
    lm = testing.tiny_lm(0, max_position_embeddings=64)
    twin, prompt, size = testing.noisy_twin(lm, scale), [3, 1, 4, 1, 5], 3
    one_round = runpy.run_path(str(DOCS / "examples" / "speculative_decoding.py"))["one_round"]
    options = dict(drafter=DraftModel(twin), verifier="rejection", num_speculative_tokens=size, temperature=1.0)
    job = specjax.prepare(lm, [prompt], max_new_tokens=56, seed=7, ignore_eos=True, **options)
    state, text, accepted = job.start(), prompt, []
    for _ in range(10):
        state, info = job.decoder.round(state)
        before, text = text, one_round(probabilities(lm), probabilities(twin), text, size, jax.random.key(7))
        assert np.asarray(state.tokens[0, : state.lengths[0]]).tolist() == text
        assert len(text) - len(before) == info.accepted[0] + 1
        accepted.append(int(info.accepted[0]))
    assert min(accepted) < size and max(accepted) > 0, "the drafts should be refused and accepted somewhere"


def probabilities(lm):
    """The law after each token of a list of at most 64, f32[n, V], from one call of the model without a cache."""
    return lambda tokens: padded_law(lm, np.pad(np.array(tokens, np.int32), (0, 64 - len(tokens))))[: len(tokens)]


@jax.jit
def padded_law(lm, tokens):
    return jax.nn.softmax(lm(tokens[None], lm.alloc_cache(1, 64)).logits[0])


@pytest.mark.slow
def test_the_drafter_of_the_page_passes_every_check():
    drafter_code, use = python_blocks("write-a-drafter.md")
    names: dict = {}
    exec(drafter_code, names)
    assert "specjax.testing.check_drafter(TextBigram())" in use
    testing.check_drafter(names["TextBigram"](), TARGET, rows=100, draws=600, length=3, num_speculative_tokens=2)
    lm = testing.tiny_lm(0)
    out = specjax.generate(lm, [[1, 2, 1, 2, 1]], drafter=names["TextBigram"](), max_new_tokens=20)
    assert sum(out.metrics[0].per_step_drafted) > 0, "a text that repeats itself should be drafted for"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_and_links_of_a_page_lead_somewhere(page):
    text = page.read_text()
    for name in re.findall(r"\bspecjax(?:\.[A-Za-z_]\w*)+", text):
        assert resolves(name), f"{name} is not there"
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert "://" in link or (page.parent / link).exists(), f"{link} is not there"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one or of a class."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_index_of_public_names_is_complete():
    page = (DOCS / "api.md").read_text()
    listed = {name for code in re.findall(r"`([^`\n]+)`", page) for name in [code, code.removeprefix("specjax.")]}
    for names in (specjax.__all__, specjax.MODULES, specjax.drafters.__all__):
        assert set(names) <= listed, f"missing: {sorted(set(names) - listed)}"
    for names in (specjax.verify.__all__, specjax.testing.__all__):
        assert set(names) <= listed, f"missing: {sorted(set(names) - listed)}"


def test_the_table_of_files_names_functions_that_are_there():
    table = (DOCS / "how-it-works.md").read_text().split("## Which file does what")[1]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for mechanism, files, functions in rows:
        text, folder = "", Path()
        for name in re.findall(r"`([\w/]+\.py|[\w/]+/)`", files):
            path = ROOT / name if "/" in name else folder / name  # a bare name stands beside the one before it
            path = path if path.exists() else next(ROOT.glob(f"specjax/**/{name}"), path)
            assert path.exists(), f"{name} ({mechanism.strip()}) is not there"
            folder, text = path.parent, text + (path.read_text() if path.is_file() else "")
        for name in re.findall(r"`([\w.]+)`", functions):
            last = name.split(".")[-1]
            assert re.search(rf"^ *(def|class) {last}\b|^{last}\b.*=", text, re.MULTILINE), f"{name} is not in {files}"


def test_the_readme_fits_a_few_screens():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120
