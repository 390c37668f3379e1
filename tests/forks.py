"""Commands in processes that need no imports: a server forks itself for each of them.

A command takes seconds to import JAX and milliseconds to refuse an option. The server imports
everything but the commands themselves and what else defines or reads flags. A child then runs a
command's file as `python` would, from its first line to its exit.
"""

import atexit
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from gpt2.utils.launch import has_old_xla

ROOT = Path(__file__).parents[1]

# XLA:CPU compiles the small programs of tests four times as fast in one part, and without the
# pipelines that newer versions always use.
COMPILES_FAST = "--xla_cpu_parallel_codegen_split_count=1"
COMPILES_FAST += " --xla_cpu_use_fusion_emitters=false" if has_old_xla() else ""

STARTED = 77  # the exit code of a run that was let go up to its first computation
LATE = -1  # that of a command which took longer than it may


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int  # its exit code; `STARTED`, `LATE`, or minus the number of a signal
    stdout: str
    stderr: str
    memory: int  # the most that it held beyond what the server holds, in bytes


class Commands:
    """A server of commands on one CPU device."""

    def __enter__(self) -> "Commands":
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        return self

    def __exit__(self, *_) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=60)
        self._server.stdout.close()

    def run(
        self,
        *command: str,
        cwd: Path,
        seconds: float = 15.0,
        to_the_end: bool = False,
        devices: int = 1,
    ) -> Done:
        """Runs a file such as `train.py`, or a module such as `gpt2.generate`, with arguments.

        It is killed after `seconds` of processor time, or five times as many by the clock. Unless
        it runs `to_the_end`, it ends with `STARTED` where it would begin to compute.
        """
        asked = dict(command=command, cwd=str(cwd), seconds=seconds, to_the_end=to_the_end)
        asked["variables"] = environment(devices)
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        return Done(**json.loads(self._server.stdout.readline()))


def environment(devices: int = 1) -> dict[str, str]:
    """Returns the variables of commands: this project's code, on so many CPU devices.

    They compile fast, or as users' do where JAX_DISABLE_MOST_OPTIMIZATIONS is 0.
    """
    variables = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | os.environ | {"PYTHONPATH": str(ROOT)}
    flags = f"--xla_force_host_platform_device_count={devices}"
    if variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
        flags += f" {COMPILES_FAST}"
    return variables | {"XLA_FLAGS": flags}


def _serve() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    _import_all()
    importlib.import_module("gpt2.training.code").hash_code()  # which children remember
    gc.collect()
    gc.freeze()  # else a child copies every page that the collector looks at
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


def _import_all() -> None:
    """Imports what commands import, apart from modules that define flags."""
    import grain  # noqa: F401
    import tensorflow_datasets  # noqa: F401

    import gpt2

    for module in pkgutil.walk_packages(gpt2.__path__, "gpt2."):
        source = Path(importlib.util.find_spec(module.name).origin).read_text()
        if any(word in source for word in ("flags.DEFINE", "gpt2.cli", "import cli")):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # PyTorch, which only the benchmark's peers need
            if error.name.startswith("gpt2"):
                raise


def _run(
    command: Sequence[str], cwd: str, seconds: float, to_the_end: bool, variables: dict[str, str]
) -> dict:
    start, held = time.monotonic(), _resident("self")
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            os.environ.clear()
            os.environ.update(variables)
            import jax  # done, and had its own variables then

            unoptimized = variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0"
            jax.config.update("jax_disable_most_optimizations", unoptimized)
            code = _become(command, cwd, to_the_end)
            _end_as_the_interpreter()
            os._exit(code)
        most = 0
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            most = max(most, _resident(child))
            if _processor_seconds(child) > seconds or time.monotonic() - start > 5 * seconds:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.005)
        code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else LATE
        texts = {}
        for name, file in dict(stdout=stdout, stderr=stderr).items():
            file.seek(0)
            texts[name] = file.read().decode(errors="replace")
    return dict(code=code, **texts, memory=max(most - held, 0))


def _processor_seconds(process: int) -> float:
    """Returns what a process has computed: a busy machine gives it fewer seconds of the clock."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _resident(process: int | str) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    return 0


def _become(command: Sequence[str], cwd: str, to_the_end: bool) -> int:
    """Runs a command in this process, and returns its exit code."""
    os.chdir(cwd)
    name, *arguments = command
    if not to_the_end:
        _stop_before_computing()
    try:
        if name.endswith(".py"):
            sys.argv = sys.orig_argv = [str(ROOT / name), *arguments]
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            sys.argv = [name, *arguments]
            sys.modules.pop(name, None)  # which the server has imported
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # as the interpreter ends
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _end_as_the_interpreter() -> None:
    """Waits for threads, and calls what waits for the end: either may hang, or print."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _stop_before_computing() -> None:
    from gpt2.training.program import Program

    def stop(*_, **__):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STARTED)

    Program.init_state = stop
    Program.compile_train = stop


if __name__ == "__main__":
    _serve()
