"""The log-probabilities of prompts are those of transformers on the same weights."""

import asyncio

import numpy as np
import pytest
from hf_folders import TINY, write_hf
from served import client, engine, running
from small_tokenizers import byte_level

import specjax

CONFIG = {**TINY, "vocab_size": 259, "eos_token_id": 1, "max_position_embeddings": 512}
TEXTS = ["short", "a text of more than sixty-four letters is read in parts, and each part goes on where one ended"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_scored_text_has_the_log_probabilities_of_transformers(tmp_path, text):
    import torch
    from transformers import AutoModelForCausalLM

    write_hf(tmp_path / "model", CONFIG, byte_level(add_bos=False))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    lm = specjax.load(str(tmp_path / "model"))
    ids = lm.tokenizer.encode(text)
    with torch.no_grad():
        laws = torch.log_softmax(theirs(torch.tensor([ids])).logits[0], -1).numpy()
    expected = [laws[i, token] for i, token in enumerate(ids[1:])]

    async def whole():
        async with running(lambda: engine(lm)) as app, client(app) as one:
            body = dict(prompt=ids, max_tokens=1, echo=True, logprobs=1)  # as lm-evaluation-harness asks
            found = (await one.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
            np.testing.assert_allclose(found["token_logprobs"][1:-1], expected, rtol=1e-4, atol=1e-4)
            greedy = [max(top.values()) for top in found["top_logprobs"][1:-1]]
            np.testing.assert_allclose(greedy, laws[:-1].max(-1), rtol=1e-4, atol=1e-4)

    asyncio.run(whole())
