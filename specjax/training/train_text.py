"""Training a language model from scratch on text: the cross entropy of each token that follows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decode.arrays import span
from specjax.models import cache as kv
from specjax.models import families, modules
from specjax.models.gpt2_config import GPT2Config
from specjax.models.lm import LM
from specjax.models.t5_config import T5Config
from specjax.training.loop import Terms
from specjax.training.losses import mean


@dataclasses.dataclass(frozen=True)
class TextObjective:
    """The loss of a GPT-2 or a T5 on whole texts. The model drafts for no target.

    A row of a T5 is a source, the decoder's first token and a text (:func:`specjax.training.text_rows.reversal_rows`).
    Only tokens of the text have a weight.

    Args:
      config: the model's shape.
      dtype: the dtype in which the model computes. Weights and the optimizer's moments are float32.
    """

    config: Any
    dtype: str = "float32"

    def init(self, seed: int) -> dict:
        """The trainable weights before the first step, f32."""
        return first_params(self.config, seed)

    def lm(self, params: dict) -> LM:
        """The model with these weights, in the dtype in which it computes."""
        return LM(self.config, jax.tree.map(lambda x: x.astype(self.dtype), params))

    def __call__(
        self, params: dict, target: LM | None, tokens: jax.Array, weights: jax.Array, key: jax.Array | None
    ) -> Terms:
        """The weighted mean loss in nats on texts i32[B, T] with weights f32[B, T]; "loss", and "accuracy": how often
        the likeliest token is the one that follows."""
        del target, key
        logits, following, weights = _answers(self.lm(params), tokens, weights)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        taken = jnp.take_along_axis(log_p, following[..., None], axis=-1)[..., 0]
        right = jnp.argmax(logits, axis=-1) == following
        terms = {"loss": mean(-taken, weights), "accuracy": mean(right, weights)}
        return terms["loss"], terms


jax.tree_util.register_dataclass(TextObjective, data_fields=[], meta_fields=["config", "dtype"])


def _answers(lm: LM, tokens: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logits f32[B, N, V], the tokens i32[B, N] that follow, and their weights f32[B, N]."""
    rows, size = tokens.shape
    cache = lm.alloc_cache(rows, size)
    if not lm.has_encoder:
        return lm(tokens[:, :-1], cache).logits, tokens[:, 1:], weights[:, 1:]
    half = size // 2  # each of source and text fits into half of a row
    ends = jnp.argmax(weights > 0, axis=1).astype(jnp.int32) - 1  # the place of the decoder's first token
    cache = kv.with_lengths(lm.read(tokens[:, :half], cache, ends).cache, ends)
    places = ends[:, None] + span(half)
    text, weights = (jnp.take_along_axis(x, places, axis=1, mode="clip") for x in (tokens, weights))
    return lm(text[:, :-1], cache).logits, text[:, 1:], weights[:, 1:]


def first_params(config: Any, seed: int) -> dict:
    """Random float32 weights with which training begins.

    Matrices have the standard deviation ``in ** -0.5``. The layers' outputs, which are added up, are smaller by the
    root of their number (Radford et al. 2019, section 2.3).

    Raises:
      ValueError: the config is of another family than GPT-2 and T5.
    """
    if not isinstance(config, GPT2Config | T5Config):
        raise ValueError(f"training from scratch is for GPT-2 and T5, got a {config.model_type}")
    params = modules.init(families.MODULES[type(config)], config, seed)
    if isinstance(config, GPT2Config):  # an embedding of size 1 as the tied head would give logits of size 30
        params |= {name: params[name] * config.hidden_size**-0.5 for name in ("embed", "position_embed")}
    stacks = [params, params["encoder"]] if isinstance(config, T5Config) else [params]
    for layers in (stack["layers"] for stack in stacks):
        smaller = (2 * len(layers)) ** -0.5
        for layer in layers.values():
            layer["mlp"]["down"]["weight"] *= smaller
            layer["attention"]["o"]["weight"] *= smaller
            if isinstance(config, T5Config):  # T5's scores have no factor of their own (Raffel et al. 2020)
                _shrink_queries(layer, config.head_dim)
    return params


def _shrink_queries(layer: dict, dim: int) -> None:
    """Multiplies the queries' weights of a T5's layer by ``dim ** -0.5``."""
    qkv = layer["attention"]["qkv"]
    qkv["weight"] = qkv["weight"].at[:, :dim].multiply(dim**-0.5)
    if "cross" in layer:
        layer["cross"]["q"]["weight"] *= dim**-0.5
