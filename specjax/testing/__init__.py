"""Tools to prove a drafter or verifier lossless: small models with known laws, and the checks that specjax runs itself.

:func:`check_drafter` and :func:`check_verifier` run all that applies to yours; the single checks take a
:class:`Trial`. Nothing here wants an accelerator; only the planted models are of real size.
"""

from specjax.testing.checks import (
    SETTINGS,
    Trial,
    check_acceptance_rate,
    check_accepts_all,
    check_drafter,
    check_law,
    check_no_retrace,
    check_path_independence,
    check_proposal,
    check_rows_alone,
    check_same_as_plain,
    check_verdicts,
    check_verifier,
    lossless_verifiers,
)
from specjax.testing.laws import chi_square, count_sequences, joint_law, run_tightly, sample_sequences
from specjax.testing.planted import partly_right, planted_exit, planted_lm, planted_pair
from specjax.testing.tiny_models import noisy_twin, random_params, table_lm, tiny_lm
from specjax.testing.traces import collectives, count_traces, h100_devices

__all__ = [
    "SETTINGS",
    "Trial",
    "check_acceptance_rate",
    "check_accepts_all",
    "check_drafter",
    "check_law",
    "check_no_retrace",
    "check_path_independence",
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
    "planted_exit",
    "planted_lm",
    "planted_pair",
    "random_params",
    "run_tightly",
    "sample_sequences",
    "table_lm",
    "tiny_lm",
]
