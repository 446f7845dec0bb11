"""From a user's request to results: options, checks, jobs, streams, metrics."""
