"""Runs over each other: which of them are drawn, and in which unit."""

import json

import matplotlib.image
import numpy as np
from matplotlib.figure import Figure

from gpt2.lab.experiments.curve_plot import plot_curves
from gpt2.lab.experiments.results import Curve
from gpt2.utils.files import seal, write_json
from tests.helpers import run, write_rows
from tests.training.test_workdir import make_config

SCORED = {"step": 1, "eval/loss": 5.0, "eval/bits_per_byte": 2.5}


def write_run(folder, tokenizer, *records, corpus="pystdlib", options=""):
    folder.mkdir()
    config = make_config(options, tokenizer=tokenizer, corpus=corpus)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    write_rows(folder / "metrics.jsonl", records)


def write_data(folder, tokenizer, num_bytes):
    """Writes what a run keeps of its text, whose training part says nothing here."""
    held_out = {"num_bytes": num_bytes, "num_documents": 3}
    facts = {"tokenizer_sha256": tokenizer, "splits": {"validation": held_out}}
    write_json(folder / "data.json", seal(facts))


def compare(folder, *given):
    return run(None, *given, script="gpt2.lab.compare", cwd=folder)


def test_runs_without_a_validation_are_told_and_tokenizers_choose_the_unit(tmp_path):
    write_run(tmp_path / "first", "byte", SCORED)
    write_run(tmp_path / "young", "byte", {"step": 1}, corpus="synthetic")
    write_run(tmp_path / "other", "char", SCORED)
    write_run(tmp_path / "partly", "gpt2", {"step": 1, "eval/loss": 5.0})
    (tmp_path / "points.csv").write_text("tokens,loss\n64,5.5\n")
    code, told, mistake = compare(tmp_path, "first", "young", "--reference=points.csv")
    assert code == 0, mistake
    assert "young has no validation in nats per token" in told and "5.5000" in told
    assert mistake.startswith("warning: points.csv can be compared only if its")
    assert matplotlib.image.imread(tmp_path / "compare.png").std() > 0
    drawn = tmp_path / "drawn.png"
    given = "partly", "--reference=points.csv", f"--output=file://{drawn}"
    assert compare(tmp_path, *given)[2] == "" and drawn.is_file()
    code, told, _ = compare(tmp_path, "first", "other", "partly")
    assert code == 0 and "partly has no validation in bits per byte" in told
    assert "2.5000" in told and "5.0000" not in told
    code, _, mistake = compare(tmp_path, "first", "other", "--reference=points.csv")
    assert code == 2 and "bits per byte" in mistake
    code, _, mistake = compare(tmp_path, "young")
    assert code == 2 and "No run has a validation" in mistake
    for name in ("config.json", "environment.jsonl"):
        (tmp_path / "first" / name).write_text("{")
        code, _, mistake = compare(tmp_path, "other", "first")
        assert code == 2 and mistake.startswith("error: first cannot be read (")


def test_runs_are_told_apart_by_the_text_and_tokenizer_that_they_had_and_not_by_names(
    tmp_path,
):
    for name in "abcd":
        corpus = "text:moved" if name == "b" else "text:books"
        write_run(tmp_path / name, "bpe:4096", SCORED, corpus=corpus)
    write_data(tmp_path / "a", "first", 1000)
    write_data(tmp_path / "b", "first", 1000)
    write_data(tmp_path / "c", "first", 1001)
    write_data(tmp_path / "d", "second", 1000)
    code, told, warned = compare(tmp_path, "a", "b")
    assert (code, warned) == (0, "") and "5.0000" in told
    code, told, warned = compare(tmp_path, "a", "b", "c")
    assert code == 0 and "5.0000" in told
    assert warned.startswith("warning: c is") and warned.count("warning") == 1
    code, told, warned = compare(tmp_path, "a", "d")  # two vocabularies of one name
    assert (code, warned) == (0, "") and "2.5000" in told and "5.0000" not in told


def test_a_run_of_other_code_is_compared_and_what_it_has_unlike_the_first_is_told_whole(
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
    code, told, mistake = compare(tmp_path, "a", "b")
    assert code == 0, mistake
    for option in ("optim.name=theirs", "optim.twist=2.0", "model.twisted=True"):
        assert option in told
    assert f"data.corpus={longest}" in "".join(told.split())
    assert "train.num_steps=9" in told


def test_names_are_plotted_as_they_are(tmp_path, monkeypatch):
    """Matplotlib hides labels that begin with `_`, and reads text between two `$` as a formula."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: figures.append(figure))
    names = ["_first", "a$b_{c$", "$5 and $6"]
    amounts = np.arange(2.0)
    curve = Curve(amounts, amounts, amounts, scores=amounts)
    plot_curves(tmp_path / "c.png", {name: [curve] for name in names}, "nats per token")
    labels = figures[0].legends[0].get_texts()
    assert [label.get_text().lstrip("\u200b") for label in labels] == names
    assert not any(label.get_parse_math() for label in labels)
