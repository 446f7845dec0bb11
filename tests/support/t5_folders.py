"""Tiny random T5 checkpoints, made by transformers. One table of configurations."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

SHAPE = dict(
    vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=12, decoder_start_token_id=0, eos_token_id=1,
)  # fmt: skip
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# Name -> what differs from the shape above. A head that is not tied has weights of its own, as in published files.
CONFIGS = {
    "t5": {},
    "t5 1.1": V1_1,
    "t5 layers": {"num_layers": 1, "num_decoder_layers": 3},
    "t5 wide heads": {"d_kv": 12, "num_heads": 3, "relative_attention_num_buckets": 4},
    "t5 gated silu": {"feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-3},
    "t5 published distances": {**V1_1, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
}


@functools.cache
def folder(name: str) -> Path:
    """A Hugging Face folder of the configuration, as a published one is: without what transformers 5 adds."""
    path = Path(tempfile.mkdtemp()) / "model"
    model(name).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"tie_word_embeddings": CONFIGS[name].get("tie_word_embeddings", True)}
    del config["scale_decoder_outputs"]
    (path / "config.json").write_text(json.dumps(config))
    return path


@functools.cache
def model(name: str):
    """transformers' model. No norm is 1, so that a test sees if one is left out."""
    config = transformers.T5Config(**SHAPE | CONFIGS[name])
    torch.manual_seed(len(name))
    made = transformers.T5ForConditionalGeneration(config).float().eval()
    if CONFIGS[name].get("tie_word_embeddings") is False:
        made.lm_head.weight = torch.nn.Parameter(torch.empty_like(made.lm_head.weight))
    with torch.no_grad():
        for weight in made.parameters():
            spread = 0.3 if weight.ndim == 2 else 0.2
            weight.copy_(torch.randn(weight.shape) * spread + (1 if weight.ndim == 1 else 0))
    return made


def outputs(name: str, sources: list[list[int]], texts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """transformers' hidden states of each source, f32[S, H], and its logits of texts i[B, T], f32[B, T, V]."""
    longest = max(map(len, sources))
    ids = torch.tensor([source + [0] * (longest - len(source)) for source in sources])
    seen = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
    with torch.no_grad():
        out = model(name)(input_ids=ids, attention_mask=seen, decoder_input_ids=torch.tensor(texts).long(),
                          use_cache=False)  # fmt: skip
    states = zip(out.encoder_last_hidden_state, sources, strict=True)
    return [state[: len(source)].numpy() for state, source in states], out.logits.numpy()


def greedy(name: str, source: list[int], count: int, **options) -> list[int]:
    """The new tokens of transformers' greedy ``generate``."""
    out = model(name).generate(torch.tensor([source]), max_new_tokens=count, do_sample=False, use_cache=False,
                               eos_token_id=None, pad_token_id=0, **options)  # fmt: skip
    return out[0, 1:].tolist()
