"""Tiny programs, and batches that break a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.training.losses import next_token_loss
from gpt2.training.program import Program
from tests.helpers import batch_of, configured

T = 8
ROWS = 32
MICRO_BATCHES = 4
POISON = 50
# A schedule that shows how many updates there were.
SMALL = f"""
    model.vocab_size=160 model.context_length={T} model.num_layers=2 model.num_heads=2
    model.embed_dim=16 model.tie_embeddings=False data.batch_size={ROWS}
    train.num_steps=10 train.accumulate_steps={MICRO_BATCHES} logging.watch_every=1
    optim.warmup_steps=2 optim.learning_rate=1e-2"""
LAYOUTS = {
    "one device": "",
    "pmap": "parallel.backend=pmap memory.scan_layers=True",
    "by layer": """
        parallel.data=2 parallel.fsdp=4 parallel.fsdp_gather=layer
        memory.scan_layers=True""",
}


def new_program(layout="one device", options="", loss=next_token_loss):
    """Return a tiny program in a layout, with some options changed."""
    config = configured(f"{SMALL} {LAYOUTS[layout]} {options}")
    devices = jax.devices()
    if layout == "one device":
        devices = devices[:1]
    return Program.from_config(config, devices, loss=loss)


cached_program = functools.cache(new_program)


def make_program(layout="one device", options="", loss=next_token_loss):
    """Return a program that tests share, so that it is compiled once."""
    return cached_program(layout, options, loss)


@functools.cache
def compiled(program):
    return program.backend.compile_train(program.train_step)


def draw_batch(index, row=None):
    """Draw a batch, with the poisonous token in `row`, if any."""
    rng = np.random.default_rng(index)
    tokens = rng.integers(0, POISON, (ROWS, T + 1), dtype=np.int32)
    if row is not None:
        tokens[row, 3] = POISON
    return batch_of(tokens)


def make_batch(program, index, row=None):
    """Draw a batch and put it on the devices."""
    return program.backend.put_batch(draw_batch(index, row))


@jax.custom_vjp
def break_gradient(x):
    return x


def break_backward(x, dy):
    is_large = jnp.abs(x).max() > 50
    return (jnp.where(is_large, jnp.nan, dy),)


break_gradient.defvjp(lambda x: (x, x), break_backward)


LOUD = np.tile([100.0, -100.0], 8)  # an embedding at which only the gradient breaks
