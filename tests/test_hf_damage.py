"""Damaged and hostile directories of Hugging Face's form are a line that names the fault."""

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import peer
import pytest

from gpt2.data.tokenizer import ByteTokenizer
from gpt2.errors import UserError
from gpt2.hf.config import read_config
from gpt2.hf.runs import import_run
from gpt2.hf.tensor_files import read_safetensors, read_torch
from gpt2.hf.tokenizer import save_tokenizer


class Attack:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return Path.touch, (self.witness,)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pytorch_file_is_refused_and_not_run(zipped, tmp_path):
    witness, file = tmp_path / "witness", tmp_path / "pytorch_model.bin"
    if zipped:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"a": Attack(witness)}))
    else:
        file.write_bytes(pickle.dumps(Attack(witness)))
    with pytest.raises(UserError, match="which no tensor needs"):
        read_torch(file)
    assert not witness.exists()
    pickle.loads(pickle.dumps(Attack(witness)))
    assert witness.exists()  # so the refusal meant something


def break_truncated(source):
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def break_header(source):
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])


def with_config(**changes):
    def change(source):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | changes))

    return change


def write_number(value):
    def change(source):
        path = source / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-4:] = np.float32(value).tobytes()
        path.write_bytes(data)

    return change


def write_index(content):
    def change(source):
        (source / "model.safetensors").rename(source.parent / "elsewhere")
        (source / "model.safetensors.index.json").write_bytes(content)

    return change


def break_shard(source):
    peer.rewrite(source, lambda name: name, shards=3)
    (source / "model-1.safetensors").unlink()


def break_tokenizer(source):
    save_tokenizer(source, ByteTokenizer(), 96)


def break_tokenizer_with_fewer(source):
    save_tokenizer(source, peer.characters(100), 96)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_truncated, "should end at byte"),
        (break_header, "its header is cut short"),
        (
            with_config(n_embd=64),
            r"wte.weight has shape \[131, 32\], and config.json asks for \[131, 64\]",
        ),
        (with_config(n_layer=3), "h.2.ln_1.weight is missing"),
        (
            with_config(scale_attn_weights=False),
            "scale_attn_weights=False is not what GPT-2 computes",
        ),
        (with_config(n_layer=10**9), r"describes no model: model\.num_layers=.* is above 1000"),
        (write_number(np.nan), r"source: ln_f/bias holds numbers that are not finite\. Download"),
        (write_number(-np.inf), "holds numbers that are not finite"),
        (write_index(b'{"weight_map": {"a": "../elsewhere"}}'), "is not an index.*no file beside"),
        (write_index(b'{"weight_map": {"a": 5}}'), "is not an index of shards: TypeError"),
        (write_index(b'{"weight_map": {"a": ["b"]}}'), "is not an index of shards: TypeError"),
        (write_index(b'{"weight_map": ["a"]}'), "is not an index of shards: AttributeError"),
        (write_index(b"[1]"), "is not an index of shards: TypeError"),
        (write_index(b"\xff\xfe\x00"), "is not an index of shards: UnicodeDecodeError"),
        (write_index(b"[" * 10**5), "is not an index of shards: RecursionError"),
        (break_shard, "model-1.safetensors is missing"),
        (break_tokenizer, "has 257 tokens, and the model has 131"),
        (break_tokenizer_with_fewer, "has 100 tokens, and the model has 131"),
    ],
)
def test_damaged_directories_are_told_and_nothing_is_written(damage, message, tmp_path):
    source, workdir = peer.write_model(tmp_path / "source", "tied"), tmp_path / "run"
    save_tokenizer(source, peer.characters(131), 96)
    damage(source)
    with pytest.raises(UserError, match=message) as raised:
        import_run(source, workdir)
    assert "\n" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} - {"elsewhere"} == {"source"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(n_embd=0), r"config\.json describes no model: model\.embed_dim=0 is below 1\. Down"),
        (
            dict(n_head=7),
            r"describes no model: model\.embed_dim=32 is not a multiple of .*=7\. Down",
        ),
        (dict(n_layer=-1), r"describes no model: model\.num_layers=-1 is below 1\. Download"),
        (dict(vocab_size=0), r"describes no model: model\.vocab_size=0 is below 1\. Download"),
        (dict(layer_norm_epsilon=0), r"describes no model: model\.norm_eps=0\.0 is not above"),
        (dict(layer_norm_epsilon="a"), "layer_norm_epsilon='a' is not of type float"),
        (dict(layer_norm_epsilon=10**400), "is not a GPT-2 config: OverflowError"),
        (dict(n_layer=2.0), r"n_layer=2\.0 is not of type int"),
        (dict(n_embd=True), "n_embd=True is not of type int"),
        (dict(tie_word_embeddings="no"), "tie_word_embeddings='no' is not of type bool"),
        (dict(tie_word_embeddings=5), "tie_word_embeddings=5 is not of type bool"),
        (b"[1]", "is not a Hugging Face config: AttributeError"),
        (b"\xff\xfe\x00", "is not a Hugging Face config: UnicodeDecodeError"),
        (b"[" * 10**5, "is not a Hugging Face config: RecursionError"),
    ],
    ids=range(14),
)
def test_a_broken_config_is_named_and_no_option_of_a_run_is_advised(changes, message, tmp_path):
    size = dict(vocab_size=131, n_positions=96, n_layer=2, n_head=4, n_embd=32)
    config = {"model_type": "gpt2"} | size
    text = changes if isinstance(changes, bytes) else json.dumps(config | changes).encode()
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=message) as raised:
        read_config(tmp_path)
    assert "--config" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "entry",
    [
        dict(data_offsets=[-100, -92]),  # within the header
        dict(data_offsets=[0.0, 8.0]),
        dict(shape=[2.0]),
        dict(shape=[-2, -1]),
        dict(shape=[True, 2]),
        dict(shape="ab"),
        dict(shape=[10**30], data_offsets=[0, 4 * 10**30]),
    ],
    ids=str,
)
def test_tensors_lie_in_the_file_behind_its_header(entry, tmp_path):
    path = tmp_path / "model.safetensors"

    def read(**changed):
        tensor = dict(dtype="F32", shape=[2], data_offsets=[0, 8]) | changed
        header = json.dumps({"__metadata__": {"x": "y" * 200}, "a": tensor}).encode()
        numbers = np.arange(2, dtype=np.float32).tobytes()
        path.write_bytes(struct.pack("<Q", len(header)) + header + numbers)
        return read_safetensors(path)["a"].read()

    assert read().tolist() == [0, 1]
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read: "):
        read(**entry)


