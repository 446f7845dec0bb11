"""Training EAGLE's heads as they are used: on their own outputs, for a few steps (Li et al. 2025, section 3.2).

The head of the first EAGLE is trained in the same way. Its paper trains the head to repeat the target's hidden states,
but only the head's drafts matter.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import cache as kv
from specjax.models import modules
from specjax.models.heads import eagle3_head
from specjax.models.heads.eagle1_head import Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3HeadConfig
from specjax.models.lm import LM
from specjax.models.model import Output
from specjax.training.loop import Terms, as_f32
from specjax.training.losses import Lesson, combined


@dataclasses.dataclass(frozen=True)
class EagleObjective:
    """The loss of a head on whole texts.

    Args:
      tokens: i32[D], the target's ids of the tokens that the head drafts.
      lm_head: [D, H], the rows of these tokens in the target's output head. They stay fixed.
      config: the head's shape.
      steps: how many drafted tokens in a row the head is trained for.
      loss: a name in ``specjax.training.losses.LOSSES``.
      decay: the weight of each step relative to the step before.
      first: the weights that training begins with. None: random weights.
    """

    tokens: jax.Array
    lm_head: jax.Array
    config: Eagle3HeadConfig | Eagle1HeadConfig
    steps: int = 4
    loss: str = "kl"
    decay: float = 0.9
    first: dict | None = None

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        params = modules.init(self.config.module, self.config, seed) if self.first is None else as_f32(self.first)
        return {name: leaf for name, leaf in params.items() if name != "lm_head"}

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None) -> Terms:
        """The weighted mean loss on texts i32[B, T] with weights f32[B, T], and the figures of each step."""
        del key
        out = lax.stop_gradient(target(tokens, target.alloc_cache(*tokens.shape), taps=self.config.taps))
        lesson = Lesson.of(out.logits, tokens, weights, self.tokens).after(1)  # entry j predicts token j + 2
        index = jnp.arange(tokens.shape[1] - 1)
        terms = []
        for step, log_q in enumerate(self.unrolled(params, target, tokens, out)):
            begun = lesson._replace(weights=lesson.weights * (index >= step))
            terms.append(begun.terms(self.loss, log_q))
        return combined(terms, self.decay ** jnp.arange(self.steps))

    def unrolled(
        self, params: dict, target: LM, tokens: jax.Array, out: Output
    ) -> Iterator[jax.Array]:
        """The drafter's log q of each step's entries, f32[B, T-1, D].

        Entry j of step s belongs to a draft that began s entries earlier, at entry j - s. Entry j sees the target's
        states up to the entry at which the draft began, and the draft's own outputs after that.

        Args:
          params: the trainable weights.
          target: the target.
          tokens: i32[B, T], the texts.
          out: the target's answers to the texts.
        """
        params = jax.tree.map(lambda x: x.astype(target.dtype), params)
        head = modules.merge(self.config.module, self.config, {**params, "lm_head": self.lm_head})
        features = head.features(*jax.tree.map(lambda x: x[:, :-1], (out.taps, out.hidden)))
        embedded = target.embed(tokens[:, 1:])
        batch, entries = embedded.shape[:2]
        cache = eagle3_head.alloc_cache(self.config, batch, entries * self.steps, target.dtype)
        index = jnp.arange(entries)
        ago = index[:, None] - index  # [T-1, T-1] how many entries earlier each other entry stands
        for step in range(self.steps):
            sees = [ago >= step] + [ago == step - s for s in range(1, self.steps)]  # no entry of later steps
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
    EagleObjective, data_fields=["tokens", "lm_head", "first"], meta_fields=["config", "steps", "loss", "decay"]
)
