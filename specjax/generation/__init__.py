"""Turns a user's request into results: options, checks, jobs, streams and metrics."""
