"""Drawings of shardings say which device holds which part."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import quickstart
from gpt2.config import Config, with_options
from gpt2.errors import UserError
from gpt2.parallel.drawing import check_picture, find_drawings
from gpt2.training.program import Program

SMALL = {
    **{"model.num_layers": 2, "model.num_heads": 4, "model.embed_dim": 64},
    **{"model.context_length": 32, "model.vocab_size": 300, "data.batch_size": 16},
}
MIXED = {"parallel.data": 2, "parallel.fsdp": 2, "parallel.tensor": 2}
KERNEL = "h_0/mlp/c_fc/kernel"


def program(**options) -> Program:
    named = {name.replace("__", "."): value for name, value in options.items()}
    config = with_options(Config.from_dict(quickstart.get_config()), SMALL | named)
    return Program.from_config(config, jax.devices())


def drawings(program: Program, pattern: str):
    axes = program.model.logical_axes()
    return find_drawings(program.state_shapes, program.batch_shapes, axes, pattern)


@pytest.mark.parametrize("pattern", [f"params/{KERNEL}", "params/wte", "params/h_1/mlp/c_fc/bias"])
def test_a_drawing_says_what_each_device_holds(pattern):
    mixed = program(**MIXED)
    (drawing,) = drawings(mixed, pattern)
    params = mixed.init_state().params
    leaf = {"wte": params["wte"]["embedding"]}.get(pattern.rpartition("/")[2])
    if leaf is None:
        leaf = params["h_1"]["mlp"]["c_fc"][pattern.rpartition("/")[2]]
    for shard in leaf.addressable_shards:
        row, column = (
            0 if i is None else (shard.index[i].start or 0) // drawing.part[i]
            for i in (drawing.down, drawing.across)
        )
        assert str(shard.device.id) in drawing.cells[row][column].split(",")
        assert shard.data.shape == drawing.part and shard.data.nbytes == drawing.part_bytes


def test_moments_and_batch_are_drawn_with_the_names_of_their_axes():
    mixed = program(**MIXED)
    (kernel,) = drawings(mixed, KERNEL)
    assert kernel.names == [
        f"{place}/{KERNEL}" for place in ("params", "opt_state/mu", "opt_state/nu")
    ]
    assert kernel.cells == [["0,4", "1,5"], ["2,6", "3,7"]]
    assert list(map(str, kernel.axes)) == [
        "embed 64, split over fsdp 2",
        "mlp 256, split over tensor 2",
    ]
    (batch,) = drawings(mixed, "^batch/")
    assert batch.names == ["batch/tokens", "batch/targets"]
    assert batch.cells == [["0,1"], ["2,3"], ["4,5"], ["6,7"]]
    assert str(batch.axes[0]) == "batch 16, split over data 2 x fsdp 2"
    (rows,) = drawings(program(parallel__backend="pmap"), "^batch/")
    assert [axis.name for axis in rows.axes] == ["device", "batch", "length"]
    assert [row[0] for row in rows.cells] == list("01234567")


def test_layers_that_are_alike_share_a_drawing():
    (kernels,) = drawings(program(parallel__fsdp=8), "params/.*c_fc/kernel")
    assert kernels.names == ["params/h_*/mlp/c_fc/kernel (2 layers)"]
    assert kernels.cells == [[str(device)] for device in range(8)]


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "soap"])
def test_every_array_of_a_state_has_a_name_of_its_own(optimizer):
    spread = program(parallel__fsdp=8, optim__name=optimizer)
    found = drawings(spread, ".")
    leaves = [x for x in jax.tree.leaves(spread.state_shapes) if x.ndim]
    layers = [name.partition(" (")[2].partition(" ")[0] for d in found for name in d.names]
    assert sum(int(number or 1) for number in layers) == len(leaves) + len(spread.batch_shapes)


def test_a_screen_of_80_columns_and_a_picture_hold_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    picture = tmp_path / "new" / "drawn.png"
    program(**MIXED).draw("h_0/mlp|batch", check_picture(str(picture)))
    out = capsys.readouterr().out
    assert max(map(len, out.replace(str(picture), "").splitlines())) <= 80
    assert "│ 0,4 │ 1,5 │\n├─────┼─────┤\n│ 2,6 │ 3,7 │" in out
    assert "across: mlp 256, split over tensor 2\n" in out and str(picture) in out
    import matplotlib.image

    pixels = matplotlib.image.imread(picture)
    assert min(pixels.shape[:2]) > 500 and np.unique(pixels.reshape(-1, 4), axis=0).shape[0] > 8


def test_long_rings_leave_their_middle_out():
    (tokens,) = drawings(program(parallel__fsdp=8), "batch/tokens")
    many = dataclasses.replace(tokens, cells=[[str(device)] for device in range(256)])
    from gpt2.parallel.drawing import _shorten

    rows = [row[0] for row in _shorten(many)]
    assert len(rows) == 16 and rows[:2] == ["0", "1"] and rows[8] == "..." and rows[-1] == "255"


def test_mistakes_are_told(tmp_path):
    spread = program(parallel__fsdp=8)
    with pytest.raises(UserError, match="matches no parameter, moment or batch"):
        drawings(spread, "no_such")
    with pytest.raises(UserError, match=r"--visualize=\[ is not a regular expression"):
        drawings(spread, "[")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"nothing can be written .*Give another --visualize_to"):
        check_picture(str(tmp_path / "file" / "a.png"))
