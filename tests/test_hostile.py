"""Hostile files are refused in one line: no code of theirs runs, no size of theirs is believed.

Each file comes with the command that would read it. A pickle that ran would make `witness`.
"""

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import peer
import pytest
from mistakes import copy_tree

from gpt2.hf.runs import import_run
from gpt2.hf.tokenizer import save_tokenizer
from tests.forks import Commands
from tests.helpers import TINY

SECONDS = 15
MEMORY = 200 * 2**20  # bytes beyond a program that only imports; each file asks for gigabytes


@pytest.fixture(scope="module")
def commands():
    with Commands() as commands:
        yield commands


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A folder with a model of Hugging Face's form, a run of its weights, and a text."""
    pristine = tmp_path_factory.mktemp("pristine")
    peer.write_model(pristine / "hf", "tied")
    save_tokenizer(pristine / "hf", peer.characters(131), 96)
    import_run(pristine / "hf", pristine / "run")
    (pristine / "in.txt").write_text("hello, world\n" * 500)
    return pristine


@pytest.fixture
def folder(pristine, tmp_path):
    return copy_tree(pristine, tmp_path / "folder")


class Attack:
    """Makes the file `witness` when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch witness",)


def torch_zip(pickled, compression=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
    return stream.getvalue()


def safetensors(header, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(shape, *offsets):
    return {"wte.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}


def shard(count, version=1):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, version, count
    return header.tobytes() + bytes(2000)


def tokenizer(tokens, **more):
    return json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": tokens} | more}).encode()


def config(**options):
    sizes = dict(vocab_size=131, n_positions=96, n_layer=2, n_head=4, n_embd=32)
    return json.dumps({"model_type": "gpt2"} | sizes | options).encode()


CODE = [
    ("pickle", pickle.dumps(Attack())),
    ("pickle in a dict", pickle.dumps({"wte.weight": Attack()})),
    ("old pickle", b"cposix\nsystem\n(S'touch witness'\ntR."),
    ("eval", b'cbuiltins\neval\n(S\'open("witness", "w")\'\ntR.'),
    ("zipped pickle", torch_zip(pickle.dumps({"a": Attack()}))),
    ("getattr", b"cbuiltins\ngetattr\n(cos\npath\nS'os'\ntR."),
]
IMPORT = ["gpt2.hf", "import", "--from=hf", "--workdir=new"]
GENERATE = ["gpt2.generate", "--workdir=run", "--prompt=a", "--max_new_tokens=1"]
CORPUS = ["train.py", *TINY, "--config.data.corpus="]
NAMED = [
    "train.py",
    *TINY,
    "--config.data.corpus=text:in.txt",
    "--config.data.tokenizer=named.json",
]
FILES = [
    *((f"weights: {name}", IMPORT, "hf/pytorch_model.bin", data) for name, data in CODE),
    *((f"tensors: {name}", IMPORT, "hf/model.safetensors", data) for name, data in CODE),
    *((f"config: {name}", ["eval.py", "--workdir=run"], "run/config.json", d) for name, d in CODE),
    *((f"scores: {name}", GENERATE, "run/checkpoints/0/layout/metadata", d) for name, d in CODE),
    *((f"tokenizer: {name}", NAMED, "named.json", data) for name, data in CODE),
    *(
        (f"tokens: {name}", [*CORPUS[:-1], CORPUS[-1] + "tokens:*.bin"], "a.bin", d)
        for name, d in CODE
    ),
    *(
        (f"column: {n}", [*CORPUS[:-1], CORPUS[-1] + "parquet:a.parquet#a"], "a.parquet", d)
        for n, d in CODE
    ),
    *(
        (f"trace: {name}", ["gpt2.profile", "a.xplane.pb"], "a.xplane.pb", data)
        for name, data in CODE
    ),
    ("header of 2**63", IMPORT, "hf/model.safetensors", safetensors(b"{}", 2**63)),
    ("header of -1", IMPORT, "hf/model.safetensors", safetensors(b"{}", 2**64 - 1)),
    ("header of 8 GiB", IMPORT, "hf/model.safetensors", safetensors(b"{}", 2**33)),
    ("tensor of 4 TiB", IMPORT, "hf/model.safetensors", safetensors(tensor([2**40], 0, 2**42))),
    ("tensor of 0 bytes", IMPORT, "hf/model.safetensors", safetensors(tensor([2**40], 0, 0))),
    ("tensor in the header", IMPORT, "hf/model.safetensors", safetensors(tensor([5], -20, 0))),
    ("bytes of 32 TiB", IMPORT, "hf/pytorch_model.bin", b"\x80\x04\x8e" + struct.pack("<Q", 2**45)),
    (
        "zip of zeros",
        IMPORT,
        "hf/pytorch_model.bin",
        torch_zip(bytes(2**31), zipfile.ZIP_DEFLATED),
    ),
    ("layers", IMPORT, "hf/config.json", config(n_layer=10**9)),
    ("width", IMPORT, "hf/config.json", config(n_embd=2**30)),
    ("positions", IMPORT, "hf/config.json", config(n_positions=2**31 - 1)),
    ("vocabulary", IMPORT, "hf/config.json", config(vocab_size=2**31 - 1)),
    ("id of 2**31", NAMED, "named.json", tokenizer({"a": 2**31 - 1, "b": 0}, merges=[])),
    ("id of -1", NAMED, "named.json", tokenizer({"a": -1}, merges=[])),
    ("merges of nothing", NAMED, "named.json", tokenizer({"a": 0}, merges=[["x", "y"]] * 1000)),
    ("digits", NAMED, "named.json", b'{"kind": ' + b"9" * 10**6 + b"}"),
    ("nested", NAMED, "named.json", b"[" * 10**6),
    *(
        (f"shard of {count}", [*CORPUS[:-1], CORPUS[-1] + "tokens:*.bin"], "a.bin", shard(count))
        for count in (2**31 - 1, -1, -(2**31), 0)
    ),
    (
        "run of layers",
        GENERATE,
        "run/config.json",
        b'{"seed": 0, "model": {"num_layers": 2147483647, "vocab_size": 131}, '
        b'"memory": {"scan_layers": true}}',
    ),
    (
        "run of width",
        GENERATE,
        "run/config.json",
        b'{"seed": 0, "model": {"embed_dim": 1073741824, "num_heads": 4, "vocab_size": 131}}',
    ),
    (
        "index outside",
        IMPORT,
        "hf/model.safetensors.index.json",
        b'{"weight_map": {"wte.weight": "../../../../etc/passwd"}}',
    ),
    (
        "index, absolute",
        IMPORT,
        "hf/model.safetensors.index.json",
        b'{"weight_map": {"wte.weight": "/etc/passwd"}}',
    ),
]
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "file", "data"),
    [file[1:] for file in FILES],
    ids=[name for name, *_ in FILES],
)
def test_a_hostile_file_is_a_line_and_nothing_of_it_runs(commands, folder, command, file, data):
    path = folder / file
    if path.name in WEIGHTS:
        (folder / "hf" / "model.safetensors").unlink()
    path.write_bytes(data)
    before = set(folder.rglob("*"))
    done = commands.run(*command, cwd=folder, seconds=SECONDS)
    assert (done.code, done.stderr.count("\n")) == (2, 1), done
    assert done.stderr.startswith("error: ")
    assert set(folder.rglob("*")) == before
    assert done.memory < MEMORY


def test_the_marker_shows_execution_and_the_measure_shows_memory(commands, folder, monkeypatch):
    monkeypatch.chdir(folder)
    pickle.loads(CODE[0][1])
    assert (folder / "witness").exists()
    text = "def get_config():\n    x = bytearray(b'1') * 2**29\n    raise ValueError(len(x))\n"
    Path("greedy.py").write_text(text)
    done = commands.run("train.py", "--config=greedy.py", cwd=folder)
    assert done.code == 2 and done.memory > 2**28
