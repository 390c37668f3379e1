"""Sources of batches: tokens on disk, or a user's function."""
