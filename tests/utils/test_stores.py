"""Runs, texts and weights at URLs: a store has whole files, and every URL yields the same data."""

import contextlib
import dataclasses
import http.server
import signal
import threading
import time

import chex
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gpt2.config import DataConfig
from gpt2.data import prepare_dataset
from gpt2.errors import UserError
from gpt2.utils import mirror as mirror_file
from gpt2.utils import stores
from gpt2.utils.mirror import mirrored
from tests.helpers import (
    SECONDS,
    TINY,
    metrics_of,
    params_of,
    start,
    starts_of,
    succeed,
    write_rows,
)
from tests.parallel.pair import FLAGS, Pair, losses

DIGESTS = "checkpoints/{}/digests/digests"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return a store in memory, and a function that turns this process into another machine."""
    memory = fsspec.filesystem("memory", use_listings_cache=False)
    memory.store.clear()
    monkeypatch.setattr(mirror_file, "PAUSE", 0.01)

    def become(number):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{number}"))

    become(1)
    return memory, become


@contextlib.contextmanager
def sent(url):
    """Yield the local folder of a run, which is mirrored to a URL."""
    folder = stores.fetch(url)
    with mirrored(url, folder):
        yield folder


def save(folder, step, text="weights"):
    """Write the files of a checkpoint and a line of metrics, as a run does."""
    for name in ("params/array", "metrics/metrics", "digests/digests"):
        path = folder / f"checkpoints/{step}/{name}"
        path.parent.mkdir(parents=True)
        path.write_text(f"{text} {step}")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{step}\n")


def pushed(step=1):
    """Write a checkpoint into the local folder of the run, send it, and return the folder."""
    folder = stores.local_folder("memory://run")
    save(folder, step)
    stores.push("memory://run", folder)
    return folder


def names(memory):
    return {name.removeprefix("/run/") for name in memory.find("/run")} - {".owner"}


def wait_until(holds):
    end = time.monotonic() + SECONDS
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()


def test_another_machine_goes_on_with_what_was_sent_and_reads_weights_when_it_needs_them(
    store,
):
    memory, become = store
    with sent("memory://run") as folder:
        save(folder, 1)
        (folder / ".lock").touch()
        (folder / "checkpoints/2.orbax-checkpoint-tmp").mkdir()
        (folder / "checkpoints/2.orbax-checkpoint-tmp/array").touch()
        wait_until(lambda: DIGESTS.format(1) in names(memory))
        assert names(memory) == set(stores._list_copy(folder))
        assert len(names(memory)) == 4
    become(2)
    folder = stores.fetch("memory://run")
    assert (folder / "metrics.jsonl").read_text() == "1\n"
    assert not (folder / "checkpoints/1/params").exists()
    stores.push("memory://run", folder)
    # The weights were never fetched here, and stay in the store.
    assert "checkpoints/1/params/array" in names(memory)
    stores.complete(folder, ["checkpoints/1/params/array", "checkpoints/1/params/none"])
    assert (folder / "checkpoints/1/params/array").read_text() == "weights 1"


def test_a_mark_comes_after_what_it_marks_and_goes_before_it(store, monkeypatch):
    memory, _ = store
    folder = stores.local_folder("memory://run")
    done = []
    slow = {
        "array",
        "metrics",
        "metrics.jsonl",
    }  # a mark that is sent with them overtakes them
    for name in ("pipe_file", "rm_file"):
        act = getattr(memory, name)

        def spy(path, *rest, act=act):
            file = path.rpartition("/")[2]
            if file in slow:
                time.sleep(0.05)
            done.append(file)
            return act(path, *rest)

        monkeypatch.setattr(memory, name, spy)
    pushed()
    assert sorted(done[:3]) == ["array", "metrics", "metrics.jsonl"]
    assert done[3] == "digests"
    pushed(2)
    stores.shutil.rmtree(folder / "checkpoints/1")
    done.clear()
    slow.clear()
    slow.add("digests")  # it would be overtaken
    stores.push("memory://run", folder)
    assert done[0] == "digests"
    assert sorted(done) == ["array", "digests", "metrics"]


def test_a_checkpoint_that_was_not_sent_whole_is_not_there_and_is_cleared_away(store):
    memory, become = store
    pushed()
    memory.pipe_file("/run/checkpoints/2/layout/metadata", b"half")
    become(2)
    folder = stores.fetch("memory://run")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["1"]
    save(folder, 3)
    stores.push("memory://run", folder)
    assert not memory.exists("/run/checkpoints/2/layout/metadata")
    assert memory.exists("/run/checkpoints/1/params/array")


def test_a_folder_that_came_from_a_store_is_not_emptied_as_a_path(store, tmp_path):
    folder = pushed()
    moved = folder.rename(tmp_path / "moved")
    stores.push(str(moved), moved)
    assert (moved / "metrics.jsonl").exists()


def test_what_was_not_sent_stays_unless_the_store_has_gone_on(store):
    become = store[1]
    mine = pushed()
    save(mine, 2)
    assert (stores.fetch("memory://run") / "metrics.jsonl").read_text() == "1\n2\n"
    become(2)
    theirs = stores.fetch("memory://run")
    save(theirs, 3)
    stores.push("memory://run", theirs)
    become(1)
    assert stores.fetch("memory://run") == mine
    assert (mine / "metrics.jsonl").read_text() == "1\n3\n"
    assert sorted(path.name for path in (mine / "checkpoints").iterdir()) == ["1", "3"]
    (aside,) = mine.parent.glob(f"{mine.name}-*")  # what this machine never sent
    assert (aside / "metrics.jsonl").read_text() == "1\n2\n"


def test_a_url_of_a_folder_makes_it(store, tmp_path):
    with sent(f"file://{tmp_path}/new/run") as folder:
        save(folder, 1)
    assert (tmp_path / "new/run" / DIGESTS.format(1)).exists()


def test_a_checkpoint_that_another_run_has_replaced_leaves_nothing_here(store):
    become = store[1]
    mine = pushed()
    become(2)
    theirs = stores.fetch("memory://run")
    save(theirs, 2)
    stores.shutil.rmtree(theirs / "checkpoints/1")
    stores.push("memory://run", theirs)
    become(1)
    assert stores.fetch("memory://run") == mine
    assert [path.name for path in (mine / "checkpoints").iterdir()] == ["2"]


@pytest.mark.parametrize("lost", ["", "/checkpoints", "/checkpoints/2"])
@pytest.mark.parametrize("by", ["who trains", "who reads"])
def test_what_a_store_has_lost_is_kept_and_told(store, lost, by):
    memory, become = store
    with sent("memory://run") as folder:
        for step in (1, 2):
            save(folder, step)
    if by == "who reads":
        become(2)
        stores.complete(stores.fetch("memory://run"), ["checkpoints/2/params/array"])
    folder = stores.local_folder("memory://run")
    before = stores._list_copy(folder)
    memory.rm(f"/run{lost}", recursive=True)
    if by == "who trains" and lost:  # whose run it is: the next push sends it again
        stores.push("memory://run", stores.fetch("memory://run"))
        assert memory.exists("/run/checkpoints/2/params/array")
    else:
        with pytest.raises(UserError, match=f"has lost checkpoint 2, but {folder} is"):
            stores.fetch("memory://run")
    assert stores._list_copy(folder) == before


def test_what_a_store_has_lost_beside_checkpoints_is_set_aside(store, capsys):
    memory, become = store
    with sent("memory://run") as folder:
        save(folder, 1)
    become(2)
    folder = stores.fetch("memory://run")
    memory.rm("/run/metrics.jsonl")
    stores.fetch("memory://run")
    (aside,) = folder.parent.glob(f"{folder.name}-*")
    assert (aside / "metrics.jsonl").read_text() == "1\n"
    assert str(aside) in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["", "checkpoints/1", "metrics.jsonl"])
def test_what_the_working_copy_has_lost_stays_in_the_store(store, lost):
    memory = store[0]
    folder = pushed()
    before = names(memory)
    lost = folder / lost
    stores.shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    (folder / "loss.png").parent.mkdir(parents=True, exist_ok=True)
    (folder / "loss.png").touch()
    stores.push("memory://run", folder)
    assert names(memory) == before | {"loss.png"}


def test_a_copy_of_the_working_copy_is_a_folder_of_its_own(store, tmp_path):
    memory = store[0]
    folder = pushed()
    before = names(memory)
    copy = tmp_path / "copy"
    stores.shutil.copytree(folder, copy)
    save(copy, 2)
    assert stores.url_or_path(folder) == "memory://run"
    assert stores.url_or_path(copy) == str(copy)
    stores.push(stores.url_or_path(copy), copy)
    assert names(memory) == before


def test_an_outage_is_told_and_does_not_end_the_run(store, monkeypatch):
    memory = store[0]
    warnings = []
    monkeypatch.setattr(mirror_file, "warn", warnings.append)
    with sent("memory://run") as folder:
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "cat_file", lambda *_: 1 / 0)
            save(folder, 1)
            wait_until(lambda: warnings)
        wait_until(lambda: DIGESTS.format(1) in names(memory))
        (folder / "samples.txt").touch()
    assert "samples.txt" in names(memory)
    (warning,) = warnings
    assert "the run continues" in warning
    lost = pytest.raises(UserError, match=r"division by zero.*All files are in .*run")
    with monkeypatch.context() as patch, lost as caught, sent("memory://run"):
        patch.setattr(type(memory), "cat_file", lambda *_: 1 / 0)
        save(folder, 2)
        folder.with_name(f".{folder.name}.sending").mkdir()
        memory.pipe_file("/run/metrics.jsonl", b"1\n2\n")  # sent before the outage
    assert caught.value.exit_code == 5
    with sent("memory://run"):  # the same command
        assert DIGESTS.format(2) in names(memory)
    assert not [*folder.parent.glob(".*.sending")]  # as a killed process leaves it


def test_a_later_start_elsewhere_stops_the_earlier_run(store):
    _, become = store
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    lost = pytest.raises(UserError, match="Another run has taken over memory://run")
    with lost, sent("memory://run") as first:
        become(2)
        with sent("memory://run"):
            save(first, 1)
            wait_until(stopped.is_set)
    signal.signal(signal.SIGTERM, before)


def test_texts_give_the_same_tokens_from_every_place(store, tmp_path):
    memory, become = store
    folder = tmp_path / "b"
    folder.mkdir()
    texts = []
    for number in range(12):
        text = f"{number}: some words, then {number**3} naïve 測試\n" * 20
        (folder / f"{number:02}.txt").write_text(text)
        texts.append(text)
    table = pyarrow.table({"text": texts})
    write_rows(folder / "all.jsonl", table.to_pylist())
    pyarrow.parquet.write_table(table, folder / "all.parquet")
    np.arange(5000, dtype=np.uint16).tofile(folder / "all.bin")
    memory.put(str(folder), "/b", recursive=True)
    kinds = {
        "text": "*.txt",
        "jsonl": "all.jsonl",
        "parquet": "*.parquet",
        "tokens": "*.bin",
    }
    for kind, pattern in kinds.items():
        local = DataConfig(
            corpus=f"{kind}:{folder}/{pattern}",
            data_dir=str(tmp_path),
            tokenizer="gpt2" if kind == "tokens" else "byte",
            val_fraction=0.2,
        )
        remote = dataclasses.replace(
            local, corpus=f"{kind}:memory://b/{pattern}", data_dir="memory://data"
        )
        assert prepare_dataset(local).describe() == prepare_dataset(remote).describe()
        become(kind)
    with pytest.raises(UserError, match=r"no file matches 'memory://b/\*\.md'"):
        prepare_dataset(DataConfig(corpus="text:memory://b/*.md", tokenizer="byte"))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(UserError, match=r"no home directory.*XDG_CACHE_HOME"):
        stores.local_folder("s3://bucket/run")
    with pytest.raises(UserError, match=r"no home directory.*XDG_CACHE_HOME"):
        stores.local_folder("~/run")
    assert str(stores.local_folder("/data/run")) == "/data/run"


def test_a_cached_file_that_was_cut_is_fetched_again(store):
    store[0].pipe_file("/a.txt", b"all of it")
    (file,) = stores.find("memory://a.txt")
    stores.local_path(file).write_text("all")
    assert stores.local_path(file).read_text() == "all of it"


@pytest.mark.parametrize("is_remote", [False, True])
def test_complete_folders_are_found_in_the_order_of_their_age(
    store, tmp_path, is_remote
):
    url = "memory://[a] data" if is_remote else f"{tmp_path}/[a] data"
    assert stores.find_folders(f"{url}/text-", "mark") == []
    for name in ("text-b/mark", "text-a/mark", "text-c/other", "other-d/mark"):
        with stores.writing(f"{url}/{name}") as path:
            path.write_text("")
        time.sleep(0.02)
    assert stores.find_folders(f"{url}/text-", "mark") == ["text-b", "text-a"]


def test_a_corpus_is_prepared_once_for_all_machines(store, capsys):
    memory, become = store
    memory.pipe_file("/b/one.txt", b"some words, and some more " * 40)
    data = DataConfig(
        corpus="text:memory://b/one.txt", tokenizer="byte", data_dir="memory://data"
    )
    prepared = prepare_dataset(data).describe()
    assert "preparing" in capsys.readouterr().out
    become(2)
    assert prepare_dataset(data).describe() == prepared
    assert "preparing" not in capsys.readouterr().out
    memory.pipe_file("/b/one.txt", b"other words, and some more " * 40)
    assert prepare_dataset(data).describe() != prepared


class Web(http.server.BaseHTTPRequestHandler):
    """A server that announces 60 bytes and sends half, or fails with the status in the path."""

    def do_HEAD(self):
        self.send_response(int(self.path[1:4]))
        self.send_header("Content-Length", "60" if self.command == "HEAD" else "30")
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        time.sleep(0.5 * ("slow" in self.path))
        self.wfile.write(b"a" * 30)

    def log_message(self, *_):
        pass


def test_what_the_web_does_not_give_whole_is_told(tmp_path, monkeypatch):
    aiohttp = pytest.importorskip("aiohttp")
    short = aiohttp.ClientTimeout(total=0.2)
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", short)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = "http://127.0.0.1:{}/{}/a.txt".format
        port = server.server_port
        reasons = {401: 401, 403: 403, 404: "404, message", 500: 500}
        for status, reason in reasons.items():
            with pytest.raises(UserError, match=f"cannot be reached .*{reason}"):
                stores.find(url(port, status))
        (half,) = stores.find(url(port, 200))
        with pytest.raises(UserError, match="only 30 of 60 bytes"):
            stores.local_path(half)
        slow = stores.Remote(f"{url(port, 200)}?slow", 30, "")
        assert stores.local_path(slow).read_bytes() == b"a" * 30
        server.shutdown()
    with pytest.raises(UserError, match="cannot be reached"):
        stores.find(url(port, 200))  # where nobody answers


@pytest.fixture
def bucket(monkeypatch):
    """Return the file system of s3://bucket on a local server."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    s3fs = pytest.importorskip("s3fs")
    server.start()
    host, port = server.get_host_and_port()
    variables = {"ENDPOINT_URL": f"http://{host}:{port}", "DEFAULT_REGION": "us-east-1"}
    variables |= {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()  # instances have the address of an earlier server
    bucket = s3fs.S3FileSystem(use_listings_cache=False)
    if bucket.exists("bucket"):  # moto's data outlive its server
        bucket.rm("bucket", recursive=True)
    bucket.mkdir("bucket")
    yield bucket
    server.stop()


@pytest.mark.thorough
def test_a_run_in_a_bucket_goes_on_on_an_empty_machine(bucket, tmp_path, monkeypatch):
    options = [*TINY, "--config.data.corpus=synthetic", "--config.train.num_steps=60"]
    options += ["--config.train.eval_batches=1", "--config.train.eval_every=20"]
    succeed(tmp_path / "whole", *options)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    killed = start("s3://bucket/run", *options)
    wait_until(lambda: "digests/digests" in " ".join(bucket.find("bucket/run")))
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=SECONDS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    succeed("s3://bucket/run", *options)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    folder = stores.fetch("s3://bucket/run")
    _, start_step = starts_of(folder)
    assert start_step > 0
    whole = metrics_of(tmp_path / "whole")
    for line, expected in zip(metrics_of(folder), whole, strict=True):
        assert line["train/loss"] == expected["train/loss"]
    chex.assert_trees_all_equal(params_of(folder), params_of(tmp_path / "whole"))


@pytest.mark.thorough
def test_processes_without_a_common_disk_go_on_from_a_bucket(bucket, tmp_path):
    options = ["--config.train.num_steps=30", "--config.train.eval_every=2"]
    spread = [*options, "--workdir=s3://bucket/run", "--config.parallel.fsdp=8"]
    own = f"XDG_CACHE_HOME={tmp_path}/disk-{{0}}"
    other = f"XDG_CACHE_HOME={tmp_path}/disk-{{1}}"
    with Pair(tmp_path / "pair", *spread, variables=own):
        wait_until(lambda: bucket.exists("bucket/run/" + DIGESTS.format(5)))
    with Pair(tmp_path / "pair", *spread, variables=other) as pair:
        assert pair.ends() == [0, 0], pair.output()
    folder = stores.fetch("s3://bucket/run")
    assert len(starts_of(folder)) == 2
    succeed(tmp_path / "one", *TINY, *FLAGS.split(), *options)
    assert len(losses(folder)) == 30
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
