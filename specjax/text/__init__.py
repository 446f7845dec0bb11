"""Text and token ids: tokenizers, chat templates, control strings, text as tokens arrive."""
