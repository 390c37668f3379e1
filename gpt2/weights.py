"""A model from wherever its weights lie: a run of train.py, or a Hugging Face directory."""

from pathlib import Path

import jax

from gpt2 import hf
from gpt2.checkpoint import load_params
from gpt2.config import GPTConfig
from gpt2.data import tokenizer as tokenizers
from gpt2.errors import UserError
from gpt2.hf_tokenizer import load_tokenizer


def load_model(
    workdir: str | Path | None, hf_directory: str | Path | None, checkpoint: str | int = "best"
) -> tuple[GPTConfig, dict, tokenizers.Tokenizer]:
    """Loads configuration, parameters (on the default device) and tokenizer.

    Args:
        workdir: of a run, or None.
        hf_directory: of a Hugging Face model, or None; exactly one of the two is given.
        checkpoint: of the run: `best`, `latest` or a step.

    Raises:
        UserError: neither or both are given, or there is no such model.
    """
    if bool(workdir) == bool(hf_directory):
        raise UserError("one of --workdir and --hf is needed", "Say where the weights are")
    if workdir:
        config, params = load_params(workdir, checkpoint)
        return config.gpt(), params, tokenizers.load(Path(workdir) / "tokenizer.json")
    cfg, params = hf.load(hf_directory)
    tokenizer = load_tokenizer(Path(hf_directory), cfg)
    return cfg, jax.device_put(params), tokenizer
