"""Both sides compute the same, each option does something on each side, and faults are named."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gpt2.benchmark import __main__, first_step, measure, our_step, worker
from gpt2.benchmark.case import make_config
from gpt2.benchmark.first_step import Agreement, FirstStep, compare, first_difference
from gpt2.errors import UserError
from gpt2.training.program import Program

# 8 sequences, one for each simulated device.
CASE = dict(
    subject="train", num_layers=2, num_heads=2, embed_dim=32, context_length=16, batch_size=8,
    vocab_size=50, compute="float32", matmul_precision="default", attention="sdpa",
    optimizer="adamw", with_data=False, remat="none", scan_layers=False, backend="pjit", data=-1,
    fsdp=1, tensor=1, vary={},
)  # fmt: skip


@functools.cache
def our_first_step(tmp, **changes):
    worker.OurModel(CASE | changes).show(tmp / "ours.npz")
    return FirstStep.load(tmp / "ours.npz")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Returns a function of changes to the case to our first step."""
    return functools.partial(our_first_step, tmp_path_factory.mktemp("ours"))


def peers_module():
    return pytest.importorskip("gpt2.benchmark.peers", reason="needs PyTorch", exc_type=ImportError)


def their_work(peer="torch", **changes):
    peers = peers_module()
    if peer.startswith("hf"):
        pytest.importorskip("transformers")
    if "xla" in peer:
        pytest.importorskip("torch_xla")
    return peers.PeerModel(peer, CASE | changes, peers.choose_device(peer))


def show(work, tmp_path):
    work.show(tmp_path / "theirs.npz")
    return FirstStep.load(tmp_path / "theirs.npz")


def difference(ours, theirs):
    found = first_difference(compare(ours, theirs))
    return found and str(found)


@pytest.mark.parametrize("peer", ["torch", "hf", "torch_xla"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(compute="bfloat16"),
        dict(optimizer="sgd"),
        dict(attention="eager"),
        dict(subject="eval"),
    ],
    ids=lambda changes: "-".join(changes.values()) or "default",
)
def test_peers_compute_what_this_project_computes(peer, changes, ours, tmp_path, monkeypatch):
    reference = ours(**changes)
    monkeypatch.setenv("XLA_FLAGS", "")  # which PyTorch/XLA would read
    theirs = show(their_work(peer, **changes), tmp_path)
    assert bool(theirs.gradients) == (changes.get("subject") != "eval")
    assert difference(reference, theirs) is None
    assert abs(reference.loss - np.log(50)) < 3  # and the loss is one
    lengths = [np.linalg.norm(values) for values in reference.gradients.values()]
    if changes.get("subject") != "eval":
        assert np.linalg.norm(lengths) == pytest.approx(1.0, rel=0.01)  # it was clipped


def plant_epsilon(peers, patch):
    patch.setattr(peers.nn, "LayerNorm", functools.partial(peers.nn.LayerNorm, eps=1e-6))


def plant_gelu(peers, patch):
    gelu = peers.F.gelu
    patch.setattr(peers.F, "gelu", lambda x, approximate: gelu(x))  # the exact form


def plant_precision(peers, patch):
    cast = peers._cast
    patch.setattr(peers, "_cast", lambda compute, device: cast("bfloat16", device))


def plant_missing_layer(peers, patch):
    block = sys.modules[peers.make_model.__module__].Block
    forward, calls = block.forward, itertools.count()

    def skip_the_first(self, x):
        return x + (next(calls) % 2) * (forward(self, x) - x)

    patch.setattr(block, "forward", skip_the_first)


def plant_no_clipping(peers, patch):
    patch.setattr(peers.nn.utils, "clip_grads_with_norm_", lambda *_: None)


def plant_in_optimizer(name, **changes):
    """Returns a plant of other options of an optimizer; `weight_decay` is of its groups."""

    def plant(peers, patch):
        original = getattr(peers.torch.optim, name)

        def altered(groups, **options):
            decay = {key: changes[key] for key in ("weight_decay",) if key in changes}
            return original([group | decay for group in groups], **options | changes)

        patch.setattr(peers.torch.optim, name, altered)

    return plant


