"""Tools to prove a drafter or verifier lossless: small models with known laws, and the checks that specjax runs itself.

Everything here runs on the host and wants no accelerator; only the planted models are of real size.
"""

from specjax.testing.models import noisy_twin, table_lm, tiny_lm
from specjax.testing.planted import planted_lm, planted_pair

__all__ = ["noisy_twin", "planted_lm", "planted_pair", "table_lm", "tiny_lm"]
