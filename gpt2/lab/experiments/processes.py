"""Run several programs at the same time on this machine, each in its own process."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

# The environment variable with a command, such as a sandbox, that starts all processes of judged
# code. In this command, `{run}` stands for the folder of the run, which the process has to read,
# and `{output}` for the only folder to which the process has to write. The process must not write
# to the folder of the run itself. The ledger's process writes there. If the judged code could
# make a symbolic link there, the ledger's process might overwrite another file.
SANDBOX = "GPT2_SANDBOX"


class LocalSlot(NamedTuple):
    """The CPU cores and environment variables for one run at a time on this machine."""

    cores: Set[int]
    environment: dict[str, str]

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen:
        """Start a process that runs `command`: the path of a Python file, and its arguments.

        The new process has the environment variables of this process and of the slot, and the
        variables in `environment`. It appends its output to `log`. On Linux, the new process gets
        SIGTERM when this process ends. Elsewhere, it continues. In a sandbox, the new process may
        read the folder that contains `log`, and write to this folder's subfolder `run`.
        """
        # This import is not at the top of the file, because the child also runs this file, but
        # possibly with another version of the package `gpt2`.
        from gpt2.utils.launch import ALONE

        cores = ",".join(map(str, self.cores))
        # The child runs this file, which then replaces itself with the given file. With -P, this
        # file does not import modules from its own folder.
        child = [sys.executable, "-P", __file__, cores, *command]
        with open(log, "ab") as file:
            return subprocess.Popen(
                confined(child, log.parent, log.parent / "run"),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, ALONE: "1", **self.environment, **environment},
                start_new_session=True,  # Ctrl-C stops the sweep, which then stops its runs
            )


def confined(command: Sequence[str], run: Path, output: Path) -> list[str]:
    """Return the command that starts `command` in the user's sandbox.

    In the sandbox, the process may read the folder `run`, and write only the folder `output`. If
    the environment variable GPT2_SANDBOX is not set, return `command` itself.
    """
    prefix = []
    for word in shlex.split(os.environ.get(SANDBOX, "")):
        word = word.replace("{run}", str(run.absolute()))
        prefix.append(word.replace("{output}", str(output.absolute())))
    return [*prefix, *command]


def become(cores: str, *command: str) -> None:
    """Replace the program of this process with `command`: a Python file's path and its arguments.

    On Linux, first restrict this process to `cores`, such as `0,1`, and ask the kernel to send
    SIGTERM to this process when its parent process ends.
    """
    if sys.platform == "linux":
        os.sched_setaffinity(0, map(int, cores.split(",")))
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    become(*sys.argv[1:])
