"""Training Medusa's heads on a target that stays fixed (Cai et al. 2024, Medusa-1, section 2.2.1)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import modules
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from specjax.models.lm import LM
from specjax.training.loop import Terms, as_f32
from specjax.training.losses import Lesson, combined


@dataclasses.dataclass(frozen=True)
class MedusaObjective:
    """The loss of the heads on whole texts.

    Args:
      tokens: i32[D], the target's ids of the tokens that the heads draft.
      lm_head: [D, H], the rows of these tokens in the target's output head. They stay fixed.
      config: the heads' shape.
      loss: a name in ``specjax.training.losses.LOSSES``.
      decay: the weight of each head relative to the head before (the paper's lambda).
      first: the weights that training begins with. None: zeros, with which every head equals the target's output head.
    """

    tokens: jax.Array
    lm_head: jax.Array
    config: MedusaHeadsConfig
    loss: str = "kl"
    decay: float = 0.8
    first: dict | None = None

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        if self.first is not None:
            return {"heads": as_f32(self.first["heads"])}
        params = modules.init(MedusaHeads, self.config, seed)
        return {"heads": jax.tree.map(jnp.zeros_like, params["heads"])}

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None) -> Terms:
        """The weighted mean loss on texts i32[B, T] with weights f32[B, T], and the figures of each head."""
        del key
        out = lax.stop_gradient(target(tokens, target.alloc_cache(*tokens.shape)))
        lesson = Lesson.of(out.logits, tokens, weights, self.tokens)
        params = jax.tree.map(lambda x: x.astype(target.dtype), params)
        module = modules.merge(MedusaHeads, self.config, {**params, "lm_head": self.lm_head})
        logits = module.head(module(out.hidden))  # [B, T, heads, D]
        terms = []
        for i in range(self.config.num_heads):  # at token t, head i predicts token t + 2 + i
            log_q = jax.nn.log_softmax(logits[:, : -1 - i, i], axis=-1)
            terms.append(lesson.after(1 + i).terms(self.loss, log_q))
        return combined(terms, self.decay ** jnp.arange(self.config.num_heads))


jax.tree_util.register_dataclass(
    MedusaObjective, data_fields=["tokens", "lm_head", "first"], meta_fields=["config", "loss", "decay"]
)
