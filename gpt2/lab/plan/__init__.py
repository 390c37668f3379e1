"""Plans: the memory, collectives and time of a training step, without training."""
