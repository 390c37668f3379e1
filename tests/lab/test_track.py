"""The track: every record of docs/track.md holds by the rules, and what breaks one is refused."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from configs import track
from gpt2.config import Config
from tests.helpers import ROOT
from tests.programs.track import BYTES, TARGETS, judge

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
    (row,) = [line for line in table() if line.startswith(f"| [{recipe}]")]
    tokens = config.train.num_steps * config.tokens_per_step
    assert f"| {tokens:,} |" in row


@pytest.fixture
def results():
    """Runs of a record whose mean is as far below the target as it has to be, and a little more."""
    spread = np.array([-2, -1, 0, 1, 2]) * 0.01
    error = spread.std(ddof=1) / 5**0.5
    margin = -stats.t.ppf(0.001, 4) * error
    scores = track.TARGET - 1.01 * margin + spread
    return pd.DataFrame(
        {
            "arm": "baseline",
            "purpose": "compare",
            "seed": range(5),
            "state": "finished",
            "code": "c0de",
            "parameters": "4.0M",
            "tokens": 1000,
            "flops": 1e12,
            "eval/loss": scores * np.log(2) * BYTES / TARGETS,
            "eval/bits_per_byte": scores,
        }
    )


@pytest.mark.parametrize(
    ("column", "values", "rule"),
    [
        ("seed", [0, 1, 2, 3, 5], "seeds are 0, 1"),
        ("state", ["finished"] * 4 + ["diverged"], "all runs have finished"),
        ("tokens", [1000] * 4 + [2000], "the same tokens"),
        ("parameters", "4.1M", "at most 4,000,000 parameters"),
        ("eval/loss", 4.9, "all of the held-out text"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(
    results, tmp_path, column, values, rule
):
    path = tmp_path / "record.csv"
    results.to_csv(path)
    row = "| [record](track/record.csv) | 1,000 | 1.00 | 4.0M |"
    assert judge(path).startswith(row)
    results[column] = values
    results.to_csv(path)
    with pytest.raises(ValueError, match=rule):
        judge(path)


def test_a_record_is_below_the_target_by_its_margin(results, tmp_path):
    path = tmp_path / "record.csv"
    results[:4].to_csv(path)
    with pytest.raises(ValueError, match="5 seeds or more"):
        judge(path)
    results[["eval/loss", "eval/bits_per_byte"]] *= 1.001
    results.to_csv(path)
    with pytest.raises(ValueError, match=r"below 1\.7 with p"):
        judge(path)
