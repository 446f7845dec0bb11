"""The model, the drafters and the requests of the tests with several processes."""

from specjax import drafters, testing

LM = testing.tiny_lm(0, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1, vocab_size=48)
DRAFTERS = {
    "plain": None,
    "ngram": drafters.PromptLookup(prompt_lookup_min=1),
    "model": drafters.DraftModel(testing.noisy_twin(LM, 0.05)),
}
PROMPTS = [[3, 9, 3, 9, 3], [4, 8, 1, 4, 8]]
OPTIONS = dict(num_speculative_tokens=3, max_new_tokens=20, temperature=0.9, seed=2)
ENGINE = dict(num_speculative_tokens=3, slots=2, capacity=192)
ROWS = [
    dict(prompt=[3, 9, 3, 9, 3], seed=4, temperature=1.0, max_new_tokens=20),
    dict(prompt=[*range(40)] * 3, seed=5, max_new_tokens=12, top_p=0.8, temperature=0.7, logprobs=2),
    dict(prompt=[7], max_new_tokens=9),
]
SAMPLED = dict(prompt=[5, 6, 7] * 30, seed=6, temperature=1.0, max_new_tokens=10)  # two samples of it are asked for
