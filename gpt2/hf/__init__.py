"""Read and write weights in Hugging Face's format; see docs/weights.md."""

from gpt2.hf.directory import load, save

__all__ = ["load", "save"]
