"""Data sets by name, from the Hugging Face hub and from TensorFlow Datasets."""

import dataclasses
import re
import socket
import struct
import sys
from collections.abc import Iterator
from functools import partial
from typing import IO, TYPE_CHECKING

from gpt2.config import DataConfig
from gpt2.data.interfaces import Corpus, Dataset
from gpt2.data.preparing.prepared_folder import prepared_revisions
from gpt2.data.preparing.text_corpus import TextCorpus
from gpt2.data.readers.text_files import read_parquet, split_field
from gpt2.data.source_files import SourceFiles
from gpt2.errors import UserError, first_line, log
from gpt2.utils.files import reading

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem
    from tensorflow_datasets.core import DatasetBuilder

_OFFLINE = "Check the names and the network, or use --config.data.corpus=pystdlib"
# The branch on which the hub stores its Parquet copy of a data set.
_PARQUET = "refs/convert/parquet"
_HUB_SECONDS = 10  # time limit for the hub's answer
# OWNER/NAME@REVISION/SUBSET. Some old data sets have no owner.
_HUB_NAME = re.compile(r"([^@/]+(?:/[^@/]+)?)(?:@([^/]*))?(?:/(.+))?")


@dataclasses.dataclass(frozen=True)
class HubCorpus(Corpus):
    """The training split of a dataset on the Hugging Face hub.

    It is streamed from the Parquet copy that the hub makes of each dataset.
    """

    repository: str  # OWNER/NAME
    revision: str  # a commit of the Parquet copy, or empty: the newest commit
    subset: str  # may be empty
    column: str

    def prepare(self, data: DataConfig) -> Dataset:
        """Return the tokens of the dataset at the revision `self.revision`.

        If the revision is empty, `_find_revision` chooses one.
        """
        name = f"{self.repository}/{self.subset}".rstrip("/")
        # The corpus is named without its revision, so that the names of all revisions' folders have
        # the same beginning, by which `prepared_revisions` finds them.
        data = dataclasses.replace(data, corpus=f"hf:{name}#{self.column}")
        open_source = partial(SourceFiles, list, "hf", name, self.column)
        revision = self.revision or self._find_revision(data, open_source())
        source = open_source(revision=revision)
        return TextCorpus(source, partial(self.documents, revision)).prepare(data)

    def _find_revision(self, data: DataConfig, source: SourceFiles) -> str:
        """Return the newest revision on the hub.

        If the hub does not answer, return the revision that was prepared last. If no revision was
        prepared, raise an error.
        """
        prepared = prepared_revisions(data, source)
        try:
            from huggingface_hub import HfApi

            with reading(data.corpus, _OFFLINE):
                info = HfApi().dataset_info(
                    self.repository, revision=_PARQUET, timeout=_HUB_SECONDS
                )
        except (UserError, ModuleNotFoundError) as error:
            if not prepared:
                raise
            reason = first_line(error.__cause__ or error)
            log(
                f"using the prepared revision {prepared[-1]} of {data.corpus}, because the newest "
                f"revision on the hub is unknown ({reason})",
                sys.stdout,
            )
            return prepared[-1]
        revision = str(info.sha)
        if prepared and revision not in prepared:
            log(
                f"{data.corpus} has a new revision on the hub, which is used; to use the prepared "
                f"revision, set data.corpus={with_revision(data.corpus, prepared[-1])}",
                sys.stdout,
            )
        return revision

    def documents(self, revision: str) -> Iterator[str]:
        """Yield the text in each row of a revision of the dataset."""
        from huggingface_hub import HfFileSystem

        with reading(f"hf:{self.repository}@{revision}", _OFFLINE):
            hub = HfFileSystem()
            folder = self._find_folder(hub, revision)
            for path in sorted(map(str, hub.ls(folder, detail=False))):
                yield from read_parquet(path, hub.open(path), self.column)

    def _find_folder(self, hub: "HfFileSystem", revision: str) -> str:
        """Return the path on the hub of the folder with the training split of `self.subset`.

        If `self.subset` is empty, use the only subset or, if there are several, `default`.
        """
        repository = self.repository
        subset = self.subset
        root = f"datasets/{repository}@{revision}"
        names = [str(path).rpartition("/")[2] for path in hub.ls(root, detail=False)]
        subsets = sorted(name for name in names if not name.startswith("."))
        if not subset:
            subset = subsets[0] if len(subsets) == 1 else "default"
        folder = f"{root}/{subset}/train"
        # For a large data set, the hub's copy may contain only the first 5 GB, in `partial-train`.
        if not hub.exists(folder):
            raise UserError(
                "The hub's Parquet copy of the data set has no training split, or only a part of "
                f"it, in {subset!r}; the subsets are {', '.join(subsets[:20])}",
                f"Choose a subset with hf:{repository}/SUBSET#{self.column}, or the data set's own"
                f" files with parquet:hf://datasets/{repository}/PATH/*.parquet#{self.column}",
            )
        return folder


