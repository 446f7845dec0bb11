"""Load on an engine or a server: how many requests and tokens a second, and how long each request waits.

All figures have the names and the definitions of ``vllm bench serve``.
"""
