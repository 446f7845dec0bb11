"""Measures the cost of decoding and how often drafts are right, and benchmarks both."""
