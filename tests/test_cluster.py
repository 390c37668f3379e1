"""Runs of a sweep are processes of their own."""

import os

from gpt2.parallel import distributed
from gpt2.utils import cluster


def test_a_run_of_a_sweep_is_no_part_of_what_a_launcher_began(tmp_path, monkeypatch):
    show = "from gpt2.parallel import distributed; print(distributed._find_launcher())"
    (tmp_path / "show.py").write_text(show)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    assert distributed._find_launcher() == "mpi4py"
    slot, log = cluster.Slot(os.sched_getaffinity(0), {}), tmp_path / "log.txt"
    assert cluster.start([str(tmp_path / "show.py")], log, slot).wait() == 0
    assert log.read_text() == "None\n"
