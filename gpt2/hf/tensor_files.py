"""Tensors in files, read one at a time, without PyTorch.

Readers parse only a file's table of contents, and return where the numbers of each tensor lie.
Names and shapes can be checked before anything is read, and a model larger than half of the memory
can be converted. (The safetensors package maps the whole file, whose pages then count as used
memory, and writes from a second copy of all tensors.)

Formats: safetensors (https://github.com/huggingface/safetensors#format), and the files of
`torch.save`, both the zip archive and the older stream. A PyTorch file holds a pickle, which may
call anything. The unpickler here knows the names that tensors need and refuses all others.
"""

import collections
import dataclasses
import io
import json
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from gpt2.errors import MALFORMED, UserError

_SAFETENSORS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_TORCH = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_TORCH_STREAM_MAGIC = 0x1950A86A20F9469CFC6C


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor's numbers in a file.

    Attributes:
        offset: of the first number, in bytes.
        strides: in elements, as PyTorch counts them; row-major if None.

    Raises:
        ValueError: one of these is no whole number of at least 0, or there are too few strides.
    """

    path: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    def __post_init__(self):
        strides = self.shape if self.strides is None else self.strides
        numbers = (self.offset, *self.shape, *strides)
        if len(strides) != len(self.shape) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"no tensor lies at {self.offset} with shape {self.shape}")

    def read(self) -> np.ndarray:
        """Returns the tensor, in memory of its own."""
        flat = np.fromfile(self.path, self.dtype, self._span, offset=self.offset)
        if self.strides is None or not self._span:
            return flat.reshape(self.shape)
        strides = [stride * self.dtype.itemsize for stride in self.strides]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, self.shape, strides))

    @property
    def end(self) -> int:
        """The byte after the last number."""
        return self.offset + self._span * self.dtype.itemsize

    @property
    def _span(self) -> int:
        if self.strides is None or 0 in self.shape:
            return math.prod(self.shape)
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a .safetensors file by name.

    Raises:
        UserError: the file is cut short or is not in this format.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        start = 8 + length
        if start > path.stat().st_size:
            raise _damaged(path, "its header is cut short")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                dtype = np.dtype(_SAFETENSORS[entry["dtype"]])
                tensors[name] = StoredTensor(path, start + begin, dtype, tuple(entry["shape"]))
                if begin < 0:
                    raise ValueError(f"{name} begins before the first tensor")
                if tensors[name].end != start + end:
                    raise ValueError(f"{name} is of another size than its shape")
        except MALFORMED as error:
            raise _damaged(path, f"its header makes no sense: {error!r}") from None
    return _check_size(path, tensors)


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], get: Callable[[str], np.ndarray]
) -> None:
    """Writes float32 tensors. Only one of them needs to exist at a time.

    Args:
        path: the file to write.
        shapes: of every tensor, by name.
        get: returns the tensor of a name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # numbers start at a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, shape in shapes.items():
            np.ascontiguousarray(get(name), "<f4").reshape(shape).tofile(file)


def read_torch(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a state dict that `torch.save` wrote, by name. Runs no pickled code.

    Raises:
        UserError: the file is cut short, is not in this format, or asks for anything beyond
            tensors.
    """
    try:
        read = _read_torch_zip if zipfile.is_zipfile(path) else _read_torch_stream
        state, offsets = read(path)
        tensors = {
            str(name): StoredTensor(
                path,
                offsets[tensor.storage.key] + tensor.offset * tensor.storage.dtype.itemsize,
                tensor.storage.dtype,
                tensor.shape,
                tensor.strides,
            )
            for name, tensor in state.items()
            if isinstance(tensor, _TorchTensor)
        }
    except (pickle.UnpicklingError, zipfile.BadZipFile, EOFError, struct.error) as error:
        raise _damaged(path, f"{error}" or "it ends early") from None
    except Exception as error:  # numbers of a pickle may be of any size and type
        raise _damaged(path, f"it holds no state dict: {error!r}") from None
    return _check_size(path, tensors)


def _read_torch_zip(path: Path) -> tuple[dict, dict[str, int]]:
    """PyTorch 1.6 and later: an archive with a pickle and one uncompressed file a storage."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        if archive.getinfo(pickled).compress_type != zipfile.ZIP_STORED:  # it may be of any size
            raise zipfile.BadZipFile(f"{pickled} is compressed")
        state = _StateDictUnpickler(io.BytesIO(archive.read(pickled))).load()
        folder = pickled.removesuffix("data.pkl") + "data/"
        offsets = {}
        for info in archive.infolist():
            if info.filename.startswith(folder):
                if info.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"{info.filename} is compressed")
                file.seek(info.header_offset + 26)  # lengths of the name and the extra field
                offsets[info.filename.removeprefix(folder)] = (
                    info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
                )
    return state, offsets


def _read_torch_stream(path: Path) -> tuple[dict, dict[str, int]]:
    """Before PyTorch 1.6: pickles one after the other, then each storage after its length."""
    with path.open("rb") as file:
        if _StateDictUnpickler(file).load() != _TORCH_STREAM_MAGIC:
            raise pickle.UnpicklingError("PyTorch did not write it")
        for _ in ("protocol version", "system"):
            _StateDictUnpickler(file).load()
        unpickler = _StateDictUnpickler(file)
        state = unpickler.load()
        offsets = {}
        for key in _StateDictUnpickler(file).load():
            (length,) = struct.unpack("<q", file.read(8))
            offsets[key] = file.tell()
            file.seek(length * unpickler.storages[key].dtype.itemsize, io.SEEK_CUR)
    return state, offsets


@dataclasses.dataclass(frozen=True)
class _TorchStorage:
    key: str
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class _TorchTensor:
    storage: _TorchStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage, offset, shape, strides, *_):
    return _TorchTensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor, *_):
    return tensor


class _StateDictUnpickler(pickle.Unpickler):
    """Builds `_TorchTensor`s and plain containers; any other name is an error."""

    names = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    } | {("torch", name): np.dtype(dtype) for name, dtype in _TORCH.items()}

    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self._file = file
        self.storages: dict[str, _TorchStorage] = {}

    def load(self) -> Any:
        """Reads one pickle, unless it names more places than it has bytes.

        The unpickler makes room for as many places as the highest has a number.
        """
        start = self._file.tell()
        for code, place, position in pickletools.genops(self._file):
            if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(place or 0) > (position or 0):
                raise pickle.UnpicklingError(f"it names place {place} at byte {position}")
        self._file.seek(start)
        return super().load()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no tensor needs")
        return self.names[module, name]

    def persistent_load(self, pid: tuple) -> _TorchStorage:
        _, dtype, key, *_ = pid
        return self.storages.setdefault(key, _TorchStorage(key, dtype))


def _check_size(path: Path, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    for name, tensor in tensors.items():
        if tensor.end > size:
            raise _damaged(path, f"{name} should end at byte {tensor.end} of {size}")
    return tensors


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} cannot be read: {why}", "Copy or download it again")
