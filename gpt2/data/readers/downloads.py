"""Data sets by name, from the Hugging Face hub and from TensorFlow Datasets."""

import socket
import struct
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from gpt2.data.preparing.text_corpus import TextCorpus
from gpt2.data.readers.text_files import read_parquet, split_field
from gpt2.data.source_files import SourceFiles
from gpt2.errors import UserError
from gpt2.utils.files import reading

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem
    from tensorflow_datasets.core import DatasetBuilder

_OFFLINE = "Check the name and the network, or use --config.data.corpus=pystdlib"


def _open_hugging_face(argument: str) -> TextCorpus:
    """Open the training split of a data set, which is streamed from the hub's Parquet copy."""
    name, column = split_field(argument)

    def documents() -> Iterator[str]:
        from huggingface_hub import HfFileSystem

        with reading(f"hf:{name}", _OFFLINE):
            hub = HfFileSystem()
            folder = _find_hub_folder(hub, name, column)
            for path in sorted(map(str, hub.ls(folder, detail=False))):
                yield from read_parquet(path, hub.open(path), column)

    return TextCorpus(SourceFiles(list, "hf", name, column), documents)


def _find_hub_folder(hub: "HfFileSystem", name: str, column: str) -> str:
    """Return the folder of the training split of OWNER/NAME or OWNER/NAME/SUBSET."""
    parts = name.split("/")
    repository = "/".join(parts[:2])
    subset = "/".join(parts[2:])
    root = f"datasets/{repository}@refs/convert/parquet"
    names = [str(path).rpartition("/")[2] for path in hub.ls(root, detail=False)]
    subsets = sorted(name for name in names if not name.startswith("."))
    if not subset:
        subset = subsets[0] if len(subsets) == 1 else "default"
    folder = f"{root}/{subset}/train"
    # For a large data set, the hub's copy may contain only the first 5 GB, in `partial-train`.
    if not hub.exists(folder):
        raise UserError(
            f"The hub's Parquet copy of {repository} has no complete training split in "
            f"{subset!r}; its subsets are {', '.join(subsets[:20])}",
            f"Choose a subset with hf:{repository}/SUBSET#{column}, or the data set's own files "
            f"with parquet:hf://datasets/{repository}/PATH/*.parquet#{column}",
        )
    return folder


def _open_tfds(argument: str) -> TextCorpus:
    """Open the training split of a data set from the TensorFlow Datasets catalogue."""
    name, feature = split_field(argument)

    def documents() -> Iterator[str]:
        import tensorflow_datasets as tfds

        with reading(f"tfds:{argument}", _OFFLINE):
            builder = tfds.builder(name)
            if not builder.is_prepared():
                builder = tfds.builder(name, file_format="array_record")
                # Without a network, TFDS would retry for minutes.
                server = ("storage.googleapis.com", 443)
                socket.create_connection(server, timeout=5).close()
                builder.download_and_prepare()
            num_read = 0
            for record in _read_tfds_records(builder):
                yield record[feature].decode("utf-8")
                num_read += 1
            num_records = builder.info.splits["train"].num_examples
            if num_read != num_records:
                raise EOFError(f"only {num_read:,} of {num_records:,} records exist")

    return TextCorpus(SourceFiles(list, "tfds", name, feature), documents)


def _read_tfds_records(builder: "DatasetBuilder") -> Iterator[dict]:
    """Yield the records of a training split. TFRecord files are read without TensorFlow."""
    if builder.info.file_format.value != "tfrecord":
        yield from builder.as_data_source(split="train")
        return
    for path in builder.info.splits["train"].filepaths:
        with reading(path, "Download it again"), open(path, "rb") as stream:
            for record in read_tfrecords(stream):
                yield builder.info.features.deserialize_example_np(record)


def read_tfrecords(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of each record of a TFRecord file.

    A record consists of the length, a CRC of the length, the content, and a CRC of the content.
    """
    from tensorboardX.record_writer import masked_crc32c

    while head := stream.read(12):
        length, length_crc = struct.unpack("<QI", head)
        if masked_crc32c(head[:8]) != length_crc:
            raise ValueError("the length of a record was altered")
        record = stream.read(length)
        crc = stream.read(4)
        if masked_crc32c(record) != int.from_bytes(crc, "little"):
            raise ValueError("a record was altered or truncated")
        yield record


READERS = {
    "hf:OWNER/NAME[/SUBSET]#COLUMN": _open_hugging_face,
    "tfds:NAME#FEATURE": _open_tfds,
}
