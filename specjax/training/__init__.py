"""Training drafters on what the target itself says: text, losses, and one loop for all kinds."""
