"""Tiny random checkpoints of Llama's relatives and of GPT-2, made by transformers. One table of configurations.

Windows are 5 tokens, so that short texts reach past them.
"""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

SHAPE = dict(
    vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
NO_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
# Name -> (model_type, what differs from the shape above).
CONFIGS = {
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3 window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": TWO_KINDS}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "gemma2": ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma2 other scale": ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 20, "num_key_value_heads": 1}),
    "gemma2 tight caps": (
        "gemma2", {"sliding_window": 5, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}),
    "gemma2 no caps": (
        "gemma2", {"sliding_window": 5, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "layer_types": TWO_KINDS, "query_pre_attn_scalar": 8}),
    "gemma3 two bases": (
        "gemma3_text",
        {"sliding_window": 5, "layer_types": TWO_KINDS,
         "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ),
    "gemma3 pattern, cap": (
        "gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2, "final_logit_softcapping": 2.0}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3 listed, biases": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "smollm3 window": (
        "smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5,
                    "tie_word_embeddings": False}),
    "llama dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "qwen2 dynamic": ("qwen2", {"rope_parameters": DYNAMIC}),
    "gpt2": ("gpt2", {}),
    "gpt2 wide mlp": ("gpt2", {"n_inner": 56, "n_head": 2}),
    "gpt2 one head": ("gpt2", {"n_head": 1, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-3}),
}  # fmt: skip
# One of each family, for tests that are the same for every checkpoint.
ONE_OF_EACH = ["qwen2", "qwen3", "mistral", "gemma2", "gemma3 two bases", "smollm3", "gpt2"]


@functools.cache
def folder(name: str, **changes) -> Path:
    """A Hugging Face folder of the configuration with random weights, as transformers writes it."""
    path = Path(tempfile.mkdtemp()) / "model"
    model(name, **changes).save_pretrained(path)
    return path


@functools.cache
def model(name: str, **changes):
    """transformers' model. No bias is 0 and no norm is 1, so that a test sees if one is left out."""
    model_type, given = CONFIGS[name]
    shape = GPT2 if model_type == "gpt2" else NO_HEAD_DIM if model_type in ("qwen2", "smollm3") else SHAPE
    given = json.loads(json.dumps({**shape, **given, **changes}))  # transformers completes dicts in place
    config = transformers.AutoConfig.for_model(model_type, **given)
    torch.manual_seed(len(name))
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in made.parameters():
            spread = 0.3 if weight.ndim == 2 else 0.2
            weight.copy_(torch.randn(weight.shape) * spread + (weight if weight.ndim == 1 else 0))
    return made


def logits(name: str, tokens: np.ndarray) -> np.ndarray:
    """transformers' logits of tokens i[B, T], f32[B, T, V]."""
    with torch.no_grad():
        return model(name)(torch.tensor(tokens).long(), use_cache=False).logits.numpy()


def greedy(name: str, prompt: list[int], count: int) -> list[int]:
    """The new tokens of transformers' greedy ``generate``."""
    ids = torch.tensor([prompt])
    out = model(name).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                               eos_token_id=None, pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()
