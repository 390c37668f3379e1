"""Runs over each other: which of them are drawn, and in which unit."""

import json

from tests.helpers import run
from tests.test_workdir import make_config


def write_run(folder, tokenizer, *records, corpus="pystdlib", **options):
    folder.mkdir()
    config = make_config(data=dict(tokenizer=tokenizer, corpus=corpus), **options)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))


def test_runs_without_a_validation_neither_choose_the_unit_nor_stand_against_a_reference(tmp_path):
    scored = {"step": 1, "eval/loss": 5.0, "eval/bits_per_byte": 2.5}
    write_run(tmp_path / "first", "byte", scored)
    write_run(tmp_path / "young", "char", {"step": 1}, corpus="synthetic")
    write_run(tmp_path / "other", "char", scored)
    write_run(tmp_path / "partly", "gpt2", {"step": 1, "eval/loss": 5.0})
    (tmp_path / "points.csv").write_text("tokens,loss\n64,5.5\n")

    def compare(*given):
        return run(None, *given, script="gpt2.compare", cwd=tmp_path)

    code, told, mistake = compare("first", "young", "--reference=points.csv")
    assert code == 0, mistake
    assert "young has no validation in nats per token, and is left out\n" in told
    assert "corpora differ" not in told and "validation (nats per token)" in told
    code, told, _ = compare("first", "other", "partly")
    assert code == 0 and "partly has no validation in bits per byte" in told
    assert "2.5000" in told and "5.0000" not in told
    code, _, mistake = compare("first", "other", "--reference=points.csv")
    assert code == 2 and "compare in bits per byte, a reference in nats" in mistake
    code, _, mistake = compare("young")
    assert code == 2 and "no run has a validation" in mistake


def test_the_table_names_what_a_run_has_unlike_the_first(tmp_path):
    scored = {"step": 1, "eval/loss": 5.0, "eval/bits_per_byte": 2.5}
    write_run(tmp_path / "a", "byte", scored)
    write_run(tmp_path / "b", "byte", scored, train=dict(num_steps=9), optim=dict(name="lion"))
    write_run(
        tmp_path / "c",
        "byte",
        scored,
        corpus="text:a",
        train=dict(num_steps=8),
        optim=dict(beta1=0.8),
    )

    def rows(*given):
        code, told, mistake = run(None, *given, script="gpt2.compare", cwd=tmp_path)
        assert code == 0, mistake
        return [line.split("  ")[-1].strip() for line in told.splitlines() if "  " in line]

    assert rows("a", "b") == ["unlike the first", "5.0000", "optim.name=lion, train.num_steps=9"]
    write_run(tmp_path / "d", "byte", scored, train=dict(eval_every=7), optim=dict(name="lion"))
    assert rows("a", "d")[-1] == "optim.name=lion, train.eval_every=7"
    (tmp_path / "points.csv").write_text("steps,loss\n1,2\n")
    code, _, mistake = run(None, "a", "--reference=points.csv", script="gpt2.compare", cwd=tmp_path)
    assert code == 2 and "points.csv is not a table of points (it has no column tokens)" in mistake
    assert rows("a") == ["validation (nats per token)", "5.0000"]
    named = "data.corpus=text:a, optim.name=adamw, optim.beta1=0.8, and 1 more"
    assert rows("b", "c")[-1] == named
