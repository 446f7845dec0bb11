"""gpt-fast (github.com/meta-pytorch/gpt-fast), run from the user's own checkout.

gpt-fast's speculative path works at commit 091515a. Its model differs from the published Llama 3 in two ways: it pairs
rotary dimensions differently, and it has no rope scaling. Neither changes the output of planted weights. The bytes, the
shapes and the text are the same.
"""

import importlib
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.peers import Decoded, weights
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM

_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


class GptFast:
    """gpt-fast as a peer.

    On a GPU the model is compiled with CUDA graphs, as by gpt-fast's own command line. On a CPU it is not compiled.
    """

    def __init__(self, folder: str | None):
        if folder is None:
            raise ValueError("--peers gpt-fast needs --gpt-fast FOLDER, a checkout of gpt-fast")
        missing = [name for name in ("model.py", "generate.py") if not (Path(folder) / name).is_file()]
        if missing:
            raise ValueError(
                f"--gpt-fast {folder} holds no {' and no '.join(missing)}, so it is no checkout of gpt-fast"
            )
        self.torch = weights.imported("torch")
        self.code, self.shapes = _import(folder)
        self.name = f"gpt-fast, torch {self.torch.__version__.split('+')[0]}"
        self.target: Any = None
        self.draft: Any = None
        self.prefilled = 0.0
        self._time_prefill()

    def load(self, case: Case) -> None:
        room = case.prompt_length + case.max_new_tokens + case.num_speculative_tokens + 1
        self.target, self.draft = self._model(case.target, room), self._model(case.draft, room)
        if self.target.output.weight.is_cuda:
            for name in ("decode_one_token", "model_forward"):
                compiled = self.torch.compile(getattr(self.code, name), mode="reduce-overhead", fullgraph=True)
                setattr(self.code, name, self._cloned(compiled))

    def _model(self, lm: LM, room: int) -> Any:
        c = lm.config
        if c.head_dim * c.num_attention_heads != c.hidden_size or c.attention_bias or c.mlp_bias:
            raise ValueError(
                "gpt-fast runs only models without biases whose heads add up to the hidden size; got "
                f"{c.num_attention_heads} heads of size {c.head_dim}, hidden size {c.hidden_size}, attention_bias "
                f"{c.attention_bias}, mlp_bias {c.mlp_bias}"
            )
        state = {_renamed(name): tensor for name, tensor in weights.tensors(lm).items()}
        with self.torch.device("meta"):
            model = self.code.Transformer(_arguments(self.shapes, c, room))
        model.load_state_dict(state, assign=True)
        with self.torch.device(model.output.weight.device):
            model.setup_caches(max_batch_size=1, max_seq_length=room)  # as large as any run needs
        return model.eval().requires_grad_(False)

    def decode(self, prompt: list[int], count: int, size: int) -> Decoded:
        device = self.target.output.weight.device
        ids = self.torch.tensor(prompt, dtype=self.torch.int, device=device)
        out, stats = self.code.generate(
            self.target,
            ids,
            count,
            interactive=False,
            draft_model=self.draft if size else None,
            speculate_k=size,
            temperature=0.0,
        )
        tokens = out[len(prompt) :].tolist()  # this waits for the device
        seconds = time.perf_counter() - self.prefilled
        steps = sum(stats["accept_counts"]) if size else count - 1
        return Decoded(tokens, count - 1, seconds, steps)  # the first token comes from prefill and is not timed

    def free(self) -> None:
        self.target = self.draft = None
        self.torch.compiler.reset()
        weights.free()

    def _time_prefill(self) -> None:
        """From now on, ``self.prefilled`` is the time at which the last prefill ended. The draft's comes last."""
        prefill = self.code.prefill

        def timed(*args, **kwargs):
            out = prefill(*args, **kwargs)
            if self.torch.cuda.is_available():
                self.torch.cuda.synchronize()
            self.prefilled = time.perf_counter()
            return out

        self.code.prefill = timed

    def _cloned(self, function: Callable) -> Callable:
        """``function`` with copied outputs.

        The next run of a CUDA graph overwrites the outputs of the last run, and gpt-fast keeps some of them longer.
        """

        def call(*args, **kwargs):
            return self.torch.utils._pytree.tree_map(lambda x: x.clone(), function(*args, **kwargs))

        return call


def _renamed(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, layers, index, rest = name.split(".", 3)
    return f"{layers}.{index}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _arguments(shapes: Any, c: LlamaConfig, room: int) -> Any:
    return shapes.ModelArgs(
        block_size=-(-room // 8) * 8,
        vocab_size=c.vocab_size,
        n_layer=c.num_hidden_layers,
        n_head=c.num_attention_heads,
        n_local_heads=c.num_key_value_heads,
        dim=c.hidden_size,
        intermediate_size=c.intermediate_size,
        rope_base=c.rope_theta,
        norm_eps=c.rms_norm_eps,
    )


def _import(folder: str) -> tuple[Any, Any]:
    """gpt-fast's modules ``generate`` and ``model``.

    They stay in ``sys.modules`` under these common names, because torch.compile looks for them there.
    """
    path, before = list(sys.path), sys.modules.get("tokenizer")
    # The real module ``tokenizer`` needs packages for text. Only token ids go in and out, so an empty module will do.
    tokenizer = types.ModuleType("tokenizer")
    tokenizer.get_tokenizer = None  # type: ignore[attr-defined]
    sys.modules["tokenizer"] = tokenizer
    sys.path.insert(0, str(Path(folder).resolve()))
    try:
        return importlib.import_module("generate"), importlib.import_module("model")
    except ImportError as problem:
        raise ValueError(f"gpt-fast can't be imported from {folder}: {problem}") from problem
    finally:
        sys.path[:] = path
        del sys.modules["tokenizer"]
        if before is not None:
            sys.modules["tokenizer"] = before
