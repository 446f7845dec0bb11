"""Tokenizers of few tokens, and their folders as fine-tunes leave them."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from specjax.text.tokenizer import Tokenizer

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}[a]{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(extra=(), bos="<s>", add_bos=True, template=TEMPLATE, order=None):
    """A byte-level BPE over single bytes, specials first."""
    letters = order or sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<t>", *letters, *extra]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<t>"])
    return Tokenizer(backend, backend.token_to_id(bos), backend.token_to_id("</s>"), add_bos, template)


def sentencepiece_like():
    """As Llama 2's: a space before the text, spaces as U+2581, bytes as <0xNN>, BOS by the post-processor."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, 1, 2)


def unigram():
    """As T5's: SentencePiece's unigrams, spaces as U+2581, no BOS, and EOS by the post-processor."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), ("a", -3.0), ("b", -3.0), ("▁ab", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return Tokenizer(backend, None, 1)


def write(folder, name, data):
    (folder / name).write_text(json.dumps(data), "utf-8")


def saved(folder, tokenizer=None, **config):
    """A folder with tokenizer.json and a tokenizer_config.json of these keys alone."""
    (tokenizer or byte_level()).save(folder)
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    return folder


def added(content, special=True, **flags):
    off = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": special, **off, **flags}


def chatml(folder, kind=byte_level, template=CHATML, **config):
    size = len(kind())
    names = ("<|im_start|>", "<|im_end|>", "<pad>", "<tool>")
    tokens = {str(size + i): added(name, special=name != "<tool>") for i, name in enumerate(names)}
    saved(folder, kind(), added_tokens_decoder=tokens, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>",
          chat_template=template, **config)  # fmt: skip
    return Tokenizer.load(folder)
