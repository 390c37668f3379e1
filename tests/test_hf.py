import os
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import peer
import pytest

from gpt2 import hf
from gpt2.config import GPTConfig
from gpt2.data.tokenizer import CharTokenizer
from gpt2.errors import UserError
from gpt2.hf import __main__ as hf_command
from gpt2.hf.runs import import_run
from gpt2.hf.tensor_files import read_safetensors, read_torch, write_safetensors
from gpt2.hf.tokenizer import save_tokenizer
from gpt2.model import GPT
from gpt2.utils.scan import stack_layers
from gpt2.weights import load_initial_params, load_model


def test_import_command_makes_a_run_that_exports_the_same_bits(tmp_path):
    source, run = peer.write_model(tmp_path / "source", "tied"), tmp_path / "run"
    save_tokenizer(source, peer.characters(131), 96)
    import_run(source, run)
    cfg, params, loaded = load_model(run, None)
    assert loaded.encode("efg").tolist() == [1, 2, 3]
    chex.assert_trees_all_equal(params, hf.load(source)[1])
    hf.save(tmp_path / "copy", cfg, params, loaded)
    weights = "model.safetensors"
    assert (tmp_path / "copy" / weights).read_bytes() == (source / weights).read_bytes()


def test_import_prints_what_the_run_is_and_the_commands_that_take_it(tmp_path, capsys):
    source, run = peer.write_model(tmp_path / "source", "tied"), tmp_path / "my run"
    save_tokenizer(source, peer.characters(131), 96)
    hf_command._import(source, run)
    init = f"--config={run}/config.json", f"--config.train.init_from=run:{run}"
    assert capsys.readouterr().out.splitlines() == [
        f"{run}: 2 layers, 32 wide",
        "to score:",
        f"  python eval.py '--workdir={run}' --corpus=text:FILE",
        "to sample:",
        f"  python -m gpt2.generate '--workdir={run}' --prompt=TEXT",
        "to train on:",
        f"  python train.py '{init[0]}' '{init[1]}' --config.data.corpus=text:FILE --workdir=DIR",
    ]


def test_shards_and_names_without_prefix_load_the_same(tmp_path):
    directory = peer.write_model(tmp_path, "untied")
    expected = hf.load(directory)
    peer.rewrite(directory, lambda name: name.removeprefix("transformer."), shards=3)
    chex.assert_trees_all_equal(hf.load(directory), expected)


def test_masks_and_a_copy_of_the_tied_head_are_passed_over(tmp_path):
    directory = peer.write_model(tmp_path, "tied")
    expected = hf.load(directory)
    stored = read_safetensors(directory / "model.safetensors")
    arrays = {name: tensor.read() for name, tensor in stored.items()}
    arrays["transformer.h.0.attn.bias"] = np.ones((1, 1, 4, 4))
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"]
    shapes = {name: array.shape for name, array in arrays.items()}
    write_safetensors(directory / "model.safetensors", shapes, arrays.__getitem__)
    chex.assert_trees_all_equal(hf.load(directory), expected)
    arrays["lm_head.weight"] = arrays["lm_head.weight"] + 1
    write_safetensors(directory / "model.safetensors", shapes, arrays.__getitem__)
    with pytest.raises(UserError, match=r"lm_head.weight is not transformer.wte.weight"):
        hf.load(directory)


@pytest.mark.parametrize("options", [{}, dict(position="rope", parallel_block=True)])
def test_scanned_and_biasless_models_export_the_same_function(options, tmp_path):
    size = dict(vocab_size=17, context_length=16, num_layers=2, num_heads=2, embed_dim=8)
    cfg = GPTConfig(**size, **options, bias=False)
    ids = np.arange(8)[None]
    params = jax.jit(GPT(cfg).init)(jax.random.key(0), ids)["params"]
    hf.save(tmp_path / "unrolled", cfg, params)
    scanned = GPTConfig(**{**vars(cfg), "scan_layers": True})
    hf.save(tmp_path / "scanned", scanned, stack_layers(params))
    chex.assert_trees_all_equal(hf.load(tmp_path / "unrolled"), hf.load(tmp_path / "scanned"))
    loaded_cfg, loaded = hf.load(tmp_path / "unrolled")
    chex.assert_trees_all_close(
        GPT(loaded_cfg).apply({"params": loaded}, ids),
        GPT(cfg).apply({"params": params}, ids),
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("norm", "rmsnorm"),
        ("position", "rope"),
        ("qk_norm", True),
        ("logit_softcap", 30.0),
        ("activation", "swiglu"),
    ],
)
def test_export_names_the_option_that_gpt2_lacks(option, value, tmp_path):
    cfg = GPTConfig(num_layers=1, **{option: value})
    with pytest.raises(UserError, match=rf"no option for model\.{option}={value}"):
        hf.save(tmp_path / "out", cfg, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["zip.bin", "stream.bin"])
