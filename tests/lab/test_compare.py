"""Runs in one picture: which of them are plotted, and in which unit."""

import json

import matplotlib.image
import numpy as np
from matplotlib.figure import Figure

from gpt2.lab.compare import _read_origin
from gpt2.lab.experiments.curve_plot import plot_curves
from gpt2.lab.experiments.results import Curve
from gpt2.utils.files import seal, write_json
from tests.helpers import run, write_rows
from tests.training.workdirs import make_config

SCORED = {"step": 1, "eval/loss": 5.0, "eval/bits_per_byte": 2.5}


def write_run(folder, tokenizer, *records, corpus="pystdlib", options=""):
    folder.mkdir()
    config = make_config(options, tokenizer=tokenizer, corpus=corpus)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    write_rows(folder / "metrics.jsonl", records)


def facts_of(tokenizer, num_bytes, crc32=7):
    """Return the facts that a run stores about a text, without the training split."""
    held_out = {"num_bytes": num_bytes, "num_documents": 3, "num_tokens": 500}
    return {
        "tokenizer_sha256": tokenizer,
        "splits": {"validation": held_out},
        "token_crc32": {"validation": crc32},
    }


def write_data(folder, *facts, **more):
    write_json(folder / "data.json", seal(facts_of(*facts, **more)))


def compare(folder, *given):
    return run(None, *given, script="gpt2.lab.compare", cwd=folder)


def test_runs_without_a_validation_are_named_and_tokenizers_choose_the_unit(tmp_path):
    write_run(tmp_path / "first", "byte", SCORED)
    write_run(tmp_path / "young", "byte", {"step": 1}, corpus="synthetic")
    write_run(tmp_path / "other", "char", SCORED)
    write_run(tmp_path / "partly", "gpt2", {"step": 1, "eval/loss": 5.0})
    (tmp_path / "points.csv").write_text("tokens,loss\n64,5.5\n")
    picture = f"--output=file://{tmp_path}/drawn.png"
    points = "--reference=points.csv"
    code, stdout, stderr = compare(tmp_path, "first", "young", points, picture)
    assert code == 0
    assert "young has no validation loss in nats per token" in stdout
    assert "5.5000" in stdout
    assert stderr.startswith(
        "warning: --reference=points.csv can be compared with these runs"
    )
    assert matplotlib.image.imread(tmp_path / "drawn.png").std() > 0
    code, stdout, _ = compare(tmp_path, "first", "other", "partly")
    assert code == 0
    assert "partly has no validation loss in bits per byte" in stdout
    assert "2.5000" in stdout
    assert "5.0000" not in stdout
    assert (tmp_path / "compare.png").exists()


def test_what_cannot_be_compared_is_refused(tmp_path):
    write_run(tmp_path / "first", "byte", SCORED)
    write_run(tmp_path / "other", "char", SCORED)
    write_run(tmp_path / "young", "byte", {"step": 1})
    (tmp_path / "points.csv").write_text("tokens,loss\n64,5.5\n")

    def check_refused(message, *arguments):
        code, _, stderr = compare(tmp_path, *arguments)
        assert code == 2
        assert message in stderr

    check_refused("bits per byte", "first", "other", "--reference=points.csv")
    check_refused("No run has a validation", "young")
    check_refused("'txt' is not supported", "first", "--output=picture.txt")
    check_refused("Is a directory", "first", f"--output={tmp_path}")
    (tmp_path / "first" / "config.json").write_text("{")
    check_refused("error: first cannot be read (", "other", "first")


