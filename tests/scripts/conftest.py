"""A tiny checkpoint that the tests of a file share."""

import pytest
from hf_folders import HF, write_hf
from small_tokenizers import byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_hf(path, {**HF, "vocab_size": 300, "eos_token_id": None}, tokenizer=byte_level())
    return str(path)
