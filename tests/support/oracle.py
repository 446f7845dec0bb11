"""A Llama forward pass in float64 NumPy, straight from the model papers; imports nothing of specjax.

It takes what a checkpoint folder holds (the safetensors by name, ``config.json`` as a dict) and knows no cache,
batch or fused weight, so that it can't share a fault with the library it judges.
"""

import math

import numpy as np


def inverse_frequencies(config: dict) -> tuple[np.ndarray, float]:
    """f64[head_dim / 2] angle per position of each pair, and the factor on the rotated vectors."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    dim, theta = head_dim(config), rope["rope_theta"]
    plain = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    factor, trained = rope["factor"], rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":  # piecewise in the wavelength, as released
        low, high, out = rope["low_freq_factor"], rope["high_freq_factor"], []
        for f in plain:
            wavelength = 2 * math.pi / f
            smooth = (trained / wavelength - low) / (high - low)
            inside = (1 - smooth) * f / factor + smooth * f
            out.append(f if wavelength < trained / high else f / factor if wavelength > trained / low else inside)
        return np.array(out), 1.0
    assert kind == "yarn", kind
    edges = [dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
             for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))]
    if rope.get("truncate", True):
        edges = [math.floor(edges[0]), math.ceil(edges[1])]
    first, last = max(edges[0], 0), min(edges[1], dim - 1)
    last += 0.001 * (first == last)
    stretched = np.clip([(i - first) / (last - first) for i in range(dim // 2)], 0, 1)

    def temperature(weight):
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    both = rope.get("mscale") and rope.get("mscale_all_dim")
    derived = temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"]) if both else temperature(1)
    return plain * (1 - stretched) + plain / factor * stretched, rope.get("attention_factor") or derived


def head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def forward(tensors: dict[str, np.ndarray], config: dict, tokens, positions=None) -> np.ndarray:
    """Logits f64[T, V] of one sequence of T token ids; each sees those up to itself, at positions 0..T-1 by default."""
    w = {name: np.asarray(t).astype(np.float64) for name, t in tensors.items()}
    heads, dim = config["num_attention_heads"], head_dim(config)
    kv_heads = config.get("num_key_value_heads") or heads
    inv_freq, rope_factor = inverse_frequencies(config)
    positions = np.arange(len(tokens)) if positions is None else positions
    turn = np.exp(1j * np.outer(positions, inv_freq)) * rope_factor  # [T, D/2]
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def rotated(x):  # one head [T, D]; its halves are the real and imaginary parts
        z = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = w["model.embed_tokens.weight"][np.asarray(tokens)]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h, out = norm(x, f"{at}.input_layernorm"), []
        q, k, v = (linear(h, f"{at}.self_attn.{n}_proj") for n in "qkv")
        for head in range(heads):
            own, shared = slice(head * dim, (head + 1) * dim), head // (heads // kv_heads) * dim
            group = slice(shared, shared + dim)
            scores = rotated(q[:, own]) @ rotated(k[:, group]).T / math.sqrt(dim) + future
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
        x = x + linear(np.concatenate(out, -1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    tied = config.get("tie_word_embeddings", False)
    return norm(x, "model.norm") @ w["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def random_tensors(config: dict, seed: int = 0, std: float = 0.3) -> dict[str, np.ndarray]:
    """A float32 checkpoint by Hugging Face names. ``std`` is large enough for a swapped row or head to show."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config.get(n) or config["num_attention_heads"] for n in ("num_attention_heads", "num_key_value_heads"))
    q, kv = q * head_dim(config), kv * head_dim(config)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    linears = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
               "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
               "mlp.down_proj": (hidden, inner)}
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (hidden,)
        for name, shape in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if config.get("attention_bias" if "attn" in name else "mlp_bias"):
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    centre = {True: 1.0, False: 0.0}
    return {n: (centre["norm" in n] + std * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}
