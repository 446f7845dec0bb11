"""Training an EAGLE-3 head as it is used: fed with its own outputs for a few steps (Li et al. 2025, section 3.2)."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import cache as kv
from specjax.models import eagle, modules
from specjax.models.eagle import EagleConfig
from specjax.models.lm import LM
from specjax.training.loop import Terms, mean
from specjax.training.losses import LOSSES


@dataclasses.dataclass(frozen=True)
class EagleObjective:
    """The loss of a head over whole texts.

    Args:
      tokens: i32[D], the target's ids of the tokens that it drafts.
      lm_head: [D, H], their rows of the target's output head, which stay as they are.
      config: the head's shape.
      steps: how many drafted tokens in a row it is trained for.
      loss: a name of ``specjax.training.losses.LOSSES``.
      decay: weight of each step over that of the one before.
    """

    tokens: jax.Array
    lm_head: jax.Array
    config: EagleConfig
    steps: int = 4
    loss: str = "kl"
    decay: float = 0.9

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        params = modules.init(eagle.Eagle, self.config, seed)
        return {name: leaf for name, leaf in params.items() if name != "lm_head"}

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array) -> Terms:
        """The mean loss over texts i32[B, T] by weights f32[B, T], and each step's acceptance on the same text."""
        batch, size = tokens.shape
        out = target(tokens, target.alloc_cache(batch, size), taps=self.config.taps)
        out = lax.stop_gradient(out)
        logits = out.logits[:, 1:]  # [B, T-1, V]: after token j + 1, for entry j
        some = logits[..., self.tokens]  # [B, T-1, D]
        p = jnp.exp(some - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        best = jnp.argmax(logits, axis=-1)  # over all of V
        following = _index_in(self.tokens, jnp.pad(tokens[:, 2:], ((0, 0), (0, 1))), target.config.vocab_size)
        weights = jnp.pad(weights[:, 2:], ((0, 0), (0, 1)))  # of the token that entry j predicts

        terms = []
        for step, log_q in enumerate(self.unrolled(params, target, tokens, out.taps)):
            w = weights * (jnp.arange(size - 1) >= step)
            terms.append(
                {
                    "loss": mean(LOSSES[self.loss](p, log_q, following), w),
                    "alpha": mean(jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1), w),
                    "greedy": mean(self.tokens[jnp.argmax(log_q, axis=-1)] == best, w),
                }
            )
        scale = self.decay ** jnp.arange(self.steps)
        loss = jnp.sum(scale * jnp.stack([t["loss"] for t in terms])) / jnp.sum(scale)
        return loss, {name: jnp.stack([t[name] for t in terms]) for name in terms[0]}

    def unrolled(
        self, params: dict, target: LM, tokens: jax.Array, taps: Mapping[int, jax.Array]
    ) -> Iterator[jax.Array]:
        """log q f32[B, T-1, D] of each step's entries, on texts i32[B, T] with the target's states [B, T, H].

        Entry j of step s is where a draft begun s steps earlier has come to: it sees the target's states up to where
        that began, and the draft's own outputs after.
        """
        params = jax.tree.map(lambda x: x.astype(target.dtype), params)
        head = modules.merge(eagle.Eagle, self.config, {**params, "lm_head": self.lm_head})
        features = head.features(jax.tree.map(lambda x: x[:, :-1], taps))
        embedded = target.embed(tokens[:, 1:])
        batch, entries = embedded.shape[:2]
        cache = eagle.alloc_cache(self.config, batch, entries * self.steps, target.dtype)
        index = jnp.arange(entries)
        ago = index[:, None] - index  # [T-1, T-1]
        for step in range(self.steps):
            sees = [ago >= step] + [ago == step - s for s in range(1, self.steps)]  # none of the steps to come
            mask = jnp.concatenate(sees, axis=1) & (jnp.arange(entries * self.steps) < entries * (step + 1))
            hidden, cache = head(
                embedded,
                features,
                kv.with_lengths(cache, jnp.full(batch, step * entries)),
                jnp.broadcast_to(index, (batch, entries)),
                jnp.broadcast_to(mask, (batch, *mask.shape)),
            )
            yield jax.nn.log_softmax(head.head(hidden), axis=-1)
            features = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))


jax.tree_util.register_dataclass(
    EagleObjective, data_fields=["tokens", "lm_head"], meta_fields=["config", "steps", "loss", "decay"]
)


def _index_in(tokens: jax.Array, wanted: jax.Array, vocab: int) -> jax.Array:
    """Where each wanted token is among the D tokens, or D."""
    return jnp.full(vocab, tokens.shape[0]).at[tokens].set(jnp.arange(tokens.shape[0]))[wanted]
