"""Runs of a sweep are processes of their own."""

import os
import signal
import sys

import pytest

from gpt2.errors import UserError
from gpt2.lab.experiments import processes
from gpt2.parallel import distributed


def test_a_run_of_a_sweep_is_no_part_of_what_a_launcher_began(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # which is not installed
    with pytest.raises(UserError, match="needs the package mpi4py"):
        distributed._find_launcher()
    show = "from gpt2.parallel import distributed; print(distributed._find_launcher())"
    assert printed(tmp_path, show, os.sched_getaffinity(0)) == "None\n"


def printed(folder, program, cores):
    """What a program prints that `processes.start` runs."""
    (folder / "program.py").write_text(program)
    log = folder / "log.txt"
    slot = processes.LocalSlot(cores, {})
    command = [str(folder / "program.py"), "a b"]
    assert slot.start(command, log, {"MARK": "here"}).wait() == 0
    return log.read_text()


SHOW = """
import ctypes, os, sys
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(os.sched_getaffinity(0), number.value, sys.argv[1], os.environ["MARK"])
"""


def test_a_run_has_its_cores_and_ends_with_what_started_it(tmp_path):
    core = min(os.sched_getaffinity(0))
    told = f"{ {core} } {signal.SIGTERM.value} a b here\n"
    assert printed(tmp_path, SHOW, {core}) == told
