"""Training a model for early exits, so that its first layers draft for all layers (LayerSkip, Elhoushi et al. 2024)."""

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
    """The loss of a model that exits after each of a few layers, and after the last layer, on whole texts.

    The target is the teacher and stays fixed. A copy of the target's layers and last norm is trained. The copy uses the
    target's embedding and head.

    Args:
      whole: the objective of a draft with all of the target's layers.
      exits: the exits, each as a number of layers, rising. The last exit is after all layers.
      dropout: the probability that a step leaves out the last layer. Earlier layers are left out less often, and the
        first one never.
      loss: a name in ``specjax.training.losses.LOSSES``.
    """

    whole: DraftObjective
    exits: tuple[int, ...]
    dropout: float = 0.1
    loss: str = "kl"

    @classmethod
    def of(
        cls, target: LM, exits: tuple[int, ...] = (), dropout: float = 0.1, loss: str = "kl"
    ) -> "EarlyExitObjective":
        """The objective of a model that begins as a copy of the target.

        Args:
          target: the target.
          exits: the exits, each as a number of layers. Empty: a fifth, a third and half of the layers.
          dropout: the probability that a step leaves out the last layer.
          loss: a name in ``specjax.training.losses.LOSSES``.

        Raises:
          ValueError: an exit is no number of layers of the target, ``dropout`` is no probability below 1, or the target
            is quantised.
        """
        layers = target.config.num_hidden_layers
        exits = exits or tuple(max(1, layers // part) for part in (5, 3, 2))
        if not all(1 <= after <= layers for after in exits):
            raise ValueError(f"exits must be after 1 to {layers} of the target's layers, got {exits}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        if kind := kind_of(target.params):
            raise ValueError(f"a model of {kind} weights can't be trained on; load the original weights")
        whole = DraftObjective.from_layers(target, tuple(range(layers)))
        return cls(whole, tuple(sorted({*exits, layers})), dropout, loss)

    @property
    def config(self) -> LlamaConfig:
        """The config of the model that is trained."""
        return self.whole.config

    def init(self, seed: int) -> dict:
        """Trainable weights, f32."""
        return self.whole.init(seed)

    def __call__(self, params: dict, target: LM, tokens: jax.Array, weights: jax.Array, key: jax.Array | None) -> Terms:
        """The weighted mean loss on texts i32[B, T] with weights f32[B, T], and the figures of each exit.

        Two figures are acceptances: "alpha" by the target, and "own" by the whole model in training. "alpha" of the
        last exit says how much the model in training still resembles the target.

        The weight of an exit in the loss is its number of layers. (The paper has a loss at every layer and weights that
        are quadratic in the number. With few exits, quadratic weights would leave the first exit almost no weight.)
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

        # Checkpointed, so that arrays as wide as the vocabulary are in memory for one exit at a time.
        @jax.checkpoint
        def terms_of(norm: dict, hidden: jax.Array, lesson: Lesson, whole: jax.Array) -> dict[str, jax.Array]:
            exit_log_q = log_q(norm, hidden)
            accepted = mean(jnp.sum(jnp.minimum(whole, jnp.exp(exit_log_q)), axis=-1), lesson.weights)
            return {**lesson.terms(self.loss, exit_log_q), "own": accepted}

        norm = model.params["norm"]
        whole = lax.stop_gradient(jnp.exp(log_q(norm, out.taps[self.exits[-1]])))  # [B, T, V] after all layers
        terms = [terms_of(norm, out.taps[after], lesson, whole) for after in self.exits]
        return combined(terms, jnp.array(self.exits, jnp.float32))

    def kept(self, key: jax.Array) -> jax.Array:
        """Which sublayers take part in a step: f32[layers, 2] of 1 (takes part) and 0 (left out).

        Layer l of L is left out with probability dropout * (2 ** (l / (L - 1)) - 1) (Elhoushi et al. 2024, section
        4.1). A layer is left out for all texts of a step, as in the first form of stochastic depth (Huang et al. 2016).
        """
        layers = self.config.num_hidden_layers
        rising = 2.0 ** (jnp.arange(layers) / max(1, layers - 1)) - 1.0
        kept = jax.random.bernoulli(key, 1.0 - self.dropout * rising)
        return jnp.broadcast_to(kept[:, None], (layers, 2)).astype(jnp.float32)


jax.tree_util.register_dataclass(EarlyExitObjective, data_fields=["whole"], meta_fields=["exits", "dropout", "loss"])
