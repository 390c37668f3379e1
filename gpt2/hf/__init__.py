"""Reads and writes weights in Hugging Face's format: docs/weights.md."""

from gpt2.hf.directory import load, save

__all__ = ["load", "save"]
