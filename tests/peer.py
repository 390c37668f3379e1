"""PyTorch's answers for models whose weights are drawn by numpy, and this project's.

    python tests/peer.py

writes them to tests/golden/, with torch and transformers installed (the extra `peers`), so that
the tests know them on machines without.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from gpt2 import hf
from gpt2.data.tokenizer import CharTokenizer
from gpt2.hf.config import read_config
from gpt2.hf.families import family_for
from gpt2.hf.family import Tensor
from gpt2.model import GPT
from gpt2.model.sampling import Sampling, generate


def needs_peers(test):
    """Marks a test that needs PyTorch and transformers, which a machine may lack."""
    missing = not all(map(importlib.util.find_spec, ("torch", "transformers")))
    reason = "needs PyTorch and transformers: pip install -e '.[peers]'"
    return pytest.mark.peers(pytest.mark.skipif(missing, reason=reason)(test))


GOLDEN = Path(__file__).parent / "golden"
NUM_NEW = 64

# GPT-2 in four shapes: OpenAI's options; a head of its own with another MLP; another epsilon and a
# width that is no multiple; and the real 124M. The other families: options of rope as transformers
# 4 and 5 write them, several bases, two epsilons.
_GPT2 = dict(n_layer=2, n_head=2, n_embd=24, n_positions=80, vocab_size=67)
_LINEAR = dict(num_hidden_layers=2, max_position_embeddings=96, vocab_size=131)
LLAMA3 = dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=80)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
YARN |= dict(beta_slow=1.0, beta_fast=32.0, truncate=True)
CONFIGS = {
    "tied": dict(n_layer=2, n_head=4, n_embd=32, n_positions=96, vocab_size=131),
    "untied": _GPT2
    | dict(
        n_layer=3, n_inner=48, activation_function="gelu", tie_word_embeddings=False
    ),
    "epsilon": _GPT2
    | dict(n_inner=50, layer_norm_epsilon=1e-3, activation_function="relu"),
    "124m": dict(n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50257),
    "llama": _LINEAR
    | dict(
        model_type="llama",
        hidden_size=32,
        intermediate_size=88,
        tie_word_embeddings=False,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=LLAMA3,
        head_dim=16,
    ),
    "llama_multi_head": _LINEAR
    | dict(
        model_type="llama",
        hidden_size=24,
        intermediate_size=48,
        tie_word_embeddings=True,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=80,
        vocab_size=67,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
    ),
    "qwen3": _LINEAR
    | dict(
        model_type="qwen3",
        hidden_size=48,
        intermediate_size=80,
        tie_word_embeddings=True,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_parameters=YARN | dict(rope_theta=1000000.0),
    ),
    "gpt_neox": _LINEAR
    | dict(
        model_type="gpt_neox",
        hidden_size=32,
        intermediate_size=128,
        tie_word_embeddings=False,
        num_attention_heads=4,
        layer_norm_eps=1e-5,
        hidden_act="gelu",
        rotary_pct=0.5,
        rotary_emb_base=25000,
    ),
}
FAMILIES = ("llama", "llama_multi_head", "qwen3", "gpt_neox")
SMALL = ("tied", "untied", "epsilon", *FAMILIES)

# Standard deviations of weights, by the end of the parameter's path. Small embeddings, queries and
# keys have a mean square near the norms' epsilon, so that another epsilon gives other answers.
_STDS = {
    "llama": {"": 0.2, "wte/embedding": 0.003},
    "llama_multi_head": {"": 0.2, "wte/embedding": 0.02},
    "qwen3": {
        "": 0.2,
        "wte/embedding": 0.02,
        "c_q/kernel": 0.0005,
        "c_kv/kernel": 0.0005,
    },
    "gpt_neox": {"": 0.2, "wte/embedding": 0.003},
}


def write_model(directory: Path, name: str) -> Path:
    """Writes a Hugging Face directory with the weights that a seed gives."""
    directory.mkdir(parents=True, exist_ok=True)
    config = (
        dict(model_type="gpt2", bos_token_id=None, eos_token_id=None) | CONFIGS[name]
    )
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    stds = _STDS.get(name, {"": 0.05})

    def draw(tensor: Tensor) -> np.ndarray:
        path = tensor.path
        mean = 1.0 if path.endswith("scale") else 0.0
        std = [value for end, value in stds.items() if path.endswith(end)][-1]
        return (mean + std * rng.standard_normal(tensor.shape)).astype(np.float32)

    cfg = read_config(directory)
    drawn = {tensor.name: draw(tensor) for tensor in family_for(cfg).tensors(cfg)}
    save_file(drawn, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def rewrite(directory: Path, change: Callable[[dict], dict], shards: int = 1) -> None:
    """Writes a model's tensors anew, changed, in one file or in shards."""
    arrays = change(load_file(directory / "model.safetensors"))
    if shards == 1:
        return save_file(arrays, directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names: dict = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        part = {name: arrays[name] for name in list(arrays)[shard::shards]}
        save_file(part, directory / file)
        names |= dict.fromkeys(part, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))


