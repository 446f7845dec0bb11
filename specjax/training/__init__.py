"""Training drafters on the target's own answers: texts, losses, objectives, and one loop for all objectives."""
