"""Documents from libraries and servers. A server out of reach is an error within seconds."""

import http.client
import json
import os
import shutil
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from gpt2.errors import UserError

T = TypeVar("T")

ANSWER_SECONDS = 5.0
TRAIN_WITHOUT = (
    "To train on text that this machine has, without a network, add --config.data.corpus=pystdlib"
)


def parquet_column(file: Path, column: str) -> Iterator[str]:
    """Yields one string column of a Parquet file, a row group at a time.

    Raises:
        UserError: the file cannot be read or lacks the column.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Reading Parquet needs pyarrow", "Run pip install pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
        if column not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise UserError(
                f"{file} has no column {column!r}", f"Choose another after '#', one of: {names}"
            )
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise UserError(
                        f"The column {column!r} of {file} holds no text",
                        "Choose another column after '#'",
                    )
                yield text
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{file} cannot be read ({error})", "Give Parquet files") from error


def hugging_face(name: str, column: str) -> Iterator[str]:
    """Yields the training split of a public data set, from the hub's Parquet copy of it.

    Reads one file at a time, in the hub's order, through a temporary file. `HF_ENDPOINT` names
    another server than https://huggingface.co.

    Raises:
        UserError: the hub cannot be reached or has no such data set.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    listing = f"{endpoint}/api/datasets/{name}/parquet"
    try:
        subsets = _within_seconds(lambda: json.load(urllib.request.urlopen(listing)))
    except urllib.error.HTTPError as error:
        raise UserError(
            f"{endpoint} does not give hf:{name} (HTTP {error.code})",
            f"Check the name. {TRAIN_WITHOUT}",
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(
            f"hf:{name} is neither prepared nor reachable at {endpoint} ({error})", TRAIN_WITHOUT
        ) from error
    splits: dict[str, list[str]] = subsets.get("default") or next(iter(subsets.values()), {})
    if "train" not in splits:
        raise UserError(f"hf:{name} has no training split on the hub", TRAIN_WITHOUT)
    for url in splits["train"]:
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            try:
                with urllib.request.urlopen(url, timeout=60) as reply:
                    shutil.copyfileobj(reply, file)
            except (OSError, http.client.HTTPException) as error:
                raise UserError(
                    f"The download of {url} broke off ({error})", "Run the same command again"
                ) from error
            file.flush()
            yield from parquet_column(Path(file.name), column)


def tensorflow_datasets(name: str, feature: str) -> Iterator[str]:
    """Yields the training split of a TFDS data set, and prepares it first if it is missing.

    Raises:
        UserError: there is no such data set or feature, or the server is out of reach.
    """
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, file_format="array_record")
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(
            f"TFDS has no data set {name!r}", f"Check the name. {TRAIN_WITHOUT}"
        ) from error
    if feature not in builder.info.features:
        names = ", ".join(builder.info.features)
        raise UserError(f"tfds:{name} has no feature {feature!r}", f"Choose one of: {names}")
    if not builder.is_prepared():
        # Ask here first, since TFDS itself retries for minutes.
        try:
            _within_seconds(
                lambda: urllib.request.urlopen("https://storage.googleapis.com").close()
            )
        except urllib.error.HTTPError:
            pass  # the server answers, if only with an error
        except OSError as error:
            raise UserError(
                f"tfds:{name} is neither prepared nor reachable ({error})", TRAIN_WITHOUT
            ) from error
        builder.download_and_prepare()
    for record in builder.as_data_source(split="train"):
        value = record[feature]
        yield value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def _within_seconds(ask: Callable[[], T]) -> T:
    """Returns what `ask` returns, if that takes at most `ANSWER_SECONDS`.

    A timeout of urllib is not enough, since it does not limit the look-up of a host's name.

    Raises:
        TimeoutError: there is no answer yet.
        OSError, HTTPException, ValueError: `ask` raised it.
    """
    outcome: list = []

    def run() -> None:
        try:
            outcome.append((ask(), None))
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not outcome:
        raise TimeoutError(f"no answer in {ANSWER_SECONDS:.0f} seconds")
    answer, error = outcome[0]
    if error:
        raise error
    return answer
