"""Training: the program of a run, its state, its steps, its checkpoints and its files."""
