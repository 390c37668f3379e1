"""PyTorch's answers for GPT-2s whose weights are drawn by numpy.

    python tests/peer.py

writes them to tests/golden/, with torch and transformers installed (the extra `peers`), so that
the tests know them on machines without.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from gpt2.data.tokenizer import CharTokenizer
from gpt2.hf.names import hf_shape, read_config, tensors
from gpt2.hf.tensor_files import write_safetensors

needs_peers = pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="needs PyTorch and transformers: pip install -e '.[peers]'",
)

GOLDEN = Path(__file__).parent / "golden"
NUM_NEW = 64

# Three shapes: OpenAI's options; a head of its own with another MLP; and the real 124M.
CONFIGS = {
    "tied": dict(n_layer=2, n_head=4, n_embd=32, n_positions=96, vocab_size=131),
    "untied": dict(
        n_layer=3,
        n_head=2,
        n_embd=24,
        n_positions=80,
        vocab_size=67,
        n_inner=48,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    "124m": dict(n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50257),
}


def write_model(directory: Path, name: str) -> Path:
    """Writes a Hugging Face directory with the weights that a seed gives."""
    directory.mkdir(parents=True, exist_ok=True)
    config = dict(model_type="gpt2", bos_token_id=None, eos_token_id=None, **CONFIGS[name])
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {
        tensor if tensor.startswith("lm_head") else f"transformer.{tensor}": hf_shape(tensor, shape)
        for tensor, _, shape in tensors(read_config(directory))
    }
    rng = np.random.default_rng(0)

    def draw(tensor: str) -> np.ndarray:
        mean = 1.0 if ".ln_" in tensor and tensor.endswith("weight") else 0.0
        return (mean + 0.05 * rng.standard_normal(shapes[tensor])).astype(np.float32)

    write_safetensors(directory / "model.safetensors", shapes, draw)
    return directory


def characters(count: int) -> CharTokenizer:
    """Returns a tokenizer of so many tokens."""
    return CharTokenizer("".join(map(chr, range(100, 100 + count))), has_eot=False)


def tokens(name: str, length: int = 48) -> np.ndarray:
    """Returns what the model reads, [2, length] int64."""
    return np.random.default_rng(1).integers(0, CONFIGS[name]["vocab_size"], (2, length))


def probe(array: np.ndarray) -> list[float]:
    """Returns two numbers that a change anywhere in an array changes."""
    flat = np.asarray(array, np.float64).ravel()
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size)))]


def torch_answers(directory: Path, name: str) -> dict:
    """Returns PyTorch's logits [2, T, V], gradients of the mean loss, and greedy tokens."""
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(directory).eval()
    ids = torch.tensor(tokens(name))
    output = model(ids, labels=ids)
    output.loss.backward()
    prompt = ids[:1, :8]
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
    )
    return {
        "loss": output.loss.item(),
        "logits": output.logits.detach().numpy(),
        "gradients": {k: v.grad.numpy() for k, v in model.named_parameters()},
        "generated": generated[0, 8:].tolist(),
    }


def write_golden() -> None:
    """Writes the answers for the small shapes, and a state dict in PyTorch's two file formats."""
    import tempfile

    import torch

    for name in ("tied", "untied"):
        with tempfile.TemporaryDirectory() as scratch:
            answers = torch_answers(write_model(Path(scratch), name), name)
        answers["logits"] = [np.round(row, 6).tolist() for row in answers["logits"][0, ::12]]
        answers["gradients"] = {k: probe(v) for k, v in answers["gradients"].items()}
        (GOLDEN / f"{name}.json").write_text(json.dumps(answers) + "\n")
    state = {
        "plain": torch.arange(6.0).reshape(2, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "narrow": torch.arange(10.0)[4:8],
        "bfloat16": torch.tensor([1.5, -2.0]).bfloat16(),
        "mask": torch.tensor([True, False]),
    }
    torch.save(state, GOLDEN / "zip.bin")
    torch.save(state, GOLDEN / "stream.bin", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    write_golden()
