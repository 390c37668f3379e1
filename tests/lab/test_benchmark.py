"""PyTorch's twin computes what ours does, faults are named, and a suite outlives them."""

import contextlib
import functools
import itertools
import json
import operator
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.lab.benchmark import __main__ as command
from gpt2.lab.benchmark import machine, measure, ours, suite
from gpt2.lab.benchmark.first_steps import TOLERANCES, compare, draw_batch
from tests.helpers import configured, parsed, write_rows

SMALL = """
    model.num_layers=2 model.num_heads=2 model.embed_dim=32 model.context_length=16
    model.vocab_size=50 data.batch_size=8 optim.schedule=constant optim.warmup_steps=0"""


@functools.cache
def make_config(options=""):
    """Returns a small config, with some options changed."""
    return configured(f"{SMALL} {options}")


@functools.cache
def our_losses(options):
    return ours.Training(make_config(options)).first_losses()


def peers_module():
    return pytest.importorskip(
        "gpt2.lab.benchmark.peers", reason="needs PyTorch", exc_type=ImportError
    )


def difference(options="", peer="torch"):
    config = make_config(options)
    theirs = peers_module().Training(peer, config).first_losses()
    return compare(our_losses(options), theirs, TOLERANCES[config.precision.compute])


BFLOAT16 = "precision.compute=bfloat16"


@pytest.mark.peers
@pytest.mark.parametrize(
    "options",
    ["", BFLOAT16, "train.accumulate_steps=2 data.batch_size=16", "model.bias=False"],
)
def test_a_peer_computes_what_this_project_computes(options):
    assert difference(options) is None
    # And they are losses.
    assert all(abs(loss - np.log(50)) < 3 for loss in our_losses(options))


@pytest.mark.peers
def test_a_compiled_peer_computes_what_this_project_computes(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    assert difference("model.num_layers=1", "torch_compile") is None
    assert list(tmp_path.rglob("*.so"))  # inductor compiled it


def skip_the_first_layer(forward):
    calls = itertools.count()
    return lambda self, x: x + (next(calls) % 2) * (forward(self, x) - x)


def do_not_clip(clip):
    return lambda *_: None


def decay_nothing(adamw):
    def altered(groups, *options, **more):
        undecayed = [group | {"weight_decay": 0.0} for group in groups]
        return adamw(undecayed, *options, **more)

    return altered


@pytest.mark.peers
@pytest.mark.parametrize(
    ("options", "name", "plant"),
    [
        ("", "nn.LayerNorm", lambda norm: partial(norm, eps=1e-6)),
        ("", "F.gelu", lambda gelu: lambda x, approximate: gelu(x)),
        ("", "nn.utils.clip_grad_norm_", do_not_clip),
        ("", "torch.optim.AdamW", decay_nothing),
        (BFLOAT16, "Block.forward", skip_the_first_layer),
    ],
)
def test_a_planted_difference_is_named(options, name, plant, monkeypatch):
    peers = peers_module()
    right = operator.attrgetter(name)(peers)
    monkeypatch.setattr(f"{peers.__name__}.{name}", plant(right))
    assert difference(options).startswith("the loss of step")


def test_a_difference_is_named():
    ours = [4.0, 3.0]
    assert compare(ours, [4.0, 3.00001], 1e-5) is None
    late = compare(ours, [4.0, 3.03], 1e-5)
    assert late.startswith("the loss of step 2 differs by 1.0e-02")
    undefined = compare(ours, [float("nan"), 3.0], 1e-5)
    assert undefined.startswith("the loss of step 1 differs by nan")


class Fake:
    """A player whose first step after others' turns takes long, and whose loss is its name's."""

    device, started = "1 x cpu", {}

    def __init__(self, name, command):
        self.name = name
        self.started[name] = command

    def close(self):
        pass

    def ask(self, method, number=0):
        if method == "info":
            return {"device": self.device, "peak_tokens_per_second": 1e3}
        if method == "first_losses":
            return self.shown()
        return [100.0] + [0.5] * (number - 1) if number > 1 else [0.5]

    def shown(self):
        return [4.0]


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(measure, "Player", Fake)
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: command)
    Fake.started.clear()
    return monkeypatch