def with_revision(corpus: str, revision: str) -> str:
    """Return `corpus`, such as `hf:OWNER/NAME/SUBSET#COLUMN`, with `@REVISION` after the name.

    If `corpus` already names a revision, it is replaced.
    """
    return re.sub(
        "(hf:[^@/#]+(?:/[^@/#]+)?)(?:@[^/#]+)?", rf"\g<1>@{revision}", corpus, count=1
    )


def _open_hugging_face(argument: str) -> HubCorpus:
    """Open the training split of a dataset on the Hugging Face hub.

    `argument` is `OWNER/NAME[@REVISION][/SUBSET]#COLUMN`.
    """
    name, column = split_field(argument)
    match = _HUB_NAME.fullmatch(name)
    repository, revision, subset = match.groups() if match else (name, None, None)
    if revision is not None and not re.fullmatch("[0-9a-f]{40}", revision):
        raise UserError(
            f"data.corpus=hf:{argument} has the revision {revision!r}, which is not a commit",
            f"Give the 40 digits of a commit of the branch {_PARQUET}, or no revision",
        )
    return HubCorpus(repository, revision or "", subset or "", column)


def _open_tfds(argument: str) -> TextCorpus:
    """Open the training split of a dataset in the TensorFlow Datasets catalogue.

    `argument` is `NAME#FEATURE`.
    """
    import tensorflow_datasets as tfds

    name, feature = split_field(argument)
    with reading(f"tfds:{argument}", _OFFLINE):
        builder = tfds.builder(name)

    def documents() -> Iterator[str]:
        with reading(f"tfds:{argument}", _OFFLINE):
            source = builder
            if not builder.is_prepared():
                source = tfds.builder(name, file_format="array_record")
                # Without a network, TFDS would retry for minutes.
                server = ("storage.googleapis.com", 443)
                socket.create_connection(server, timeout=5).close()
                source.download_and_prepare()
            num_read = 0
            for record in _read_tfds_records(source):
                yield record[feature].decode("utf-8")
                num_read += 1
            num_records = source.info.splits["train"].num_examples
            if num_read != num_records:
                raise EOFError(f"only {num_read:,} of {num_records:,} records exist")

    # The full name contains the version, which the argument may omit.
    source_files = SourceFiles(list, "tfds", builder.info.full_name, feature)
    return TextCorpus(source_files, documents)


def _read_tfds_records(builder: "DatasetBuilder") -> Iterator[dict]:
    """Yield the records of a dataset's training split. TFRecord files need no TensorFlow here."""
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
            raise ValueError("the checksum of a record's length is wrong")
        record = stream.read(length)
        crc = stream.read(4)
        if masked_crc32c(record) != int.from_bytes(crc, "little"):
            raise ValueError(
                "the checksum of a record is wrong, or the file is truncated"
            )
        yield record


READERS = {
    "hf:OWNER/NAME[@REVISION][/SUBSET]#COLUMN": _open_hugging_face,
    "tfds:NAME#FEATURE": _open_tfds,
}