def test_a_header_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5)
    with pytest.raises(UserError, match="header makes no sense: RecursionError"):
        read_safetensors(path)


STORAGE = object()  # torch names it by a tuple, which `TorchPickler` writes


class Rebuilt:
    """Pickles as torch's tensors do, with whatever shape and strides."""

    def __init__(self, shape, strides):
        self.geometry = shape, strides

    def __reduce__(self):
        return _rebuild_tensor_v2, (STORAGE, 0, *self.geometry)


def _rebuild_tensor_v2(*_):
    """Stands for torch's function of this name."""


class TorchPickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", float, "0", "cpu", 4) if value is STORAGE else None


def pickled_tensor(shape, strides):
    """The pickle of a state dict of one tensor, as torch.save writes it."""
    stream = io.BytesIO()
    TorchPickler(stream, 2).dump({"a": Rebuilt(shape, strides)})
    name = f"c{__name__}\n_rebuild_tensor_v2\n".encode()
    assert name in stream.getvalue()
    return (
        stream.getvalue()
        .replace(name, b"ctorch._utils\n_rebuild_tensor_v2\n")
        .replace(b"c__builtin__\nfloat\n", b"ctorch\nFloatStorage\n")
    )


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04\x8e" + struct.pack("<Q", 2**45),  # bytes of 32 TiB
        b"\x80\x04\x8e" + struct.pack("<Q", 2**64 - 1),
        b"\x80\x04\x95" + struct.pack("<Q", 2**45),  # a frame
        b"\x80\x05\x96" + struct.pack("<Q", 2**45),  # a byte array
        b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".",  # room for so many places
        pickled_tensor((2.0, 2), (2, 1)),
        pickled_tensor((2, -2), (2, 1)),
        pickled_tensor((2, 2), (1,)),
        pickled_tensor((2, 2), (10**30, 1)),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("zipped", [True, False])
def test_sizes_of_a_pickle_beyond_the_file_are_refused(pickled, zipped, tmp_path):
    def read(pickled):
        path = tmp_path / "pytorch_model.bin"
        if zipped:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/data.pkl", pickled)
                archive.writestr("archive/data/0", np.arange(4, dtype=np.float32).tobytes())
        else:
            before = [0x1950A86A20F9469CFC6C, 1001, {}]
            numbers = struct.pack("<q", 4) + np.arange(4, dtype=np.float32).tobytes()
            start = b"".join(map(pickle.dumps, before))
            path.write_bytes(start + pickled + pickle.dumps(["0"]) + numbers)
        return read_torch(path)["a"].read().tolist()

    assert read(pickled_tensor((2, 2), (1, 2))) == [[0, 2], [1, 3]]
    with pytest.raises(UserError, match=r"pytorch_model\.bin cannot be read: "):
        read(pickled)
