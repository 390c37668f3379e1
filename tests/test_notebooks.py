"""The notebooks of docs/ run from top to bottom, with fewer steps than a reader takes."""

import pytest

from tests.forks import ROOT, environment

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FEWER = {
    "steps = 240": "steps = 8",
    "steps = 300": "steps = 20",
    "steps // 4": "steps",  # between validations
    "num_steps=40": "num_steps=4",
    "seeds=3": "seeds=2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorial", "parallel"])
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    notebook = nbformat.read(ROOT / f"docs/{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        for taken, fewer in FEWER.items():
            cell.source = cell.source.replace(taken, fewer)
    folder = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=900, resources=folder).execute()
