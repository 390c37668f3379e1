"""A part of `python -m tests.faults`, that it can fail, and that planted faults follow the code."""

import shutil

import pytest

from tests.faults.__main__ import main
from tests.faults.laboratory import Broken, check_start, compare
from tests.mutations import faults, misplaced


def test_planted_faults_still_stand_in_the_code():
    assert not misplaced(faults())


@pytest.mark.thorough
def test_runs_that_are_harmed_continue_to_the_same_bits(tmp_path, capsys):
    assert main(["--kinds=int", "--most=2", f"--workdir={tmp_path}"]) == 0
    table = capsys.readouterr().out
    assert table.count("| yes |") == 1 and "0 rows failed" in table
    # It can fail: other metrics, other parameters, a start behind what was saved.
    harmed, unharmed = tmp_path / "SIGINT", tmp_path / "unharmed-440"
    compare(harmed, unharmed)
    with pytest.raises(Broken, match="was saved, and the run went on from"):
        check_start(harmed, 10**6)
    metrics = harmed / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole.replace('"step": 7,', '"step": 6,'))
    with pytest.raises(Broken, match="other metrics"):
        compare(harmed, unharmed)
    metrics.write_text(whole)
    shutil.rmtree(unharmed / "checkpoints" / "440")
    with pytest.raises(Broken, match="other values in"):
        compare(harmed, unharmed)
