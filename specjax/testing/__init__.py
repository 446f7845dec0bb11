"""Tools to test that a drafter or a verifier is lossless: small models with known laws, and specjax's own checks.

:func:`check_drafter` runs all checks of a drafter, and :func:`check_verifier` runs all checks of a verifier. Each
single check takes a :class:`Trial`. Nothing here needs an accelerator. Only the planted models have a real size.
"""

from specjax.testing.checks import (
    check_acceptance_rate,
    check_accepts_all,
    check_drafter,
    check_law,
    check_no_retrace,
    check_path_independence,
    check_plan,
    check_proposal,
    check_rows_alone,
    check_same_as_plain,
    check_verifier,
    lossless_verifiers,
)
from specjax.testing.laws import chi_square, count_sequences, joint_law, run_tightly, sample_sequences
from specjax.testing.planted import partly_right, planted_exit, planted_lm, planted_pair
from specjax.testing.planted_dflash import planted_dflash
from specjax.testing.planted_eagle import planted_eagle3
from specjax.testing.planted_text import planted_writer, planted_writers
from specjax.testing.tiny_models import noisy_twin, random_params, table_lm, tiny_lm
from specjax.testing.traces import collectives, count_traces, h100_devices
from specjax.testing.trial import SETTINGS, Trial
from specjax.testing.verdicts import check_verdicts

__all__ = [
    "SETTINGS",
    "Trial",
    "check_acceptance_rate",
    "check_accepts_all",
    "check_drafter",
    "check_law",
    "check_no_retrace",
    "check_path_independence",
    "check_plan",
    "check_proposal",
    "check_rows_alone",
    "check_same_as_plain",
    "check_verdicts",
    "check_verifier",
    "chi_square",
    "collectives",
    "count_sequences",
    "count_traces",
    "h100_devices",
    "joint_law",
    "lossless_verifiers",
    "noisy_twin",
    "partly_right",
    "planted_dflash",
    "planted_eagle3",
    "planted_exit",
    "planted_lm",
    "planted_pair",
    "planted_writer",
    "planted_writers",
    "random_params",
    "run_tightly",
    "sample_sequences",
    "table_lm",
    "tiny_lm",
]
