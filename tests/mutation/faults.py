"""Faults that shipped systems have had, each a small patch of a public function, and the tests that must see it.

Loaded as a pytest plugin it plants the one that the environment names, before anything is traced, so that any test
can be tried against it by hand (from the repository's root):

    SPECJAX_FAULT=residual_not_subtracted PYTHONPATH=.:tests/mutation python -m pytest -p faults
"""

import os

import faults_in_beams  # noqa: F401  (an import registers the faults of a file)
import faults_in_drafters  # noqa: F401
import faults_in_engine  # noqa: F401
import faults_in_rounds  # noqa: F401
from planting import FAULTS

if os.environ.get("SPECJAX_FAULT"):
    FAULTS[os.environ["SPECJAX_FAULT"]][0]()
