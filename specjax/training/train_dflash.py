"""Training DFlash's head on blocks that begin at chosen tokens of a text (Chen et al. 2026, DFlash, section 4.2).

A block begins at an anchor, which stands for the last committed token; the tokens after the anchor are masked. All
blocks of a text are one call of the head: a token of a block sees the target's states at tokens before the anchor, and
its own block. So training uses the module, mask and cache of drafting.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import rows_at, span
from specjax.models import cache as kv
from specjax.models import modules
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.lm import LM
from specjax.models.model import Output
from specjax.training.loop import Terms, as_f32
from specjax.training.losses import Lesson, combined

COVER = 2  # how many blocks a token of a text stands in, on average


@dataclasses.dataclass(frozen=True)
class DFlashObjective:
    """The loss of a head on whole texts.

    Args:
      tokens: i32[D], the target's ids of the tokens that the head drafts.
      lm_head: [D, H], the rows of these tokens in the target's output head. They stay fixed.
      config: the head's shape.
      loss: a name in ``specjax.training.losses.LOSSES``.
      decay: the weight of each place in the block relative to the place before.
      first: the weights that training begins with. None: random weights.
    """

    tokens: jax.Array
    lm_head: jax.Array
    config: DFlashHeadConfig
    loss: str = "kl"
    decay: float = 0.8
    first: dict | None = None

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        params = modules.init(DFlashHead, self.config, seed) if self.first is None else as_f32(self.first)
        return {name: leaf for name, leaf in params.items() if name != "lm_head"}

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None) -> Terms:
        """The weighted mean loss on texts i32[B, T] with weights f32[B, T], and the figures of each place in the block.

        Anchors are random. If the loss is only measured, they lie evenly.
        """
        out = lax.stop_gradient(target(tokens, target.alloc_cache(*tokens.shape), taps=self.config.taps))
        lesson = Lesson.of(out.logits, tokens, weights, self.tokens)
        batch, length = tokens.shape
        size = min(self.config.block_size, length)
        blocks, last = COVER * length // size, length - size  # the last place where a whole block fits
        if key is None:
            anchors = jnp.broadcast_to(jnp.linspace(0, last, blocks, dtype=jnp.int32), (batch, blocks))
        else:
            anchors = jax.random.randint(key, (batch, blocks), 0, last + 1, jnp.int32)
        logits = self.logits(params, target, tokens, out, anchors)
        terms = []
        for place in range(1, size):  # the target's answer after the token before this place
            taught = Lesson(*(rows_at(x, anchors + place - 1) for x in lesson))
            terms.append(taught.terms(self.loss, jax.nn.log_softmax(logits[:, :, place - 1], axis=-1)))
        return combined(terms, self.decay ** jnp.arange(len(terms)))

    def logits(self, params: dict, target: LM, tokens: jax.Array, out: Output, anchors: jax.Array) -> jax.Array:
        """The head's logits at the masked places of all blocks, f32[B, A, S - 1, D].

        Args:
          params: the trainable weights.
          target: the target.
          tokens: i32[B, T], the texts.
          out: the target's answers to the texts.
          anchors: i32[B, A], the position of each block's first token.
        """
        params = jax.tree.map(lambda x: x.astype(target.dtype), params)
        head = modules.merge(DFlashHead, self.config, {**params, "lm_head": self.lm_head})
        (batch, count), length, size = anchors.shape, tokens.shape[1], self.config.block_size
        cache = kv.alloc(self.config.layer, batch, length + count * size, target.dtype)
        cache = kv.with_lengths(head.remember(out.taps, cache), jnp.full(batch, length))
        first = rows_at(tokens, anchors)[..., None]  # [B, A, 1]
        block = jnp.pad(first, ((0, 0), (0, 0), (0, size - 1)), constant_values=self.config.mask_token_id)
        positions = anchors[..., None] + span(size)  # [B, A, S]
        before = jnp.arange(length) < anchors[..., None]  # [B, A, T]
        own = jnp.repeat(jnp.eye(count, dtype=bool), size, axis=1)  # [A, A S]
        mask = jnp.concatenate([before, jnp.broadcast_to(own, (batch, *own.shape))], axis=-1)
        hidden, _ = head(
            target.embed(block.reshape(batch, -1)), cache, positions.reshape(batch, -1), jnp.repeat(mask, size, axis=1)
        )
        return head.head(hidden.reshape(batch, count, size, -1)[:, :, 1:])


jax.tree_util.register_dataclass(
    DFlashObjective, data_fields=["tokens", "lm_head", "first"], meta_fields=["config", "loss", "decay"]
)