@pytest.mark.parametrize(
    ("changes", "plant", "told"),
    [
        ({}, plant_epsilon, "loss differs"),
        ({}, plant_gelu, "gradient of h_0/"),
        ({}, plant_precision, "products are in bfloat16, in place of float32"),
        ({}, plant_no_clipping, "gradient of h_0/"),
        ({}, plant_in_optimizer("AdamW", eps=1e-5), "weights of h_0/"),
        ({}, plant_in_optimizer("AdamW", lr=1.01 * 6e-4), "weights of h_0/"),
        ({}, plant_in_optimizer("AdamW", betas=(0.9, 0.999)), "weights of h_0/"),
        ({}, plant_in_optimizer("AdamW", weight_decay=0.0), "weights of h_0/attn/c_attn/kernel"),
        (dict(optimizer="sgd"), plant_in_optimizer("SGD", momentum=0.9), "weights of h_0/"),
        (dict(compute="bfloat16"), plant_missing_layer, "loss differs"),
        (dict(compute="bfloat16"), plant_no_clipping, "gradient of h_0/"),
        (dict(subject="eval"), plant_gelu, "loss of single tokens"),
        (dict(subject="eval", compute="bfloat16"), plant_missing_layer, "loss differs"),
    ],
)
def test_a_planted_difference_is_named(changes, plant, told, ours, tmp_path, monkeypatch):
    peers = peers_module()
    plant(peers, monkeypatch)
    found = difference(ours(**changes), show(their_work(**changes), tmp_path))
    assert found and found.startswith(told)


def test_a_peer_on_a_cpu_clips_by_the_norm_of_large_tensors():
    """PyTorch's own is 0.1 % too small there."""
    peers = peers_module()
    weight = peers.nn.Parameter(peers.torch.zeros(40_000, 768))
    weight.grad = peers.torch.randn(weight.shape, generator=peers.torch.Generator().manual_seed(0))
    plain = float(peers.torch.linalg.vector_norm(weight.grad))
    exact = float(peers.torch.linalg.vector_norm(weight.grad.double()))
    assert plain < (1 - 1e-4) * exact
    peer = SimpleNamespace(
        _is_training=True, _device="cpu", _weights=[weight], _optim=SimpleNamespace(clip_norm=1.0)
    )
    peers.PeerModel._clip(peer)
    length = float(peers.torch.linalg.vector_norm(weight.grad.double()))
    np.testing.assert_allclose(length, 1.0, rtol=1e-6)


def test_single_targets_keep_one_token_each():
    targets = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    singles = list(first_step.single_targets(targets, none=-1))
    assert len(singles) == first_step.TOKENS
    for single in singles:
        (kept,) = single[single != -1]
        assert targets.flat[kept - 1] == kept and single.flat[kept - 1] == kept


def test_a_16_bit_timing_is_preceded_by_float32_in_two_sequences(monkeypatch):
    asked = []

    def verify(case, peers):
        asked.append((case, peers))
        yield peers[0], [Agreement("gradient of a", 1e-3, 1e-4)]

    monkeypatch.setattr(measure, "verify", verify)
    case = CASE | dict(compute="bfloat16", attention="flash", with_data=True, shares=True)
    with pytest.raises(UserError, match="torch does not compute what jax computes: gradient of a"):
        measure.measure(case, ["torch", "torch_compile"], rounds=1, seconds=0.0)
    ((found, peers),) = asked
    assert peers == ["torch"]  # the model without its compiler
    assert found == CASE | dict(matmul_precision="highest", batch_size=2, shares=False)


def test_each_kind_of_difference_is_named_in_turn():
    def step(**changes):
        trees = dict(
            before={"a/kernel": np.ones(3), "b/bias": np.ones(2)},
            after={"a/kernel": np.full(3, 0.9), "b/bias": np.full(2, 0.9)},
            gradients={"a/kernel": np.arange(3.0), "b/bias": np.ones(2)},
        )
        return FirstStep(**dict(products="float32", loss=4.0) | trees | changes)

    assert difference(step(), step(loss=4.00001)) is None
    scores = [step(tokens=np.array(tokens)) for tokens in ([1.0, 3.0], [1.0, 3.1])]
    told_of_tokens = "loss of single tokens differs by 7.1e-02, and 0.0001 is allowed"
    assert difference(*scores) == told_of_tokens
    told = {
        "products are in tf32, in place of float32": step(products="tf32"),
        "weights before the step differ": step(before={"a/kernel": np.ones(3)}),
        "loss differs by 1.0e-02, and 1e-05 is allowed": step(loss=4.04),
        "loss differs by nan, and 1e-05 is allowed": step(loss=float("nan")),
        "gradient of b/bias differs by 1.0e-01, and 0.0001 is allowed": step(
            gradients={"a/kernel": np.arange(3.0), "b/bias": np.full(2, 1.1)}
        ),
        "weights of a/kernel differs by 5.0e-01, and 0.001 is allowed": step(
            after={"a/kernel": np.full(3, 0.85), "b/bias": np.full(2, 0.9)}
        ),
    }
    for text, other in told.items():
        assert difference(step(), other) == text


