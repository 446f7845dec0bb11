"""Self-drafting: the target with some of its sublayers left out, on its own weights and its own cache.

Leaving out all layers from one on is LayerSkip (Elhoushi et al. 2024, early exit). Leaving out any set of attention and
MLP sublayers is Draft & Verify (Zhang et al. 2024).
"""

import dataclasses
from collections.abc import Iterable

import jax

from specjax.decode.numeric import check_count, is_int
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import Stateless, static
from specjax.drafting.draw_chain import check_temperature, draw_chain
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model


@static
@dataclasses.dataclass(frozen=True)
class LayerSkip(Stateless):
    """Draws K tokens from the target without some of its sublayers.

    There is no cache but the target's. The draft reads the committed tokens' entries as verification left them, and
    writes its own entries past them. Verification overwrites those. So each draft step feeds only one token.

    Args:
      exit_layer: layers from this number on are left out. None keeps all layers.
      skip_attention: the numbers of the layers whose attention is left out.
      skip_mlp: the numbers of the layers whose MLP is left out.
      temperature: replaces the request's temperature while drafting. None: the request's.

    Raises:
      ValueError: ``exit_layer`` is no integer of at least 1, a list of layers holds something else than integers, or
        ``temperature`` is no number from 0 on. ``plan`` raises ValueError if the target has no layer of some number.
    """

    exit_layer: int | None = None
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    temperature: float | None = None

    def __post_init__(self):
        for name in ("skip_attention", "skip_mlp"):  # a list has no hash, and static fields need one
            layers = getattr(self, name)
            if not (isinstance(layers, Iterable) and all(map(is_int, layers := tuple(layers)))):
                raise ValueError(f"{name} must be a list of numbers of layers, got {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(sorted(set(layers))))
        if self.exit_layer is not None:
            check_count("exit_layer", self.exit_layer)
        check_temperature(self.temperature)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        layers = target.num_layers
        if self.exit_layer is not None and not 1 <= self.exit_layer <= layers:
            raise ValueError(f"exit_layer must be from 1 to the target's {layers} layers, got {self.exit_layer!r}")
        for name in ("skip_attention", "skip_mlp"):
            outside = [i for i in getattr(self, name) if not 0 <= i < layers]
            if outside:
                raise ValueError(f"{name} must name layers 0 to {layers - 1} of the target, got {outside[0]!r}")
        return super().plan(target, num_speculative_tokens)

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        run = self.run(target.num_layers)

        def next_logits(cache, previous, last, position):
            out = target(last[:, None], kv.with_lengths(cache, position), run=run)
            return out.logits[:, 0], out.cache

        vocab = target.vocab_size
        draft, cache = draw_chain(
            next_logits, state.cache, state, keys, num_speculative_tokens, vocab, self.temperature
        )
        return draft, own, cache

    def run(self, num_layers: int) -> tuple[tuple[bool, bool], ...]:
        """For each of ``num_layers`` layers: whether its attention runs, and whether its MLP runs."""
        end = num_layers if self.exit_layer is None else self.exit_layer
        layers = range(num_layers)
        return tuple((i < end and i not in self.skip_attention, i < end and i not in self.skip_mlp) for i in layers)
