"""Plans: what a training step takes, from its compiled text, without training."""
