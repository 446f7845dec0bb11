"""Where the tensors of a Hugging Face GPT-2 go in the parameter tree."""

from convert.layout import Layout, Part, whole
from specjax.models.gpt2_config import GPT2Config


def layout(config: GPT2Config) -> Layout:
    """The place of every tensor. Older files have no prefix, and keep the causal mask of each layer as a buffer."""
    return Layout(_table(config), "transformer.", (".attn.bias", ".attn.masked_bias"))


def _table(c: GPT2Config) -> dict[str, Part]:
    hidden, ffn, heads, dim = c.hidden_size, c.intermediate_size, c.num_attention_heads, c.head_dim
    parts = {
        "wte.weight": whole(("embed",), c.vocab_size, hidden),
        "wpe.weight": whole(("position_embed",), c.max_position_embeddings, hidden),
        **_both("ln_f", ("norm",), hidden),
    }
    for i in range(c.num_hidden_layers):
        name, path = f"h.{i}", ("layers", str(i))
        qkv = (*path, "attention", "qkv")
        parts |= {
            **_both(f"{name}.ln_1", (*path, "attention_norm"), hidden),
            **_both(f"{name}.ln_2", (*path, "mlp_norm"), hidden),
            f"{name}.attn.c_attn.weight": Part(  # [in, all queries, all keys, all values]
                (*qkv, "weight"), (hidden, 3 * hidden), (heads, 3, dim, hidden), axes=(3, 1, 0, 2)
            ),
            f"{name}.attn.c_attn.bias": Part((*qkv, "bias"), (3 * hidden,), (heads, 3, dim), axes=(1, 0, 2)),
            **_conv(f"{name}.attn.c_proj", (*path, "attention", "o"), hidden, hidden),
            **_conv(f"{name}.mlp.c_fc", (*path, "mlp", "up"), hidden, ffn),
            **_conv(f"{name}.mlp.c_proj", (*path, "mlp", "down"), ffn, hidden),
        }
    return parts


def _both(name: str, path: tuple[str, ...], size: int) -> dict[str, Part]:
    """The weight and the bias of a LayerNorm."""
    return {f"{name}.{kind}": whole((*path, kind), size) for kind in ("weight", "bias")}


def _conv(name: str, path: tuple[str, ...], inp: int, out: int) -> dict[str, Part]:
    """The weight [in, out] and the bias of a Conv1D."""
    weight = Part((*path, "weight"), (inp, out), (out, inp), axes=(1, 0))
    return {f"{name}.weight": weight, f"{name}.bias": whole((*path, "bias"), out)}
