"""Fixtures of the tests of the lab."""

import pytest

from tests.helpers import make_repository


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout, whose branch `my/idea` changes train.py, in place of this project's."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "train.py").write_text("1")
    make_repository(folder, "train.py", "2\n3\n")
    for module in ("checkouts", "results", "run_folder"):
        monkeypatch.setattr(f"gpt2.lab.experiments.{module}.SOURCE", folder)
    return folder
