"""Results of PyTorch and of this project for models whose weights are drawn with numpy.

    python tests/peer.py

This command writes PyTorch's results to tests/golden/, for tests on machines without PyTorch. It
needs torch and transformers (the extra `peers`).
"""

import importlib.util
import json
import tempfile
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
from gpt2.model import GPT
from gpt2.model.sampling import Sampling, generate


def needs_peers(test):
    """Mark a test that needs PyTorch and transformers, which a machine may lack."""
    missing = not all(map(importlib.util.find_spec, ("torch", "transformers")))
    reason = "needs PyTorch and transformers: pip install -e '.[peers]'"
    skipped = pytest.mark.skipif(missing, reason=reason)(test)
    return pytest.mark.peers(skipped)


GOLDEN = Path(__file__).parent / "golden"
NUM_NEW = 64

# GPT-2 in four shapes: OpenAI's options; an untied head with another MLP; another epsilon and an
# MLP whose width is not a multiple of the model's width; and the real 124M. The other families have
# options of rope as transformers 4 and 5 write them, several bases and two epsilons.
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
# keys have a mean square near the norms' epsilon, so that another epsilon would change the answers.
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
    """Write a Hugging Face directory with seeded weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "gpt2", "bos_token_id": None, "eos_token_id": None}
    config |= CONFIGS[name]
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    stds = _STDS.get(name, {"": 0.05})

    cfg = read_config(directory)
    drawn = {}
    for tensor in family_for(cfg).tensors(cfg):
        mean = 1.0 if tensor.path.endswith("scale") else 0.0
        std = [value for end, value in stds.items() if tensor.path.endswith(end)][-1]
        values = mean + std * rng.standard_normal(tensor.shape)
        drawn[tensor.name] = values.astype(np.float32)
    save_file(drawn, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def rewrite(directory: Path, change: Callable[[dict], dict], shards: int = 1) -> None:
    """Change a model's tensors, and write them to one file or to shards."""
    whole = directory / "model.safetensors"
    arrays = change(load_file(whole))
    if shards == 1:
        save_file(arrays, whole)
        return
    whole.unlink()
    names = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        part = {name: arrays[name] for name in list(arrays)[shard::shards]}
        save_file(part, directory / file)
        names |= dict.fromkeys(part, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))


def rewrite_config(directory: Path, **changes: object) -> None:
    """Change options of a config.json, and remove options whose new value is "absent"."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    remaining = {name: value for name, value in config.items() if value != "absent"}
    path.write_text(json.dumps(remaining))


def characters(count: int, first: int = 100) -> CharTokenizer:
    """Return a character tokenizer with `count` tokens."""
    text = "".join(map(chr, range(first, first + count)))
    return CharTokenizer(text, has_eot=False)


def tokens(name: str) -> np.ndarray:
    """Return random tokens, `[2, 48]` int64."""
    rng = np.random.default_rng(1)
    return rng.integers(0, CONFIGS[name]["vocab_size"], (2, 48))


def probe(array: np.ndarray) -> list[float]:
    """Return two numbers that change if any value of an array changes."""
    flat = np.asarray(array, np.float64).ravel()
    weighted = flat @ np.cos(np.arange(flat.size))
    return [float(np.linalg.norm(flat)), float(weighted)]


def torch_answers(directory: Path, name: str) -> dict:
    """Return PyTorch's mean loss, its gradients, logits `[2, T, V]`, and greedily chosen tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    family = family_for(read_config(directory))
    ids = torch.tensor(tokens(name))
    output = model(ids, labels=ids)
    output.loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[family.full_name(name)] = parameter.grad.numpy()
    prompt = ids[:1, :8]
    mask = torch.ones_like(prompt)
    greedy = dict(max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
    generated = model.generate(prompt, attention_mask=mask, **greedy)
    return {
        "loss": output.loss.item(),
        "logits": output.logits.detach().numpy(),
        "gradients": gradients,
        "generated": generated[0, 8:].tolist(),
    }


def our_answers(directory: Path, name: str) -> dict:
    """Return what `torch_answers` returns, computed by this project."""
    cfg, params = hf.load(directory)
    model = GPT(cfg)
    ids = tokens(name)

    def mean_loss(params):
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        total, _ = model.apply({"params": params}, batch, method="loss")
        return total / batch["targets"].size

    loss, by_path = jax.jit(jax.value_and_grad(mean_loss))(params)
    leaves = flatten_dict(by_path, sep="/")
    gradients = {}
    for tensor in family_for(cfg).tensors(cfg):
        gradients[tensor.name] = tensor.to_stored(leaves[tensor.path])
    logits = jax.jit(model.apply)({"params": params}, ids)
    prompt = ids[:1, :8].tolist()
    greedy = Sampling(0.0)
    (generated,) = generate(
        model, params, prompt, max_new_tokens=NUM_NEW, sampling=greedy
    )
    return {
        "loss": float(loss),
        "logits": np.asarray(logits),
        "gradients": gradients,
        "generated": generated,
    }


def write_golden() -> None:
    """Write PyTorch's answers for the small models to tests/golden/."""
    for name in SMALL:
        with tempfile.TemporaryDirectory() as scratch:
            answers = torch_answers(write_model(Path(scratch), name), name)
        answers["logits"] = np.round(answers["logits"][0, ::12], 6).tolist()
        gradients = answers["gradients"]
        answers["gradients"] = {key: probe(gradients[key]) for key in gradients}
        (GOLDEN / f"{name}.json").write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    write_golden()
