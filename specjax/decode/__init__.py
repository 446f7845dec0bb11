"""Decoding on the device: the round of speculative decoding, the state that rounds carry, and what both are made of."""