def test_runs_differ_by_the_text_and_tokenizer_that_they_had_and_not_by_names(tmp_path):
    for name in "abcdefg":
        corpus = "text:moved" if name == "b" else "text:books"
        batches = {"f": 8, "g": 7}.get(name, 0)
        options = f"data.batch_size=8 train.eval_batches={batches}"
        write_run(tmp_path / name, "bpe:4096", SCORED, corpus=corpus, options=options)
    write_data(tmp_path / "a", "first", 1000)
    write_data(tmp_path / "b", "first", 1000)
    write_data(tmp_path / "c", "first", 1001)
    write_data(tmp_path / "d", "second", 1000, crc32=9)
    write_data(tmp_path / "e", "first", 1000, crc32=8)
    write_data(tmp_path / "f", "first", 1000)
    write_data(tmp_path / "g", "first", 1000)
    code, stdout, stderr = compare(tmp_path, *"abcefg")
    assert code == 0
    assert "5.0000" in stdout
    assert stderr == (
        "warning: c is validated on 1,001 bytes in 3 documents, but a is validated on 1,000 bytes"
        " in 3 documents, so their losses cannot be compared\n"
        "warning: e and a are validated on different texts of equal length, so their losses cannot"
        " be compared\n"
        "warning: g is validated on the first 448 tokens of 1,000 bytes in 3 documents, but a is"
        " validated on 1,000 bytes in 3 documents, so their losses cannot be compared\n"
    )
    code, stdout, stderr = compare(tmp_path, "a", "d")  # two vocabularies of one name
    assert code == 0
    assert stderr == ""
    assert "2.5000" in stdout
    assert "5.0000" not in stdout


def test_a_mixture_is_known_by_the_texts_and_fractions_of_its_parts(tmp_path):
    origins = []
    for number, (corpus, size, crc32) in enumerate(
        [
            ("3*text:a+1*text:b", 1000, 7),
            ("0.75*text:moved+0.25*text:b", 1000, 7),
            ("3*text:a+1*text:b", 1001, 7),
            ("1*text:a+1*text:b", 1000, 7),
            ("3*text:a+1*text:b", 1000, 8),
        ]
    ):
        folder = tmp_path / str(number)
        write_run(folder, "byte", SCORED, corpus=corpus)
        parts = [facts_of("hash", size), facts_of("hash", 20, crc32)]
        write_json(folder / "data.json", seal({"tokenizer": "byte", "parts": parts}))
        origins.append(_read_origin(folder))
    first = origins[0]
    assert first.tokenizer == "hash"
    assert first.text == (
        "3/4 * (1,000 bytes in 3 documents) + 1/4 * (20 bytes in 3 documents)"
    )
    same = [(each.text, each.crc32) == (first.text, first.crc32) for each in origins]
    assert same == [True, True, False, False, False]


def test_a_run_of_other_code_is_compared_and_its_differences_are_printed_whole(
    tmp_path,
):
    write_run(tmp_path / "a", "byte", SCORED)
    longest = f"text:{'x' * 70}"
    longer = dict(options="train.num_steps=9", corpus=longest)
    write_run(tmp_path / "b", "byte", SCORED, **longer)
    tree = json.loads((tmp_path / "b" / "config.json").read_text())
    tree["optim"] |= {"name": "theirs", "twist": 2.0}
    tree["model"]["twisted"] = True
    (tmp_path / "b" / "config.json").write_text(json.dumps(tree))
    code, stdout, stderr = compare(tmp_path, "a", "b")
    assert code == 0, stderr
    for option in ("optim.name=theirs", "optim.twist=2.0", "model.twisted=True"):
        assert option in stdout
    assert f"data.corpus={longest}" in "".join(stdout.split())
    assert "train.num_steps=9" in stdout


def test_names_are_plotted_as_they_are(tmp_path, monkeypatch):
    """Matplotlib hides labels that begin with `_`, and reads text between two `$` as a formula."""
    figures = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: figures.append(figure)
    )
    names = ["_first", "a$b_{c$", "$5 and $6"]
    amounts = np.arange(2.0)
    curve = Curve(amounts, amounts, amounts, scores=amounts)
    plot_curves(tmp_path / "c.png", {name: [curve] for name in names}, "nats per token")
    labels = figures[0].legends[0].get_texts()
    assert [label.get_text().lstrip("\u200b") for label in labels] == names
    assert not any(label.get_parse_math() for label in labels)