def test_a_peer_that_differs_is_not_timed(monkeypatch):
    class Liar:
        """Its loss depends on its name, and it cannot be timed."""

        def __init__(self, name, command, environment):
            self._loss = float(len(name))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def runs_on(self):
            return {"platform": "cpu", "device": "1 x cpu"}

        def show(self, path):
            FirstStep("float32", self._loss).save(path)
            return 0.1

        def play(self, steps):
            assert self._loss == len(measure.OURS), "a peer was timed"
            return [0.1] * steps

    monkeypatch.setattr(measure, "Player", Liar)
    with pytest.raises(UserError, match=r"torch does not compute what jax computes: loss differs"):
        measure.measure(CASE, ["torch"], rounds=1, seconds=0.0)


def test_verify_shows_every_peer_and_refuses_the_first_that_differs(monkeypatch, capsys):
    found = {"torch": [Agreement("loss", 1e-7, 1e-5)], "hf": [Agreement("loss", 1e-3, 1e-5)]}
    found["hf_compile"] = [Agreement("gradient of wte/embedding", 0.2, 1e-4)]
    monkeypatch.setattr(__main__, "verify", lambda case, peers: found.items())
    with pytest.raises(UserError, match="hf does not compute what jax computes: loss differs by"):
        __main__.print_agreement([CASE | {"model": "tiny"}], list(found))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[-3:]] == list(found)
    assert shown[-3].endswith("equal") and "differs: gradient of wte/embedding" in shown[-1]
    with pytest.raises(UserError, match=r"there are none\. Add --peers=torch"):
        __main__.print_agreement([CASE], [])


@pytest.mark.parametrize(
    "changes",
    [
        dict(scan_layers=True),
        pytest.param(dict(fsdp=8, data=1), marks=pytest.mark.thorough),
    ],
)
def test_layouts_show_the_same_first_step(changes, ours):
    assert difference(ours(), ours(**changes)) is None


@pytest.mark.thorough
def test_gradients_read_from_moments_are_those_of_the_loss(ours):
    config = make_config(CASE)
    program = Program.from_config(config, jax.devices()[:1])
    params = our_step.draw_params(program.model.config)
    tokens, targets = map(jnp.asarray, first_step.draw_batch(CASE))

    def loss(params):
        total, count = program.model.apply({"params": params}, tokens, targets, method="loss")[
            "loss"
        ]
        return total / count

    gradients = jax.grad(loss)(params)
    norm = optax.tree.norm(gradients)
    assert norm > 1  # so that clipping does something
    expected = our_step.samples(jax.tree.map(lambda gradient: gradient / norm, gradients))
    for optimizer in ("adamw", "sgd"):
        found = ours(optimizer=optimizer).gradients
        assert set(found) == set(expected)
        for name, values in expected.items():
            scale = np.abs(values).max()
            np.testing.assert_allclose(found[name], values, atol=1e-4 * scale, err_msg=name)


def test_large_tensors_are_compared_by_a_sample():
    values = np.arange(2.0 * first_step.SAMPLE)
    found = first_step.sample("a", values)
    assert found.size == first_step.SAMPLE and np.unique(found).size > 0.7 * found.size
    np.testing.assert_array_equal(found, first_step.sample("a", values.copy()))
    np.testing.assert_array_equal(first_step.sample("a", values[:9]), values[:9])


