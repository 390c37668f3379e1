"""A model that has no room on its devices is refused before anything is spent."""

import jax
import pytest

from gpt2.config import with_options
from gpt2.errors import UserError
from gpt2.parallel import state_bytes
from gpt2.plan.plan import make_program
from gpt2.training import room
from tests.test_workdir import make_config


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "sgd"])
def test_bytes_of_a_state_are_those_of_the_program(num_layers, name):
    options = {
        "model.vocab_size": 300,
        "model.num_layers": num_layers,
        "data.tokenizer": "byte",
        "optim.name": name,
    }
    config = with_options(make_config(), options)
    program = make_program(config, jax.devices()[:1])
    assert room.state_bytes(config) == pytest.approx(
        sum(state_bytes(program.backend, program.state_shapes).values()), rel=1e-3
    )


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"model.embed_dim": 10**6}, r"use --config\.model\.embed_dim=768\.$"),
        ({"model.num_layers": 1000, "model.embed_dim": 768}, r"use .*\.num_layers=12\.$"),
        ({"model.mlp_dim": 2**31 - 1}, r"use --config\.model\.mlp_dim=0\.$"),
    ],
)
def test_the_size_that_is_too_large_is_set_back(options, advice):
    with pytest.raises(UserError, match=advice):
        room.check_room(with_options(make_config(), options), jax.devices()[:1])


def test_devices_that_could_share_a_state_are_advised_to(monkeypatch):
    config = make_config()
    monkeypatch.setattr(room, "device_memory", lambda device: room.state_bytes(config) // 4)
    with pytest.raises(UserError, match=r"strategy=zero3 --config\.parallel\.data=1") as error:
        room.check_room(config, jax.devices()[:8])
    assert "\n" not in str(error.value)
    told = {"parallel.strategy": "zero3", "parallel.data": 1}
    room.check_room(with_options(config, told), jax.devices()[:8])
    monkeypatch.setattr(room, "device_memory", lambda device: None)  # it does not tell
    room.check_room(config, jax.devices()[:1])


def test_a_size_that_is_proposed_fits(monkeypatch):
    config = with_options(make_config(), {"model.num_layers": 24, "model.embed_dim": 768})
    least = room.state_bytes(with_options(config, {"model.num_layers": 3}))
    monkeypatch.setattr(room, "device_memory", lambda device: least)
    with pytest.raises(UserError, match=r"use --config\.model\.num_layers=3\.$"):
        room.check_room(config, jax.devices()[:1])


def test_gradients_count_where_all_are_held_at_once():
    config = make_config()
    waits = room.state_bytes(config)
    free = room.state_bytes(with_options(config, {"optim.clip_norm": 0.0}))
    assert waits - free == pytest.approx(free / 3, rel=1e-3)  # parameters and two moments are left


def test_a_device_of_another_process_is_not_asked(monkeypatch):
    class Far:
        process_index, platform = 1, "gpu"

        def memory_stats(self):
            raise RuntimeError("MemoryStats is only supported for addressable devices")

    room.check_room(make_config(), [Far(), jax.devices()[0]])
