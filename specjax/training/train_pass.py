"""Training PaSS's look-ahead tokens on a target that stays fixed (Monea et al. 2023, section 3.2)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import cache as kv
from specjax.models import families
from specjax.models.heads.pass_tokens import PassConfig
from specjax.models.lm import LM
from specjax.training.loop import Terms, as_f32
from specjax.training.losses import Lesson, combined


@dataclasses.dataclass(frozen=True)
class PaSSObjective:
    """The loss of L look-ahead tokens after several places of whole texts.

    Args:
      first: the weights that training begins with, {"table": [L, H]}.
      config: how many look-ahead tokens there are, and the size of their embeddings.
      places: M, after how many places of each text the look-ahead tokens stand in a step. Each place costs L tokens.
      loss: a name in ``specjax.training.losses.LOSSES``.
      decay: the weight of each look-ahead token relative to the one before.
    """

    first: dict
    config: PassConfig
    places: int = 32
    loss: str = "kl"
    decay: float = 0.8

    @classmethod
    def of(cls, target: LM, num_tokens: int = 3, places: int = 32, loss: str = "kl") -> "PaSSObjective":
        """The objective of ``num_tokens`` look-ahead tokens that begin as the mean of the target's embeddings."""
        mean = jnp.mean(target.embed(jnp.arange(target.config.vocab_size)).astype(jnp.float32), axis=0)
        config = PassConfig(target.config.hidden_size, num_tokens)
        return cls({"table": jnp.tile(mean, (num_tokens, 1))}, config, places, loss)

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        del seed
        return as_f32(self.first)

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None) -> Terms:
        """The weighted mean loss on texts i32[B, T] with weights f32[B, T], and the figures of each look-ahead token.

        Look-ahead token l after place t stands at position t + 1 + l and predicts token t + 2 + l. The target's answer
        at position t + 1 + l of the text itself is the right one.
        """
        batch, size = tokens.shape
        ahead, places = self.config.num_tokens, min(self.places, size - self.config.num_tokens - 2)
        if key is None:
            chosen = jnp.linspace(0, size - ahead - 3, places).astype(jnp.int32)  # [M] positions
        else:
            chosen = jnp.sort(jax.random.permutation(key, size - ahead - 2)[:places]).astype(jnp.int32)
        later = chosen[:, None] + 1 + jnp.arange(ahead)  # [M, L] positions of the look-ahead tokens
        hidden = self._hidden(params, target, tokens, chosen, later)  # [B, T + M L, H]

        def logits_of(hidden: jax.Array) -> jax.Array:
            return families.merge(target.config, target.params).head(hidden)

        p = lax.stop_gradient(jax.nn.softmax(logits_of(hidden[:, later]), axis=-1))  # [B, M, L, V]
        log_q = jax.nn.log_softmax(logits_of(hidden[:, size:].reshape(batch, places, ahead, -1)), axis=-1)
        lesson = Lesson(p, jnp.argmax(p, axis=-1), tokens[:, later + 1], weights[:, later + 1])
        terms = [jax.tree.map(lambda x, i=i: x[:, :, i], lesson).terms(self.loss, log_q[:, :, i]) for i in range(ahead)]
        return combined(terms, self.decay ** jnp.arange(ahead))

    def _hidden(
        self, params: dict, target: LM, tokens: jax.Array, chosen: jax.Array, later: jax.Array
    ) -> jax.Array:
        """The target's last hidden states on texts and on look-ahead tokens, [B, T + M L, H].

        A block has the text first, and behind it the L look-ahead tokens of each place. A look-ahead token sees the
        text up to its place, the earlier look-ahead tokens of the same place, and itself.

        Args:
          params: the trainable weights.
          target: the target.
          tokens: i32[B, T], the texts.
          chosen: i32[M], the position of each place.
          later: i32[M, L], the positions of the look-ahead tokens.
        """
        batch, size = tokens.shape
        places, ahead = later.shape
        table = jnp.tile(params["table"].astype(target.dtype), (places, 1))  # [M L, H]
        block = jnp.concatenate([target.embed(tokens), jnp.broadcast_to(table, (batch, *table.shape))], axis=1)
        index = jnp.arange(size)
        positions = jnp.concatenate([index, later.reshape(-1)])
        before = jnp.repeat(index <= chosen[:, None], ahead, axis=0)  # [M L, T] the text up to each place
        group = jnp.repeat(jnp.arange(places), ahead)
        together = (group[:, None] == group) & (jnp.arange(len(group))[:, None] >= jnp.arange(len(group)))
        of_text = jnp.concatenate([index[:, None] >= index, jnp.zeros((size, len(group)), bool)], axis=1)
        mask = jnp.concatenate([of_text, jnp.concatenate([before, together], axis=1)])
        total = len(positions)
        cache = kv.with_lengths(target.alloc_cache(batch, total), jnp.zeros(batch, jnp.int32))
        positions, mask = jnp.broadcast_to(positions, (batch, total)), jnp.broadcast_to(mask, (batch, total, total))
        return target(None, cache, positions, mask, with_logits=False, embedded=block).hidden


jax.tree_util.register_dataclass(
    PaSSObjective, data_fields=["first"], meta_fields=["config", "places", "loss", "decay"]
)
