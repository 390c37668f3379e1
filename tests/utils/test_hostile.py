"""Hostile files end a command with one line: their code does not run, their sizes allocate nothing.

Each file stands next to the command that reads it. A pickle that is executed creates `witness`.
"""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import peer
import pytest

from gpt2.hf.tokenizer_files import save_tokenizer
from gpt2.hf.weights import import_run
from tests.forks import run_command
from tests.helpers import TINY

SECONDS = 15
# Bytes more than a program that only imports. The headers of the files declare gigabytes.
MEMORY = 200 * 2**20


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Create a folder with a model in Hugging Face's format, a run of its weights, and a text."""
    pristine = tmp_path_factory.mktemp("pristine")
    peer.write_model(pristine / "hf", "tied")
    save_tokenizer(pristine / "hf", peer.characters(131), 96)
    import_run(pristine / "hf", pristine / "run")
    (pristine / "in.txt").write_text("hello, world\n" * 500)
    return pristine


@pytest.fixture
def folder(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "folder"))


class Attack:
    """An object that creates the file `witness` when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch witness",)


def torch_zip(pickled):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return stream.getvalue()


def safetensors(header, length=None):
    return struct.pack("<Q", length or len(header)) + header


def tensor(size, start, stop):
    entry = {"dtype": "F32", "shape": [size], "data_offsets": [start, stop]}
    return safetensors(json.dumps({"wte.weight": entry}).encode())


def shard(count):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, count
    return header.tobytes() + bytes(2000)


def tokenizer(tokens, merges=()):
    model = {"type": "BPE", "vocab": tokens, "merges": merges}
    return json.dumps({"version": "1.0", "model": model}).encode()


def index(file):
    return json.dumps({"weight_map": {"wte.weight": file}}).encode()


TOKENIZERS = {
    "id of 2**31": tokenizer({"a": 2**31 - 1, "b": 0}),
    "id of -1": tokenizer({"a": -1}),
    "merges of nothing": tokenizer({"a": 0}, [["x", "y"]] * 1000),
}
CODE = {
    "pickle": pickle.dumps({"wte.weight": Attack()}),
    "old pickle": b"cposix\nsystem\n(S'touch witness'\ntR.",
    "eval": b'cbuiltins\neval\n(S\'open("witness", "w")\'\ntR.',
    "zipped pickle": torch_zip(pickle.dumps({"a": Attack()})),
}
IMPORT = ["gpt2.hf", "import", "--from=hf", "--workdir=new"]
GENERATE = ["gpt2.generate", "--workdir=run", "--prompt=a", "--max_new_tokens=1"]
TRAIN = ["train.py", *TINY]
TOKENS = [*TRAIN, "--config.data.corpus=tokens:*.bin"]
COLUMN = [*TRAIN, "--config.data.corpus=parquet:a.parquet#a"]
NAMED = [*TRAIN, "--config.data.corpus=text:in.txt"]
NAMED += ["--config.data.tokenizer=named.json"]
READERS = [
    (IMPORT, "hf/model.safetensors"),
    (["eval.py", "--workdir=run"], "run/config.json"),
    (GENERATE, "run/checkpoints/0/layout/metadata"),
    (NAMED, "named.json"),
    (TOKENS, "a.bin"),
    (COLUMN, "a.parquet"),
    (["gpt2.lab.profile", "a.xplane.pb"], "a.xplane.pb"),
]
LAYERS = json.dumps({"model_type": "gpt2", "n_layer": 10**9}).encode()
WEIGHTS = "hf/model.safetensors"
INDEX = "hf/model.safetensors.index.json"
FILES = {
    "header of 2**63": (IMPORT, WEIGHTS, safetensors(b"{}", 2**63)),
    "header of 8 GiB": (IMPORT, WEIGHTS, safetensors(b"{}", 2**33)),
    "tensor of 4 TiB": (IMPORT, WEIGHTS, tensor(2**40, 0, 2**42)),
    "tensor of 0 bytes": (IMPORT, WEIGHTS, tensor(2**40, 0, 0)),
    "tensor in the header": (IMPORT, WEIGHTS, tensor(5, -20, 0)),
    "index outside": (IMPORT, INDEX, index("../../../../etc/passwd")),
    "index, absolute": (IMPORT, INDEX, index("/etc/passwd")),
    "layers of 10**9": (IMPORT, "hf/config.json", LAYERS),
    "record of a store": (GENERATE, "run/.store.json", b"[]"),
    "nested": (NAMED, "named.json", b"[" * 10**6),
}
for reader, path in READERS:
    for kind, content in CODE.items():
        FILES[f"{path}: {kind}"] = (reader, path, content)
for kind, content in TOKENIZERS.items():
    FILES[kind] = (NAMED, "named.json", content)
for number in (2**31 - 1, -1, 0):
    FILES[f"shard of {number}"] = (TOKENS, "a.bin", shard(number))


@pytest.mark.thorough
@pytest.mark.parametrize(("command", "file", "data"), FILES.values(), ids=FILES)
def test_a_hostile_file_ends_with_one_line_and_is_not_executed(
    folder, command, file, data
):
    path = folder / file
    if path.name.startswith("model.safetensors"):
        (folder / "hf" / "model.safetensors").unlink()
    path.write_bytes(data)
    before = set(folder.rglob("*"))
    done = run_command(*command, cwd=folder, seconds=SECONDS)
    assert done.code == 2, done
    assert done.stderr.count("\n") == 1, done
    assert done.stderr.startswith("error: ")
    assert set(folder.rglob("*")) == before
    assert done.memory < MEMORY


GREEDY = """
def get_config():
    x = bytearray(b"1") * 2**29
    raise ValueError(len(x))
"""


@pytest.mark.thorough
def test_the_marker_shows_execution_and_the_measure_shows_memory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    pickle.loads(CODE["pickle"])
    assert (folder / "witness").exists()
    Path("greedy.py").write_text(GREEDY)
    done = run_command("train.py", "--config=greedy.py", cwd=folder)
    assert done.code == 2
    assert done.memory > 2**28
