"""The layers of a target after which a head reads hidden states: checks that the heads with such taps share."""

from typing import Any

from specjax.models.model import Model


def check_taps(name: str, taps: Any) -> None:
    """Raises ValueError unless the taps of a head are numbers of layers, at least one, rising, each once."""
    numbers = isinstance(taps, tuple) and all(type(after) is int and after >= 0 for after in taps)
    if not numbers or not taps or list(taps) != sorted(set(taps)):
        raise ValueError(
            f"the taps of {name} must be a tuple of numbers of layers, at least one, rising and each once, "
            f"such as (2, 15, 27), got {taps!r}"
        )


def check_target(name: str, size: int, taps: tuple[int, ...], target: Model) -> None:
    """Raises ValueError if a head of hidden size ``size`` and these taps was trained for another model."""
    layers = target.num_layers
    if size != target.hidden_size:
        raise ValueError(
            f"this {name} head reads hidden states of size {size}, but the target's are {target.hidden_size}: the head "
            "was trained for another model; load a head for this target"
        )
    if not all(0 <= after <= layers for after in taps):
        raise ValueError(
            f"this {name} head reads after layers {taps}, but the target has {layers}: the head was trained for "
            "another model; load a head for this target"
        )
