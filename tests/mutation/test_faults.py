"""Every planted fault is caught by the tests that claim to catch it: pytest -m slow tests/mutation -s."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from faults import FAULTS

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, *"-m pytest -p faults -n 0 --tb=no -rf -m".split(), "slow or not slow"]


def test_the_tests_that_catch_faults_are_there():
    """Their names only: a wrong parameter shows in the slow test."""
    for fault, (_, caught_by) in FAULTS.items():
        for file, name in (test.split("[")[0].split("::") for test in caught_by):
            assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8"), f"{fault} names {file}::{name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    """A process of its own for each, since compiled programs would outlive a patch."""
    expected = FAULTS[name][1]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*PYTEST, *expected],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "SPECJAX_FAULT": name, "COLUMNS": "400"},
    )  # fmt: skip
    # Caught by what the test asserts: a crash of the patch itself doesn't count.
    caught = [t for t in expected if re.search(f"FAILED {re.escape(t)} - (assert |AssertionError)", run.stdout)]
    print(f"\n{name}: {', '.join(test.split('::')[1] for test in caught)}")
    assert run.returncode == 1 and set(caught) == set(expected), run.stdout + run.stderr
