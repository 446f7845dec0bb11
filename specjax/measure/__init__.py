"""Measuring: what decoding costs, how often drafts are right, and benchmarks of both."""
