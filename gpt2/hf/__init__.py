"""Reads and writes weights in Hugging Face's format: docs/weights.md."""
