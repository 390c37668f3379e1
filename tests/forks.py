"""Run commands quickly: a server does the imports once, and forks itself for each command.

A command takes seconds to import JAX, but milliseconds to refuse an option. The server imports all
modules except the commands and other modules that define or read flags. A child then runs a
command's file as `python` would, from its first line to its exit.
"""

import atexit
import dataclasses
import functools
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from gpt2.utils.launch import has_old_xla

ROOT = Path(__file__).parents[1]

# XLA:CPU compiles the small programs of tests four times as fast if it compiles each program in one
# part and without fusion emitters, which newer versions always use.
COMPILES_FAST = "--xla_cpu_parallel_codegen_split_count=1"
COMPILES_FAST += " --xla_cpu_use_fusion_emitters=false" if has_old_xla() else ""

LATE = -1  # the code of a command that exceeded its time limit


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int  # the exit code, `LATE`, or minus the number of the signal that ended it
    stdout: str
    stderr: str
    memory: int  # its peak memory minus the server's memory, in bytes


@functools.cache
def _server() -> subprocess.Popen:
    """Start the server, which ends when this process closes its input."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, __file__], env=environment(), **pipes)


def run_command(*command: str, cwd: Path, seconds: int = 15, devices: int = 1) -> Done:
    """Run a file such as `train.py`, or a module such as `gpt2.generate`, with arguments.

    The command is killed after `seconds` of processor time, or after five times this time.
    """
    asked = dict(
        command=command, cwd=str(cwd), seconds=seconds, variables=environment(devices)
    )
    print(json.dumps(asked), file=_server().stdin, flush=True)
    return Done(**json.loads(_server().stdout.readline()))


def environment(devices: int = 1) -> dict[str, str]:
    """Return the environment in which commands run this project's code on `devices` CPU devices.

    Commands compile fast or, if JAX_DISABLE_MOST_OPTIMIZATIONS is 0, as users' commands do.
    """
    variables = (
        {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | os.environ | {"PYTHONPATH": str(ROOT)}
    )
    flags = f"--xla_force_host_platform_device_count={devices}"
    if variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
        flags += f" {COMPILES_FAST}"
    return variables | {"XLA_FLAGS": flags}


def _serve() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    _import_all()
    importlib.import_module("gpt2.utils.code").hash_code()  # children reuse the hash
    gc.collect()
    gc.freeze()  # otherwise a child copies every page that the collector visits
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


def _import_all() -> None:
    """Import what commands import, except modules that define or read flags."""
    import grain  # noqa: F401
    import matplotlib.backends.backend_agg  # noqa: F401
    import tensorboardX  # noqa: F401
    import tensorflow_datasets  # noqa: F401

    import gpt2

    for module in pkgutil.walk_packages(gpt2.__path__, "gpt2."):
        source = Path(importlib.util.find_spec(module.name).origin).read_text()
        if any(word in source for word in ("flags.DEFINE", "gpt2.cli", "import cli")):
            continue
        try:
            importlib.import_module(module.name)
        except (
            ModuleNotFoundError
        ) as error:  # PyTorch is missing, which only the benchmark's peers need
            if error.name.startswith("gpt2"):
                raise


def _run(
    command: Sequence[str], cwd: str, seconds: int, variables: dict[str, str]
) -> dict:
    # A child starts with the current memory of this process, not with its peak memory.
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if not child:
            # The limit is in processor time, because commands take longer on a busy machine.
            # SIGXCPU comes first, and SIGKILL 9 seconds later.
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 9))
            signal.alarm(5 * seconds)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            os.environ.clear()
            os.environ.update(variables)
            import jax  # the server has imported it, with other variables

            unoptimized = variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0"
            jax.config.update("jax_disable_most_optimizations", unoptimized)
            code = _become(command, cwd)
            _end_as_the_interpreter()
            os._exit(code)
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code in (-signal.SIGXCPU, -signal.SIGALRM):
            code = LATE
        texts = {}
        for name, file in dict(stdout=stdout, stderr=stderr).items():
            file.seek(0)
            texts[name] = file.read().decode(errors="replace")
    return dict(code=code, **texts, memory=max(1024 * usage.ru_maxrss - held, 0))


def _become(command: Sequence[str], cwd: str) -> int:
    """Run a command in this process, and return its exit code."""
    os.chdir(cwd)
    name, *arguments = command
    try:
        if name.endswith(".py"):
            sys.argv = sys.orig_argv = [str(ROOT / name), *arguments]
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            sys.argv = [name, *arguments]
            sys.modules.pop(name, None)  # the server may have imported it
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        code = 1
    return code


def _end_as_the_interpreter() -> None:
    """Wait for threads and call exit handlers, as the interpreter does. Both may hang or print."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    _serve()
