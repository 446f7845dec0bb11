"""Training PaSS's look-ahead tokens on a target that stays as it is (Monea et al. 2023, section 3.2)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import cache as kv
from specjax.models import llama
from specjax.models.heads.pass_tokens import PassConfig
from specjax.models.lm import LM
from specjax.training.loop import Terms, as_f32
from specjax.training.losses import Lesson, combined


@dataclasses.dataclass(frozen=True)
class PaSSObjective:
    """The loss of the look-ahead tokens after several places of whole texts.

    Args:
      first: weights to begin with, {"table": [L, H]}.
      config: how many tokens there are, and their size.
      places: of a text, after which the look-ahead tokens stand in a step; each costs L tokens.
      loss: a name of ``specjax.training.losses.LOSSES``.
      decay: weight of each look-ahead token over that of the one before.
    """

    first: dict
    config: PassConfig
    places: int = 32
    loss: str = "kl"
    decay: float = 0.8

    @classmethod
    def of(cls, target: LM, num_tokens: int = 3, places: int = 32, loss: str = "kl") -> "PaSSObjective":
        """Look-ahead tokens that begin as the mean of the target's embeddings."""
        mean = jnp.mean(target.embed(jnp.arange(target.config.vocab_size)).astype(jnp.float32), axis=0)
        config = PassConfig(target.config.hidden_size, num_tokens)
        return cls({"table": jnp.tile(mean, (num_tokens, 1))}, config, places, loss)

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        del seed
        return as_f32(self.first)

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None) -> Terms:
        """The mean loss over texts i32[B, T] by weights f32[B, T], and each look-ahead token's acceptance.

        Look-ahead token l after place t is asked what follows token t + 1 + l, which the text itself has at t + 1 + l.
        """
        batch, size = tokens.shape
        ahead, places = self.config.num_tokens, min(self.places, size - self.config.num_tokens - 2)
        if key is None:
            at = jnp.linspace(0, size - ahead - 3, places).astype(jnp.int32)
        else:
            at = jnp.sort(jax.random.permutation(key, size - ahead - 2)[:places]).astype(jnp.int32)
        later = at[:, None] + 1 + jnp.arange(ahead)  # [M, L] positions of the look-ahead tokens
        hidden = self._hidden(params, target, tokens, at, later)  # [B, T + M L, H]

        def logits_of(hidden: jax.Array) -> jax.Array:
            return llama.merge(target.config, target.params).head(hidden)

        p = lax.stop_gradient(jax.nn.softmax(logits_of(hidden[:, later]), axis=-1))  # [B, M, L, V]
        log_q = jax.nn.log_softmax(logits_of(hidden[:, size:].reshape(batch, places, ahead, -1)), axis=-1)
        lesson = Lesson(p, jnp.argmax(p, axis=-1), tokens[:, later + 1], weights[:, later + 1])
        terms = [jax.tree.map(lambda x, i=i: x[:, :, i], lesson).terms(self.loss, log_q[:, :, i]) for i in range(ahead)]
        return combined(terms, self.decay ** jnp.arange(ahead))

    def _hidden(
        self, params: dict, target: LM, tokens: jax.Array, at: jax.Array, later: jax.Array
    ) -> jax.Array:
        """The target's last hidden states on texts and, behind them, on the look-ahead tokens after each place.

        A look-ahead token sees its text up to its place, and those before it after the same place.
        """
        batch, size = tokens.shape
        places, ahead = later.shape
        table = jnp.tile(params["table"].astype(target.dtype), (places, 1))  # [M L, H]
        block = jnp.concatenate([target.embed(tokens), jnp.broadcast_to(table, (batch, *table.shape))], axis=1)
        index = jnp.arange(size)
        positions = jnp.concatenate([index, later.reshape(-1)])
        own_text = jnp.repeat(index <= at[:, None], ahead, axis=0)  # [M L, T]
        group = jnp.repeat(jnp.arange(places), ahead)
        together = (group[:, None] == group) & (jnp.arange(len(group))[:, None] >= jnp.arange(len(group)))
        of_text = jnp.concatenate([index[:, None] >= index, jnp.zeros((size, len(group)), bool)], axis=1)
        mask = jnp.concatenate([of_text, jnp.concatenate([own_text, together], axis=1)])
        total = len(positions)
        cache = kv.with_lengths(target.alloc_cache(batch, total), jnp.zeros(batch, jnp.int32))
        everyone = jnp.broadcast_to(positions, (batch, total)), jnp.broadcast_to(mask, (batch, total, total))
        return target(None, cache, *everyone, with_logits=False, embedded=block).hidden


jax.tree_util.register_dataclass(
    PaSSObjective, data_fields=["first"], meta_fields=["config", "places", "loss", "decay"]
)
