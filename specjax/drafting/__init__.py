"""Parts of drafters: base classes, chains, trees, searchable corpora, and the theory of speculative decoding."""
