"""Training a model to leave early, so that its first layers draft for all of it (LayerSkip, Elhoushi et al. 2024)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import llama
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM
from specjax.models.quantized import kind_of
from specjax.training.loop import Terms
from specjax.training.losses import Lesson, combined, mean
from specjax.training.sublayers import weighted
from specjax.training.train_draft import DraftObjective


@dataclasses.dataclass(frozen=True)
class EarlyExitObjective:
    """The loss of leaving a model after each of a few layers, and after the last, on whole texts.

    The target is the teacher and stays as it is: what is trained is a copy of its layers and last norm, with its
    embedding and head.

    Args:
      whole: all of the target's layers, to begin with.
      exits: after how many layers it may be left, rising; the last is all of them.
      dropout: how often the last layer is left out of a step. Earlier ones are left out less, the first never.
      loss: a name of ``specjax.training.losses.LOSSES``.
    """

    whole: DraftObjective
    exits: tuple[int, ...]
    dropout: float = 0.1
    loss: str = "kl"

    @classmethod
    def of(
        cls, target: LM, exits: tuple[int, ...] = (), dropout: float = 0.1, loss: str = "kl"
    ) -> "EarlyExitObjective":
        """A copy of the target, trained on from there. Without ``exits``: a fifth, a third and half of its layers.

        Raises:
          ValueError: the target has no such layer, or is quantised; ``dropout`` is no probability.
        """
        layers = target.config.num_hidden_layers
        exits = exits or tuple(max(1, layers // part) for part in (5, 3, 2))
        if not all(1 <= after <= layers for after in exits):
            raise ValueError(f"exits must be after 1 to {layers} of the target's layers, got {exits}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        if kind := kind_of(target.params):
            raise ValueError(f"a model of {kind} weights can't be trained on; load the original")
        whole = DraftObjective.from_layers(target, tuple(range(layers)))
        return cls(whole, tuple(sorted({*exits, layers})), dropout, loss)

    @property
    def config(self) -> LlamaConfig:
        return self.whole.config

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        return self.whole.init(seed)

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None) -> Terms:
        """The mean loss over texts i32[B, T] by weights f32[B, T], and for each exit its acceptance by the target as it
        was ("alpha"; of the last: how far the model has stayed itself) and by the model as it now is ("own").

        An exit weighs in the loss as many times as it has layers. (The paper's scale is quadratic, for a loss at every
        layer; of few exits it would leave the first next to nothing.)
        """
        lesson = Lesson.of(
            lax.stop_gradient(target(tokens, target.alloc_cache(*tokens.shape)).logits),
            tokens, weights, jnp.arange(self.config.vocab_size),
        )  # fmt: skip
        model = self.whole.lm(params, target.dtype)
        if key is not None:
            model = weighted(model, self.kept(key))
        out = model(tokens, model.alloc_cache(*tokens.shape), with_logits=False, taps=self.exits)

        def log_q(norm: dict, hidden: jax.Array) -> jax.Array:
            module = llama.merge(self.config, {**model.params, "norm": norm})
            return jax.nn.log_softmax(module.head(module.norm(hidden)), axis=-1)

        # Checkpointed: of all that is as wide as the vocabulary, one exit's is kept at a time.
        @jax.checkpoint
        def left_after(norm: dict, hidden: jax.Array, lesson: Lesson, own: jax.Array) -> dict[str, jax.Array]:
            said = log_q(norm, hidden)
            accepted = mean(jnp.sum(jnp.minimum(own, jnp.exp(said)), axis=-1), lesson.weights)
            return {**lesson.terms(self.loss, said), "own": accepted}

        norm = model.params["norm"]
        own = lax.stop_gradient(jnp.exp(log_q(norm, out.taps[self.exits[-1]])))
        terms = [left_after(norm, out.taps[after], lesson, own) for after in self.exits]
        return combined(terms, jnp.array(self.exits, jnp.float32))

    def kept(self, key: jax.Array) -> jax.Array:
        """Which sublayers take part in a step, 1 or 0: f32[layers, 2].

        Layer l is left out with probability dropout * (2 ** (l / (L - 1)) - 1) (Elhoushi et al. 2024, section 4.1), for
        all texts of a step alike, as stochastic depth was first done (Huang et al. 2016).
        """
        layers = self.config.num_hidden_layers
        rising = 2.0 ** (jnp.arange(layers) / max(1, layers - 1)) - 1.0
        kept = jax.random.bernoulli(key, 1.0 - self.dropout * rising)
        return jnp.broadcast_to(kept[:, None], (layers, 2)).astype(jnp.float32)


jax.tree_util.register_dataclass(EarlyExitObjective, data_fields=["whole"], meta_fields=["exits", "dropout", "loss"])
