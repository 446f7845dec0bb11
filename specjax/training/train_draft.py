"""Distilling a small draft model from the target. The draft uses the target's embedding and head, which stay fixed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models.config import LlamaConfig
from specjax.models.lm import LM
from specjax.training.loop import Terms, as_f32
from specjax.training.losses import Lesson


@dataclasses.dataclass(frozen=True)
class DraftObjective:
    """The loss of a draft model of few layers on whole texts.

    Args:
      shared: the target's weights that the draft uses too: "embed", and "lm_head" unless the head is tied to "embed".
      first: the weights that training begins with: "layers" and "norm".
      config: the draft model's config.
      loss: a name in ``specjax.training.losses.LOSSES``.
    """

    shared: dict
    first: dict
    config: LlamaConfig
    loss: str = "kl"

    @classmethod
    def from_layers(cls, target: LM, layers: tuple[int, ...], loss: str = "kl") -> "DraftObjective":
        """The objective of a draft that begins as a copy of some of the target's layers.

        Args:
          target: the target.
          layers: the numbers of the layers, in the order in which the draft has them.
          loss: a name in ``specjax.training.losses.LOSSES``.

        Raises:
          ValueError: there is no layer, or the target has no layer of a number.
        """
        count = target.config.num_hidden_layers
        outside = [i for i in layers if not 0 <= i < count]
        if outside or not layers:
            raise ValueError(f"layers must name some of the target's 0 to {count - 1}, got {layers}")
        shared = {name: target.params[name] for name in ("embed", "lm_head") if name in target.params}
        chosen = {str(new): target.params["layers"][str(old)] for new, old in enumerate(layers)}
        first = {"layers": chosen, "norm": target.params["norm"]}
        if not isinstance(target.config, LlamaConfig):
            raise ValueError(
                f"a draft is trained from the layers of a Llama or a relative, got a {target.config.model_type}; use a "
                "smaller model of the family as the draft"
            )
        config = target.config.of_layers(layers)
        return cls(shared, first, config, loss)

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        del seed
        return as_f32(self.first)

    def lm(self, params: dict, dtype: Any) -> LM:
        """The draft model with these weights."""
        return LM(self.config, {**self.shared, **jax.tree.map(lambda x: x.astype(dtype), params)})

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None) -> Terms:
        """The weighted mean loss on texts i32[B, T] with weights f32[B, T], and the figures of :meth:`Lesson.terms`."""
        del key
        batch, size = tokens.shape
        logits = lax.stop_gradient(target(tokens, target.alloc_cache(batch, size)).logits)
        draft = self.lm(params, target.dtype)
        log_q = jax.nn.log_softmax(draft(tokens, draft.alloc_cache(batch, size)).logits, axis=-1)
        terms = Lesson.of(logits, tokens, weights, jnp.arange(self.config.vocab_size)).terms(self.loss, log_q)
        return terms["loss"], terms


jax.tree_util.register_dataclass(DraftObjective, data_fields=["shared", "first"], meta_fields=["config", "loss"])
