"""Where the tensors of a Hugging Face T5 go in the parameter tree."""

from convert.layout import Layout, Part, whole
from specjax.models.t5_config import T5Config

Path = tuple[str, ...]
# Copies of shared.weight, and a table of older files that no layer reads.
_SKIPPED = ("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight")


def layout(config: T5Config) -> Layout:
    """The place of every tensor. No name has a prefix."""
    return Layout(_table(config), "", _SKIPPED)


def _table(c: T5Config) -> dict[str, Part]:
    hidden, buckets = c.hidden_size, (c.num_buckets, c.num_attention_heads)
    parts = {"shared.weight": whole(("embed",), c.vocab_size, hidden)}
    if not c.tie_word_embeddings:
        parts["lm_head.weight"] = whole(("lm_head",), c.vocab_size, hidden)
    for name, top in (("encoder", ("encoder",)), ("decoder", ())):
        bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        parts[bias] = whole((*top, "distance_bias"), *buckets)
        parts[f"{name}.final_layer_norm.weight"] = whole((*top, "norm", "weight"), hidden)
    for i in range(c.num_encoder_layers):
        name, path = f"encoder.block.{i}.layer", ("encoder", "layers", str(i))
        parts |= _self_attention(c, f"{name}.0", path) | _mlp(c, f"{name}.1", path)
    for i in range(c.num_hidden_layers):
        name, layer = f"decoder.block.{i}.layer", ("layers", str(i))
        parts |= _self_attention(c, f"{name}.0", layer) | _cross(c, f"{name}.1", layer) | _mlp(c, f"{name}.2", layer)
    return parts


def _self_attention(c: T5Config, name: str, layer: Path) -> dict[str, Part]:
    return {
        f"{name}.layer_norm.weight": whole((*layer, "attention_norm", "weight"), c.hidden_size),
        **_heads(c, f"{name}.SelfAttention", (*layer, "attention", "qkv", "weight"), "qkv"),
        **_out(c, f"{name}.SelfAttention", (*layer, "attention")),
    }


def _cross(c: T5Config, name: str, layer: Path) -> dict[str, Part]:
    return {
        f"{name}.layer_norm.weight": whole((*layer, "cross_norm", "weight"), c.hidden_size),
        **_heads(c, f"{name}.EncDecAttention", (*layer, "cross", "q", "weight"), "q"),
        **_heads(c, f"{name}.EncDecAttention", (*layer, "cross", "kv", "weight"), "kv"),
        **_out(c, f"{name}.EncDecAttention", (*layer, "cross")),
    }


def _heads(c: T5Config, name: str, path: Path, letters: str) -> dict[str, Part]:
    """The products [heads * D, H] that are fused by head into one leaf [heads, n * D, H]."""
    heads, dim, hidden = c.num_attention_heads, c.head_dim, c.hidden_size
    shape, view = (heads * dim, hidden), (heads, len(letters), dim, hidden)
    return {f"{name}.{letter}.weight": Part(path, shape, view, (slice(None), i)) for i, letter in enumerate(letters)}


def _out(c: T5Config, name: str, path: Path) -> dict[str, Part]:
    return {f"{name}.o.weight": whole((*path, "o", "weight"), c.hidden_size, c.num_attention_heads * c.head_dim)}


def _mlp(c: T5Config, name: str, layer: Path) -> dict[str, Part]:
    hidden, ffn, mlp = c.hidden_size, c.intermediate_size, (*layer, "mlp")
    dense = f"{name}.DenseReluDense"
    parts = {
        f"{name}.layer_norm.weight": whole((*layer, "mlp_norm", "weight"), hidden),
        f"{dense}.wo.weight": whole((*mlp, "down", "weight"), hidden, ffn),
    }
    if not c.gated:
        return {**parts, f"{dense}.wi.weight": whole((*mlp, "up", "weight"), ffn, hidden)}
    path, view = (*mlp, "gate_up", "weight"), (2, ffn, hidden)
    return {**parts, **{f"{dense}.wi_{i}.weight": Part(path, (ffn, hidden), view, (i,)) for i in range(2)}}
