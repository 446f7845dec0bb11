"""Loading models and trained drafters."""