def test_pytorch_files_are_read_without_pytorch(file):
    stored = read_torch(peer.GOLDEN / file)
    arrays = {name: tensor.read() for name, tensor in stored.items()}
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(arrays["plain"], grid)
    np.testing.assert_array_equal(arrays["transposed"], grid.T)
    np.testing.assert_array_equal(arrays["narrow"], [4, 5, 6, 7])
    assert arrays["bfloat16"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(arrays["bfloat16"].astype(np.float32), [1.5, -2.0])
    np.testing.assert_array_equal(arrays["mask"], [True, False])


def test_nothing_that_exists_is_overwritten(tmp_path):
    cfg, params = hf.load(peer.write_model(tmp_path / "source", "tied"))
    with pytest.raises(UserError, match="exists already"):
        hf.save(tmp_path / "source", cfg, params)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_run_starts_from_imported_weights_in_its_own_layout(scan_layers, tmp_path):
    cfg, params = hf.load(peer.write_model(tmp_path, "tied"))
    shorter = GPTConfig(**{**vars(cfg), "context_length": 40, "scan_layers": scan_layers})
    ids = peer.tokens("tied")[:, :40]
    tokenizer, other = (
        CharTokenizer("".join(map(chr, range(start, start + 131))), False) for start in (100, 101)
    )
    save_tokenizer(tmp_path, tokenizer, 96)
    initial = load_initial_params(f"hf:{tmp_path}", shorter, tokenizer)
    expected = GPT(cfg).apply({"params": params}, ids)
    chex.assert_trees_all_close(
        GPT(shorter).apply({"params": initial}, ids), expected, atol=1e-5, rtol=1e-5
    )
    with pytest.raises(
        UserError, match=rf"another tokenizer.*char, 131.*tokenizer={tmp_path}/tokenizer\.json"
    ):
        load_initial_params(f"hf:{tmp_path}", shorter, other)


def test_weights_of_another_model_are_refused_unread_with_every_flag_that_differs(tmp_path):
    cfg = hf.load(peer.write_model(tmp_path, "tied"))[0]
    tokenizer = CharTokenizer("".join(map(chr, range(100, 231))), False)
    save_tokenizer(tmp_path, tokenizer, 96)
    (tmp_path / "model.safetensors").unlink()
    wanted = dict(num_layers=4, embed_dim=64, bias=False, context_length=128, dropout=0.1)
    with pytest.raises(
        UserError,
        match=r"model\.num_layers=2, not 4, model\.embed_dim=32, not 64, model\.bias=True, "
        r"not False, model\.context_length=96, not 128\. Use --config\.model\.num_layers=2 "
        r"--config\.model\.embed_dim=32 --config\.model\.bias=True "
        r"--config\.model\.context_length=96\.$",
    ):
        load_initial_params(f"hf:{tmp_path}", GPTConfig(**{**vars(cfg), **wanted}), tokenizer)


def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    """A fresh process, whose peak is its own: 45 million parameters, 180 MB."""
    config = dict(n_layer=1, n_head=4, n_embd=1280, n_positions=64, vocab_size=20000)
    peer.CONFIGS["wide"] = config
    directory = peer.write_model(tmp_path / "wide", "wide")
    program = (
        "import re; from gpt2 import hf; import jax; jax.devices();"
        "status = lambda: open('/proc/self/status').read();"
        "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s*(\\d+)', status())[1]);"
        f"before = peak(); hf.load({str(directory)!r}); print(peak() - before)"
    )
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))
    grown = int(subprocess.check_output([sys.executable, "-c", program], env=env, text=True))
    size = (directory / "model.safetensors").stat().st_size
    shutil.rmtree(directory)
    assert 0.8 * size < grown < 1.3 * size


def test_the_library_brings_no_command_line_and_the_command_has_a_usage():
    root = Path(__file__).parents[1]
    code = "import sys; from gpt2 import hf; print('gpt2.cli' in sys.modules)"
    library = subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True)
    assert library == "False\n"
    command = [sys.executable, "-m", "gpt2.hf"]
    usage = subprocess.run([*command, "--help"], cwd=root, capture_output=True, text=True)
    assert "gpt2.hf import --from=DIR" in usage.stdout and not usage.stderr
    unknown = subprocess.run([*command, "exprot"], cwd=root, capture_output=True, text=True)
    assert unknown.returncode == 2 and "not a command" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("export --workdir=run --to=README.md/out", "nothing can be written in"),
        ("import --from=DIR --workdir=README.md/out", "nothing can be written in"),
        ("export --workdir=run --to=out --from=DIR", "--from would be ignored"),
        ("import --from=DIR --workdir=out --checkpoint=5", "--checkpoint would be ignored"),
    ],
)
def test_the_command_refuses_flags_and_places_before_it_reads_weights(arguments, told):
    command = [sys.executable, "-m", "gpt2.hf", *arguments.split()]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and told in done.stderr
