"""Names for the tokens of planted models, which have no tokenizer. A server needs one."""

import dataclasses

import tokenizers
from tokenizers import decoders, models

from specjax.models.lm import LM
from specjax.text.tokenizer import Tokenizer


def with_names(lm: LM) -> LM:
    """The model with a tokenizer in which token i reads " i". It decodes as those of Llama 3 do, byte by byte."""
    space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # the letter of a byte-level vocabulary for a space
    backend = tokenizers.Tokenizer(models.BPE({f"{space}{i}": i for i in range(lm.vocab_size)}, []))
    backend.decoder = decoders.ByteLevel()
    return dataclasses.replace(lm, tokenizer=Tokenizer(backend, add_bos=False))