@pytest.mark.parametrize(("precision", "told"), [("highest", "HIGHEST"), ("high", "HIGH")])
def test_precision_reaches_every_product_of_float32(precision, told, monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    used = jax.config.jax_default_matmul_precision
    case = CASE | {"matmul_precision": precision, "attention": "eager"}
    program = Program.from_config(make_config(case), jax.devices()[:1])

    def products():
        lowered = jax.jit(program.train_step).lower(
            program.state_shapes,
            {name: jax.ShapeDtypeStruct((8, 16), "int32") for name in ("tokens", "targets")},
        )
        lines = lowered.as_text().splitlines()
        return [line for line in lines if "dot_general" in line]

    try:
        assert products() and not any(told in line for line in products())
        with monkeypatch.context() as patch:
            patch.setattr(jax, "devices", lambda: [gpu])
            worker.prepare_jax(case)
        jax.clear_caches()
        assert all(f"[{told}, {told}]" in line for line in products())
    finally:
        jax.config.update("jax_default_matmul_precision", used)
        jax.clear_caches()


def test_a_cpu_refuses_what_it_cannot_do():
    with pytest.raises(UserError, match=r"matmul_precision=high needs a GPU .* Use --matmul_prec"):
        worker.prepare_jax(CASE | {"matmul_precision": "high"})
    with pytest.raises(UserError, match=r"attention=flash would be reference on a cpu in float32"):
        worker.prepare_jax(CASE | {"attention": "flash"})


def test_precision_reaches_pytorch(monkeypatch):
    peers = peers_module()
    told = []
    monkeypatch.setattr(peers.torch, "set_float32_matmul_precision", told.append)
    for precision in ("highest", "high", "default"):
        peers.set_matmul_precision(precision, "cuda")
    assert told == ["highest", "high", "high"]
    assert first_step.products_of("float32", "high", "gpu") == "tf32"
    assert first_step.products_of("float32", "highest", "gpu") == "float32"
    assert first_step.products_of("bfloat16", "default", "gpu") == "bfloat16"


@pytest.mark.parametrize("peer", ["torch", "hf"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_forms_of_attention_reach_pytorch(peer, attention, monkeypatch):
    functional = pytest.importorskip("torch").nn.functional
    work, calls = their_work(peer, attention=attention), []
    fused = functional.scaled_dot_product_attention

    def note(*arguments, **options):
        calls.append(1)
        return fused(*arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", note)
    work.step()
    assert len(calls) == (CASE["num_layers"] if attention == "sdpa" else 0)


def test_flash_asks_pytorch_for_its_flash_kernel():
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    from gpt2.benchmark.peers import _attention_kernel

    with _attention_kernel("flash"):
        assert _cur_sdpa_kernel_backends() == [SDPBackend.FLASH_ATTENTION]
    with _attention_kernel("sdpa"):
        assert len(_cur_sdpa_kernel_backends()) > 1
    assert torch


def test_forms_of_attention_are_forms_of_ours():
    long = CASE | {"context_length": 256}
    assert make_config(long | {"attention": "eager"}).model.attention == "reference"
    programs = [
        Program.from_config(make_config(long | {"attention": name}), jax.devices()[:1])
        for name in ("eager", "sdpa")
    ]
    assert [program.attention for program in programs] == ["reference", "blocked"]


def test_with_data_every_step_has_a_batch_of_its_own(monkeypatch):
    work = worker.OurModel(CASE | {"with_data": True})
    seen = []
    monkeypatch.setattr(work, "_run", lambda batch: seen.append(np.asarray(batch["tokens"])))
    work.step()
    work.step()
    assert seen[0].shape == (8, 16) and (seen[0] != seen[1]).any()
    assert max(batch.max() for batch in seen) < 50  # within the vocabulary


def test_with_data_peers_read_a_batch_for_each_step(monkeypatch):
    work = their_work(with_data=True)
    seen = []
    loss = work._loss
    monkeypatch.setattr(work, "_loss", lambda *batch: seen.append(batch) or loss(*batch))
    work.step()
    work.step()
    (tokens, targets), (others, _) = seen
    assert tokens.shape == (8, 16) and (tokens != others).any()
    assert (tokens[:, 1:] == targets[:, :-1]).all() and tokens.max() < 50


def test_with_data_peers_fetch_the_next_batch_before_the_backward_pass(monkeypatch):
    work, order = their_work(with_data=True), []

    def note(name, call, *arguments):
        order.append(name)
        return call(*arguments)

    for name in ("_forward", "_fetch", "_backward", "_update"):
        monkeypatch.setattr(work, name, functools.partial(note, name, getattr(work, name)))
    work.step()
    assert order == ["_forward", "_fetch", "_backward", "_update"]


def test_a_peers_batch_goes_to_cuda_from_pinned_memory(monkeypatch):
    torch = pytest.importorskip("torch")
    peers, calls = peers_module(), []

    def to(rows, device, non_blocking=False):
        calls.append((device, non_blocking))
        return rows

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: calls.append("pinned") or rows)
    monkeypatch.setattr(torch.Tensor, "to", to)
    peers.batches_from_file(CASE, "cuda")()
    assert calls == 2 * ["pinned", ("cuda", True)]
    calls.clear()
    peers.batches_from_file(CASE, "cpu")()
    assert calls == 2 * [("cpu", False)]


def test_a_compiled_peer_computes_what_this_project_computes(ours, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    theirs = show(their_work("torch_compile", num_layers=1), tmp_path)
    assert difference(ours(num_layers=1), theirs) is None
    assert list((tmp_path / "compiled").rglob("*.so"))  # inductor compiled it


def test_a_compiled_peer_has_a_cache_of_its_own_unless_the_user_has_set_one(tmp_path):
    peers_module()
    code = "import os; from gpt2.benchmark.peer_devices import use_empty_cache; use_empty_cache(); "
    code += "print(place := os.environ['TORCHINDUCTOR_CACHE_DIR'], os.path.isdir(place))"

    def cache(**variables):
        environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
        run = [sys.executable, "-c", code]
        return subprocess.check_output(run, text=True, env=environment | variables).split()

    place, is_there = cache(TMPDIR=str(tmp_path))
    assert Path(place).parent == tmp_path and is_there == "True"
    assert not list(tmp_path.iterdir())  # it is gone with its process
    mine = str(tmp_path / "mine")
    assert cache(TORCHINDUCTOR_CACHE_DIR=mine) == [mine, "False"]
