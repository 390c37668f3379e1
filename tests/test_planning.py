"""Searches among layouts: what they compile, what they need not compile, and in which order."""

import math
import re
import types

import jax
import pytest
from absl import flags

from configs import quickstart
from gpt2.config import Config, with_options
from gpt2.errors import UserError
from gpt2.model import num_params
from gpt2.planning import candidates, command, screen
from gpt2.planning.plan import OutOfMemory, make_plan, usable_memory
from gpt2.planning.search import Search
from gpt2.telemetry.chips import BOARDS, Board

SMALL = {
    **{"model.num_layers": 1, "model.num_heads": 4, "model.embed_dim": 64},
    **{"model.context_length": 32, "data.tokenizer": "byte", "data.batch_size": 16},
}
RING = ["parallel.data", "parallel.fsdp", "parallel.tensor"]


def config(**options) -> Config:
    named = {name.replace("__", "."): value for name, value in options.items()}
    return with_options(Config.from_dict(quickstart.get_config()), SMALL | named)


def board(monkeypatch, **values) -> str:
    """Gives the accelerator H100 another memory or speed, for a test."""
    monkeypatch.setitem(BOARDS, "H100", BOARDS["H100"]._replace(**values))
    return "H100"


def compiled(search: Search, most: int = 99) -> Search:
    while search.waiting and len(search.trials) < most:
        search.compile_next()
    return search


def test_a_search_orders_by_what_is_sent_where_nothing_else_counts(monkeypatch):
    wanted = config(parallel__data=1, parallel__fsdp=8, memory__remat="none")
    name = board(monkeypatch, near=1e-6)
    fixed = [*RING, "parallel.strategy", "memory.remat"]
    search = compiled(Search(wanted, jax.devices(), name, fixed=fixed))
    step, layer = search.fitting
    assert step.candidate.options["parallel.fsdp_gather"] == "step"
    assert layer.candidate.options["train.accumulate_steps"] == 1
    # A gather and a reduce-scatter of all parameters, seven eighths of which lie elsewhere.
    sent = 2 * 4 * num_params(step.plan.state.params) * 7 / 8
    seconds = wanted.tokens_per_step / step.plan.tokens_per_second(name)
    assert seconds == pytest.approx(sent / 1e3, rel=1e-3)
    assert step.candidate.seconds == pytest.approx(seconds, rel=1e-3)
    # Two micro-batches gather each layer twice, so they need not be compiled.
    assert search.no_faster == 2
    twice = with_options(layer.candidate.config, {"train.accumulate_steps": 2})
    ratio = make_plan(twice).tokens_per_second(name) / layer.plan.tokens_per_second(name)
    assert ratio == pytest.approx(0.5, rel=0.1)


def test_a_search_tries_the_configs_own_layout_first():
    wanted = config(parallel__data=1, parallel__fsdp=-1, parallel__strategy="zero3")
    wanted = with_options(wanted, {"memory.remat": "full", "train.accumulate_steps": 2})
    own = {"parallel.data": 1, "parallel.fsdp": 2, "parallel.tensor": 1}
    own |= {"parallel.strategy": "auto", "parallel.fsdp_gather": "step"}
    own |= {"memory.remat": "full", "train.accumulate_steps": 2}
    assert Search(wanted, jax.devices()[:2], "H100").waiting[0].options == own
    offloaded = with_options(wanted, {"memory.remat": "offload", "memory.scan_layers": True})
    first = Search(offloaded, jax.devices()[:2], "H100").waiting[0].options
    assert {name for name in own if first[name] != own[name]} <= {"memory.remat"}
    impossible = config(parallel__tensor=8)
    assert candidates.options_of(impossible, jax.devices()[:2], []) == {}


def test_nothing_fits_only_where_all_was_tried(monkeypatch, capsys):
    def refuse(config, devices):
        raise OutOfMemory("none is left")

    monkeypatch.setattr("gpt2.planning.search.make_plan", refuse)
    monkeypatch.setattr(command.cli, "overrides", dict)
    monkeypatch.setattr(command.cli, "config_file", lambda: "configs/quickstart.py")
    found = {}
    for trials in (1, 99):
        given = flags.FlagValues()
        flags.DEFINE_integer("plan_trials", trials, "", flag_values=given)
        flags.DEFINE_string("plan_board", None, "", flag_values=given)
        given.mark_as_parsed()
        monkeypatch.setattr(flags, "FLAGS", given)
        try:
            found[trials] = command._search(config(), jax.devices()[:1], "NVIDIA H100", "H100")
        except UserError as error:
            found[trials] = str(error)
        assert ("nothing fits" in capsys.readouterr().out) == (trials == 99)
    assert re.match(
        r"none of the 1 candidates tried fits; \d+ are left. Use --plan_trials=4\.", found[1]
    )
    assert found[99] == 1


