"""Numbers that users write: what kind of number each is, and whether the arrays of the device can hold it."""

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

LARGEST_INT = 2**31 - 1  # the largest int32
LARGEST_FLOAT = float(np.finfo(np.float32).max)
# STRONGEST bounds numbers that divide a logit or are added to a logit. STRONGEST_REPETITION bounds numbers that
# multiply a logit. Within these bounds no sum is infinite in float32, even if a penalty is added 2^31 times, and
# no quotient is 0 / 0. A single NaN among a row's logits would leave the row without a distribution.
STRONGEST, STRONGEST_REPETITION = 1e28, 1e8
SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)  # most devices treat smaller positive numbers as 0


def is_int(value: Any) -> bool:  # Python's own type goes first: to ask an abstract class takes ten times as long
    return isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool)


def are_ints(values: Iterable[Any]) -> bool:
    """Whether every value is an integer. It looks at each type once, because prompts may be long."""
    return all(issubclass(kind, numbers.Integral) and kind is not bool for kind in set(map(type, values)))


def is_real(value: Any) -> bool:
    return isinstance(value, (float, int, numbers.Real)) and not isinstance(value, bool)


def in_range(value: Any, low: float, high: float = LARGEST_FLOAT) -> bool:
    """Whether a value is a number from low to high. NaN is not. By default ``high`` is the largest float32."""
    value = value.item() if isinstance(value, np.generic) else value  # NumPy would compare a float16 in float16
    return is_real(value) and bool(low <= value <= high)


def check_count(name: str, value: Any, low: int = 1) -> int:
    """The value, an integer of at least ``low``. Raises ValueError if it is none."""
    if not (is_int(value) and value >= low):
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
    return int(value)


def check_counts(low: int, **given: Any) -> None:
    """Raises ValueError, which names the argument, unless all arguments are integers of at least ``low``."""
    for name, value in given.items():
        check_count(name, value, low)


def check_number(name: str, value: Any, low: float, high: float = LARGEST_FLOAT) -> None:
    """Raises ValueError, which names the argument, unless the value is a number from ``low`` to ``high``."""
    if not in_range(value, low, high):
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


def check_switches(**given: Any) -> None:
    """Raises ValueError, which names the argument, unless all arguments are True or False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def without_arrays(value: Any) -> Any:
    """The same value, with lists and numbers of Python in place of an array or a number of NumPy or JAX."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray | jax.Array) else value


def per_row(name: str, value: Any, batch: int) -> list:
    """A list of ``batch`` values, one for each row.

    Args:
      name: the option's name, for the error message.
      value: one value for all rows, or a list, tuple or array with one value for each row.
      batch: the number of rows.

    Raises:
      ValueError: the list has another length than ``batch``.
    """
    value = without_arrays(value)
    if not isinstance(value, list | tuple):
        return [value] * batch
    if len(value) != batch:
        raise ValueError(f"{name} has {len(value)} values for {batch} prompts; give one value, or one a prompt")
    return list(value)


class Number(NamedTuple):
    """A kind of number that an option takes for each row: which values are valid, and how they become an array."""

    # The value that the array holds for a row that gives None. It switches the option off.
    off: float
    # The dtype of the array.
    dtype: Any
    # Whether a value is valid.
    fits: Callable[[Any], bool]
    # The valid values in words, for the error message.
    expected: str
    # Valid values below ``low`` mean the same as ``low``, and the array holds ``low`` for them.
    low: float = -math.inf
    # Valid values above ``high`` mean the same as ``high``, and the array holds ``high`` for them.
    high: float = math.inf

    def array(self, name: str, value: Any, batch: int) -> np.ndarray | None:
        """The values of an option as an array of shape [B] and dtype ``self.dtype``. None if every row gives None.

        Args:
          name: the option's name, for the error message.
          value: one value for all rows, or one for each row. None means off.
          batch: B.

        Raises:
          ValueError: a value is not valid, or a list has another length than ``batch``. The message names the option,
            the value and the expected values.
        """
        values = per_row(name, value, batch)
        if all(one is None for one in values):
            return None
        for row, one in enumerate(values):
            if one is not None and not self.fits(one):
                where = f" in row {row}" if batch > 1 else ""
                raise ValueError(f"{name} must be {self.expected}, got {one!r}{where}")
        return np.asarray(
            [self.off if one is None else min(max(one, self.low), self.high) for one in values], self.dtype
        )


def real(off: float, low: float, high: float) -> Number:
    """The kind of float32 numbers from ``low`` to ``high``, where ``off`` stands for None."""
    return Number(off, np.float32, lambda value: in_range(value, low, high), f"a number from {low:g} to {high:g}")


def integer(low: int, note: str = "") -> Number:
    """The kind of int32 numbers from ``low`` on, where 0 is off. Numbers above the largest int32 count as the largest.

    Args:
      low: the smallest valid number.
      note: a remark on the numbers for the error message.
    """
    return Number(
        0, np.int32, lambda value: is_int(value) and value >= low, f"an integer >= {low}{note}", high=LARGEST_INT
    )