def rewrite_config(directory: Path, **changes: object) -> None:
    """Changes options of a config.json, and removes those that are "absent"."""
    config = json.loads((directory / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(kept))


def characters(count: int, first: int = 100) -> CharTokenizer:
    """Returns a tokenizer of so many tokens."""
    return CharTokenizer("".join(map(chr, range(first, first + count))), has_eot=False)


def tokens(name: str, length: int = 48) -> np.ndarray:
    """Returns what the model reads, [2, length] int64."""
    return np.random.default_rng(1).integers(
        0, CONFIGS[name]["vocab_size"], (2, length)
    )


def probe(array: np.ndarray) -> list[float]:
    """Returns two numbers that a change anywhere in an array changes."""
    flat = np.asarray(array, np.float64).ravel()
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size)))]


def torch_answers(directory: Path, name: str) -> dict:
    """Returns PyTorch's logits [2, T, V], gradients of the mean loss, and greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    family = family_for(read_config(directory))
    ids = torch.tensor(tokens(name))
    output = model(ids, labels=ids)
    output.loss.backward()
    prompt = ids[:1, :8]
    greedy = dict(max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)
    return {
        "loss": output.loss.item(),
        "logits": output.logits.detach().numpy(),
        "gradients": {
            family.full_name(name): parameter.grad.numpy()
            for name, parameter in model.named_parameters()
        },
        "generated": generated[0, 8:].tolist(),
    }


def our_answers(directory: Path, name: str) -> dict:
    """Returns what `torch_answers` gives, by this project."""
    cfg, params = hf.load(directory)
    ids = tokens(name)

    def loss(params):
        rows = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        lost, _ = GPT(cfg).apply({"params": params}, rows, method="loss")
        return lost / ids[:, 1:].size

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    leaves = flatten_dict(gradients, sep="/")
    (generated,) = generate(
        GPT(cfg),
        params,
        ids[:1, :8].tolist(),
        max_new_tokens=NUM_NEW,
        sampling=Sampling(0.0),
    )
    return {
        "loss": float(value),
        "logits": np.asarray(jax.jit(GPT(cfg).apply)({"params": params}, ids)),
        "gradients": {
            tensor.name: tensor.to_stored(leaves[tensor.path])
            for tensor in family_for(cfg).tensors(cfg)
        },
        "generated": generated,
    }


def write_golden() -> None:
    """Writes the answers for the small models."""
    import tempfile

    for name in SMALL:
        with tempfile.TemporaryDirectory() as scratch:
            answers = torch_answers(write_model(Path(scratch), name), name)
        answers["logits"] = [
            np.round(row, 6).tolist() for row in answers["logits"][0, ::12]
        ]
        answers["gradients"] = {k: probe(v) for k, v in answers["gradients"].items()}
        (GOLDEN / f"{name}.json").write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    write_golden()
