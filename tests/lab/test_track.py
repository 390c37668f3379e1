"""The track: every record of docs/track.md holds by the rules, and what breaks one is refused."""

import pandas as pd
import pytest

from configs import track
from gpt2.config import Config
from tests.helpers import ROOT
from tests.programs.track import COLUMNS, judge

RECORDS = sorted((ROOT / "docs/track").glob("*.csv"))


def table():
    lines = (ROOT / "docs/track.md").read_text().splitlines()
    return [line for line in lines if "](track/" in line]


def test_every_record_of_the_table_holds():
    assert len(table()) == len(RECORDS) >= 3
    for path in RECORDS:
        assert any(row.startswith(judge(path)) for row in table())


@pytest.mark.parametrize("recipe", ["plain", "modern", "small_batch", "ledger"])
def test_recipes_keep_to_what_is_fixed(recipe):
    config = Config.from_dict(track.get_config(recipe))
    assert config.data.corpus == "sotu"
    assert config.data.tokenizer == "bpe:4096"
    assert config.data.val_fraction == 0.1
    assert config.train.eval_batches == 0
    assert config.train.init_from == ""
    (row,) = [line for line in table() if line.startswith(f"| [{recipe}]")]
    tokens = config.train.num_steps * config.tokens_per_step
    assert f"| {tokens:,} |" in row


def check_refused(tmp_path, runs, rule):
    path = tmp_path / "record.csv"
    runs.to_csv(path)
    with pytest.raises(ValueError, match=rule):
        judge(path)


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("seed", 7, "seeds are 0, 1"),
        ("state", "diverged", "all runs have finished"),
        ("tokens", 2000, "the same tokens"),
        ("eval/loss", 4.8, "on the whole validation split"),
    ],
)
def test_a_record_whose_first_run_breaks_a_rule_is_refused(
    tmp_path, column, value, rule
):
    runs = pd.read_csv(RECORDS[0])
    runs.loc[0, column] = value
    check_refused(tmp_path, runs, rule)


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("parameters", "4M", "at most 4,000,000 parameters"),  # 4,049,999, printed
        ("parameters", "950", "has the form in which a run prints it"),
        ("tokens", 0, "it has read tokens"),
        ("tokens", -5, "it has read tokens"),
        ("flops", 1.0, "a token costs FLOPs"),
        ("purpose", "choose", "no run chose an option"),
        ("eval/bits_per_byte", 1.6, "seeds have different scores"),
    ],
)
def test_a_record_whose_runs_break_a_rule_is_refused(tmp_path, column, value, rule):
    runs = pd.read_csv(RECORDS[0])
    check_refused(tmp_path, runs.assign(**{column: value}), rule)


def test_a_record_without_a_column_or_with_unlikely_scores_is_refused(tmp_path):
    runs = pd.read_csv(RECORDS[0])
    for column in COLUMNS:
        without = runs.drop(columns=column)
        check_refused(tmp_path, without, f"it has the column {column}")
    unlikely = runs.assign(**{"eval/bits_per_byte": runs.seed / 1000})
    check_refused(tmp_path, unlikely, "above 0.5 bits per byte")


def test_a_record_is_small_and_below_the_target_by_its_margin(tmp_path):
    runs = pd.read_csv(RECORDS[0])
    check_refused(tmp_path, runs[:4], "5 seeds or more")
    check_refused(tmp_path, runs.assign(parameters="4.1M"), "at most 4,000,000 param")
    losses = ["eval/loss", "eval/bits_per_byte"]
    mean = runs["eval/bits_per_byte"].mean()
    runs[losses] *= 1.6995 / mean
    check_refused(tmp_path, runs, r"below 1\.7 with p")
