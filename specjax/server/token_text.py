"""The bytes and the name of single tokens, for log-probabilities."""

import functools

from tokenizers import pre_tokenizers

from specjax.text.tokenizer import Tokenizer


def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable ones are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    return table


class TokenText:
    """The tokens of one tokenizer as bytes and as strings."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        decoder = tokenizer.backend.decoder
        self._letters = _byte_of_letter() if decoder is not None and b"ByteLevel" in decoder.__getstate__() else None
        self.bytes_of = functools.lru_cache(maxsize=1 << 16)(self._bytes_of)
        self.name_of = functools.lru_cache(maxsize=1 << 16)(self._name_of)

    def _bytes_of(self, token: int) -> bytes:
        """The token's bytes in UTF-8. A special token's are those of its name."""
        name = self._tokenizer.token_str(token)
        byte = self._tokenizer.byte_of(token)
        if byte is not None:
            return bytes([byte])
        if self._letters is None:
            return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        if self._tokenizer.prints(token) and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        return name.encode()

    def _name_of(self, token: int) -> str:
        """The token's text; for a part of a character "bytes:" and the bytes, as OpenAI writes it."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
