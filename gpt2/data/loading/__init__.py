"""Tokens on disk, or batches of a user's function -> batch(seed, step)."""
