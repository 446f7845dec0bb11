"""Numbers that users write: what kind of number each is, and whether the arrays of the device can hold it."""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LARGEST_INT = 2**31 - 1  # int32
LARGEST_FLOAT = float(np.finfo(np.float32).max)
# Bounds of what logits are divided by or added to, and of what they are multiplied by: so no sum of them is infinite in
# float32, not even that of 2^31 repetitions, and no quotient is 0 / 0. A logit that is NaN leaves a row without a law.
STRONGEST, STRONGEST_REPETITION = 1e28, 1e8
SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)  # smaller ones count as 0 on most devices


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def in_range(value: Any, low: float, high: float = LARGEST_FLOAT) -> bool:
    """Whether a value is a number from low to high, so never NaN; by default one that float32 can hold."""
    return is_real(value) and bool(low <= value <= high)


def per_row(name: str, value: Any, batch: int) -> list:
    """One value a row, of a single value or a list.

    Raises:
      ValueError: a list of another length.
    """
    if isinstance(value, np.ndarray | jax.Array):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [value] * batch
    if len(value) != batch:
        raise ValueError(f"{name} has {len(value)} values for {batch} prompts; give one value, or one a prompt")
    return list(value)


class Number(NamedTuple):
    """A kind of number that an option takes, for each row."""

    off: float  # stands for None
    dtype: Any
    fits: Callable[[Any], bool]
    expected: str
    low: float = -math.inf  # what fits and is lower means the same as this
    high: float = math.inf

    def array(self, name: str, value: Any, batch: int) -> jax.Array | None:
        """One value a row, of the dtype, shape [B]; None if every row has None.

        Raises:
          ValueError: naming the option, the value got and the values expected.
        """
        values = per_row(name, value, batch)
        if all(one is None for one in values):
            return None
        for row, one in enumerate(values):
            if one is not None and not self.fits(one):
                where = f" in row {row}" if batch > 1 else ""
                raise ValueError(f"{name} must be {self.expected}, got {one!r}{where}")
        return jnp.asarray(
            [self.off if one is None else min(max(one, self.low), self.high) for one in values], self.dtype
        )


def real(off: float, low: float, high: float) -> Number:
    """float32 numbers from low to high."""
    return Number(off, jnp.float32, lambda value: in_range(value, low, high), f"a number from {low:g} to {high:g}")


def integer(low: int, note: str = "") -> Number:
    """int32 numbers from low on, 0 being off; larger ones than an int32 mean what the largest does."""
    return Number(
        0, jnp.int32, lambda value: is_int(value) and value >= low, f"an integer >= {low}{note}", high=LARGEST_INT
    )