def cases(*peers):
    return dict.fromkeys(("jax", *peers), measure.Case(make_config()))


def test_figures_follow_from_turns_whose_first_step_does_not_count(fake):
    (row,) = measure.measure(cases(), rounds=3, seconds=1.0)
    assert row["turns"] == [0.5] * 3
    assert row["device"] == "1 x cpu"
    assert row["tokens_per_second"] == 8 * 16 / 0.5
    assert row["mfu"] == 256 / 1e3


def test_steps_of_several_shapes_are_timed_and_counted_by_the_largest(fake):
    config = make_config("train.batch_schedule=3=32 train.context_schedule=0=8,3=16")
    assert draw_batch(config).shape == (2, 32, 16)
    (row,) = measure.measure({"jax": measure.Case(config)}, rounds=1, seconds=0.0)
    assert row["tokens_per_second"] == 32 * 16 / 0.5


def test_a_peer_that_differs_or_runs_elsewhere_is_not_timed(fake):
    fake.setattr(Fake, "shown", lambda self: [len(self.name)])
    with pytest.raises(UserError, match="torch does not compute what jax computes"):
        measure.measure(cases("torch"), rounds=1, seconds=0.0)
    fake.setattr(Fake, "device", property(lambda self: f"{len(self.name)} x H100"))
    with pytest.raises(
        UserError, match="torch runs on 5 x H100, but jax runs on 3 x H100"
    ):
        measure.measure(cases("torch"), rounds=1, seconds=0.0)


def test_a_variation_sets_options_with_their_types_or_flags_of_xla(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    case = measure.Case(make_config())
    text = "model.position=rope,optim.layer_rates=h_0/=0.5,wte=2,model.bias=False,optim.eps=1"
    options = "model.position=rope optim.layer_rates=h_0/=0.5,wte=2"
    options += " model.bias=False optim.eps=1"
    assert case.varied(text).config == make_config(options)
    assert case.varied("XLA_FLAGS=--b=2").xla_flags == "--a=1 --b=2"
    with pytest.raises(UserError):
        case.varied("model.positron=rope")
    with pytest.raises(UserError, match="all variations share one tokenizer"):
        case.varied("data.tokenizer=byte")


def test_a_peer_runs_under_the_python_that_is_named(fake):
    given = "--config=configs/quickstart.py --peers=torch --rounds=1 --seconds=1"
    with parsed(command.define_flags, *given.split(), "--peer_python=/other/python"):
        command.measure_cases()
    pythons = {name: words[0] for name, words in Fake.started.items()}
    assert pythons == {"jax": sys.executable, "torch": "/other/python"}


def test_a_ratios_interval_is_students_of_the_logarithms():
    logs = np.log([4.0, 1.0, 3.0])
    half = 4.3027 * logs.std(ddof=1) / np.sqrt(3)  # t of two degrees of freedom, 97.5 %
    mean = logs.mean()
    expected = np.exp([mean, mean - half, mean + half])
    ratio = measure.ratio([0.4, 0.2, 0.9], [0.1, 0.2, 0.3])
    assert ratio == pytest.approx(expected, rel=1e-4)
    assert measure.ratio([0.6], [0.2]) == [pytest.approx(3.0)]


def test_a_player_does_the_steps_it_is_asked_for_and_tells():
    code = """
from gpt2.lab.benchmark.measure import Side

class Counter(Side):
    count = 100
    def info(self):
        return {"device": "1 x H100", "count": self.count}
    def draw_batch(self, number):
        return number
    def draw_weights(self):
        self.count = 0
    def step(self, batch):
        self.count += 1
        return self.count + batch

Counter().serve()
"""
    command = [sys.executable, "-c", code]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, **pipes)
    with contextlib.closing(measure.Player("it", process)) as it:
        assert len(it.ask("times", 3)) == 3
        assert len(it.ask("times", 1)) == 1
        assert it.ask("info") == {"device": "1 x H100", "count": 104}
        assert it.ask("first_losses") == [1, 3, 5, 7, 9]


