"""Verifiers, by the names that ``generate(verifier=...)`` takes."""

from specjax.verify.coupled import Coupled
from specjax.verify.rejection import Rejection

VERIFIERS = {"rejection": Rejection(), "coupled": Coupled()}

__all__ = ["VERIFIERS", "Coupled", "Rejection"]
