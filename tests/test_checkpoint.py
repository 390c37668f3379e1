"""What a checkpoint gives to those who come later."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import optax

from configs import quickstart
from gpt2.checkpoint import Checkpointer, load_params
from gpt2.config import Config, MemoryConfig, ModelConfig, ParallelConfig
from gpt2.model import GPT
from gpt2.state import TrainState


def test_weights_trained_with_another_devices_attention_and_mesh_load_anywhere(tmp_path):
    model = ModelConfig(vocab_size=50, context_length=128, num_layers=1, num_heads=2, embed_dim=16)
    config = dataclasses.replace(
        Config.from_dict(quickstart.get_config()),
        model=dataclasses.replace(model, attention="splash"),
        parallel=ParallelConfig(data=16, fsdp=4),
        memory=MemoryConfig(remat="full", scan_layers=True),
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    init = jax.jit(GPT(config.gpt()).init)
    params = init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(TrainState.create(params, optax.sgd(1.0), "float32"), step=1)

    loaded, loaded_params = load_params(tmp_path)
    chex.assert_trees_all_equal(loaded_params, params)
    assert loaded.model == model
    assert loaded.parallel == ParallelConfig()
    assert loaded.memory == MemoryConfig(scan_layers=True)
    apply, tokens = jax.jit(GPT(loaded.gpt()).apply), jnp.zeros((1, 8), jnp.int32)
    chex.assert_tree_all_finite(apply({"params": loaded_params}, tokens))