@pytest.mark.thorough
def test_a_search_finds_the_fastest_that_fits_and_compiles_few(monkeypatch):
    """The compiler is replaced by arithmetic, so that what is not compiled is known too."""
    wanted = config(model__num_layers=12, model__embed_dim=768, memory__scan_layers=True)
    name = board(monkeypatch, near=1.0)
    found = candidates.find_candidates(wanted, jax.devices(), name, [])
    everything = {candidate.config: candidate for candidate in found[0]}

    def needed(candidate):
        return candidate.least_bytes + 0.5 * candidate.activation_bytes

    def pretend(config, devices):
        candidate = everything[config]
        speed = config.tokens_per_step / candidate.seconds
        return types.SimpleNamespace(
            bytes_needed=needed(candidate), tokens_per_second=lambda _: speed
        )

    monkeypatch.setattr("gpt2.planning.search.make_plan", pretend)
    monkeypatch.setattr("gpt2.planning.search.find_candidates", lambda *_: (list(found[0]), []))
    for memory in (0.1, 0.25, 0.5, 1.0, 8.0):
        board(monkeypatch, memory=memory / 0.75)
        fitting = [c for c in found[0] if needed(c) <= usable_memory(name)]
        fastest = min((c.seconds for c in fitting), default=math.inf)
        search = compiled(Search(wanted, jax.devices(), name), most=8)
        assert bool(search.fitting) == bool(fitting) == (memory > 0.1)
        assert all(trial.plan or "fit: needs" in trial.problem for trial in search.trials)
        if fitting:  # 8 trials are enough
            assert search.fitting[0].candidate.seconds == fastest
        compiled(search, most=len(everything))
        assert len(search.trials) < 0.3 * len(everything)
        skipped = search.too_large + search.no_smaller + search.no_faster
        assert skipped + len(search.trials) == search.number == len(everything)
        of_layout = {str(trial.candidate.layout): math.inf for trial in search.trials}
        for trial in search.fitting:
            layout, seconds = str(trial.candidate.layout), trial.candidate.seconds
            of_layout[layout] = min(of_layout[layout], seconds)
        assert all(c.seconds >= of_layout[str(c.layout)] for c in fitting)


def test_what_is_given_stays_and_the_rest_varies():
    wanted = config(parallel__fsdp=4, parallel__data=-1, train__accumulate_steps=2)
    fixed = ["parallel.fsdp", "parallel.data", "train.accumulate_steps"]
    found, refused = candidates.find_candidates(wanted, jax.devices(), "H100", fixed)
    meshes = {tuple(c.options[name] for name in RING) for c in found}
    assert meshes == {(2, 4, 1), (1, 4, 2)} and not refused
    assert {c.options["train.accumulate_steps"] for c in found} == {2}
    assert len({c.options["memory.remat"] for c in found}) > 2
    _, refused = candidates.find_candidates(wanted, jax.devices(), "H100", [])
    assert len(refused) == 2  # as auto, and as megatron
    assert all("num_heads=4 does not split over parallel.tensor=8" in line for line in refused)


@pytest.mark.thorough
def test_arithmetic_gives_the_state_and_never_more_than_the_compiler():
    wanted = config(parallel__tensor=1)
    fixed = ["parallel.tensor", "train.accumulate_steps", "memory.remat"]
    devices = jax.devices()[:4]
    found, _ = candidates.find_candidates(wanted, devices, "H100", fixed)
    assert len(found) == 7  # by data; by fsdp 2 and 4, with gathers by step and layer, and as zero1
    for candidate in found:
        planned = make_plan(candidate.config, devices)
        state = planned.bytes_needed - planned.memory["activations"]
        assert state <= candidate.least_bytes <= planned.bytes_needed


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0 ms"),
        (3.2e-7, "0.32 µs"),
        (9.95e-5, "99.5 µs"),
        (1e-4, "0.10 ms"),
        (0.02423, "24.23 ms"),
        (3.428, "3,428 ms"),
    ],
)
def test_times_of_tiny_models_are_no_zeros(seconds, told):
    assert screen._milliseconds(seconds) == told


def test_jax_takes_three_quarters_of_a_gpu_unless_told_otherwise(monkeypatch):
    monkeypatch.setitem(BOARDS, "H100", Board(memory=80, near=450, domain=8))
    assert usable_memory("H100") == 60e9 and usable_memory("TPU v5e") == 16e9
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert usable_memory("H100") == pytest.approx(72e9)