def test_the_step_of_a_run_skips_its_first_lines(tmp_path):
    slow = {"perf/step_seconds": 5.0}
    fast = {"perf/step_seconds": 0.1, "perf/mfu": 0.5}
    lines = [slow, slow, {"eval/loss": 4.0}, fast, fast]
    assert suite.describe_run(tmp_path) == []
    rows = [{"step": step} | line for step, line in enumerate(lines)]
    write_rows(tmp_path / "metrics.jsonl", rows)
    (found,) = suite.describe_run(tmp_path)
    assert found["step_seconds"] == 0.1
    assert found["mfu"] == 0.5


def say(**row):
    return ["-c", f"print('from a library'); print({json.dumps(row)!r}, flush=True)"]


PARTS = {
    "good": say(name="a", step_seconds=0.1, turns=[0.1]),
    "broken": ["-c", "raise ValueError('planted')"],
    "slow": ["-c", f"{say(name='early')[1]}\nimport time; time.sleep(60)"],
}


def test_a_part_that_fails_costs_its_own_row_alone(tmp_path, monkeypatch):
    asked = []
    run_command = suite.run_command

    def run(command, limit, log):
        asked.append(command[0])
        return run_command(PARTS[command[0]], limit, log)

    monkeypatch.setattr(suite, "run_command", run)
    seconds = {"broken": 60, "slow": 2, "good": 60}
    parts = [suite.Part(name, limit, (name,)) for name, limit in seconds.items()]
    monkeypatch.setattr(suite, "make_parts", lambda output: parts)
    assert not suite.run_suite(tmp_path, {})
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").open()]
    statuses = {row["part"]: row["status"] for row in rows if "status" in row}
    assert statuses == {
        "broken": "failed: see logs/broken.err",
        "slow": "did not end within 2 s",
        "good": "done",
    }
    assert "ValueError: planted" in (tmp_path / "logs/broken.err").read_text()
    names = [row["name"] for row in rows if "name" in row]
    assert names == ["early", "a"]  # rows of a part that was stopped stay
    page = (tmp_path / "report.md").read_text()
    assert "failed: see logs/broken.err" in page
    assert "100.00 ms" in page
    suite.run_suite(tmp_path, {})
    assert asked == ["broken", "slow", "good", "broken", "slow"]
    with pytest.raises(UserError, match="contains results with other options: none"):
        suite.run_suite(tmp_path, {"precision.compute": "float32"})


def test_nothing_that_a_part_started_lives_on(tmp_path):
    pid = tmp_path / "pid"
    script = "import subprocess, sys\n"
    script += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    script += f"open({str(pid)!r}, 'w').write(str(child.pid))"
    suite.run_command(["-c", script], 60, tmp_path / "log")
    stat = Path(f"/proc/{pid.read_text()}/stat")
    for _ in range(100):  # until init has reaped it
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child still runs")


def test_a_machine_is_told(capsys, tmp_path):
    machine.main(tmp_path)
    assert json.loads(capsys.readouterr().out)["device_kind"] == "cpu"


def test_every_part_of_the_suite_has_options_that_work(tmp_path):
    parts = suite.make_parts(tmp_path)
    assert len({part.name for part in parts}) == len(parts)
    assert sum(part.seconds for part in parts) <= 15 * 60
    for part in parts:
        if part.name in ("machine", "profile"):  # which have no options
            continue
        is_run = part.command[0].endswith("train.py")
        with parsed(
            command.define_flags, *part.command[2 if is_run else 3 :]
        ) as values:
            if is_run:
                assert command.cli.parse_config()
                continue
            case = measure.Case(command.make_config(values.peers))
            assert part.command[2] in command.COMMANDS
            assert all(case.varied(text) != case for text in values.vary)
