"""Prepares a process before its slow imports: memory, a cache of compiled programs, and Ctrl-C.

Every command calls `prepare_process` first. docs/performance.md, Settings, says what each setting
saves.

Huge pages: glibc requests pages of 2 MB, since the kernel clears the temporary memory of every
step page by page (docs/performance.md, XLA:CPU note 13).

Kept memory: freed blocks of up to 256 MB stay with the process. Larger blocks go back to the
kernel, since fragmentation would otherwise hold twice what a step of 124M needs.

Order: XLA orders programs for little memory (docs/performance.md, XLA:CPU note 12).

Ctrl-C: a line in place of a traceback, whatever the process is doing. It ends imports, raises
KeyboardInterrupt where work has to tidy up, ends the process at once where it has not, and at its
second press in any case, also after all is done.

On NVIDIA GPUs, products that share an operand stay apart, and gathers of a layer's kernels do not
wait for each other (docs/performance.md, GPUs and TPUs).
"""

import contextlib
import ctypes
import glob
import importlib.util
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_KEPT = 2**28  # bytes
_TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": _KEPT,
    "glibc.malloc.trim_threshold": _KEPT,
}
_STARTED_AGAIN = "GPT2_STARTED_AGAIN"  # for the second start: names of `_chosen`
_CACHE, _LEAST_SECONDS = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
)
_chosen: dict[str, str] = {}  # variables of JAX that this process set
_set_flags: list[str] = []  # of XLA for GPUs, by this process
_GPU_FLAGS = (
    "--xla_gpu_dot_merger_threshold_mb=0",
    "--xla_gpu_all_gather_combine_threshold_bytes=6000000",
)
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")  # of TPUs
_PCI_VENDORS = "/sys/bus/pci/devices/*/vendor"
_GOOGLE = "0x1ae0"  # the vendor of TPUs, as JAX looks for them
_SAME_PRESS = 0.3  # seconds within which a launcher may pass on what the terminal has sent already
_LAST_SECONDS = 1.0  # in which last words are found and printed: disks and screens may hang
_leaving = threading.Lock()  # of the thread that prints them; never released
_is_watched = False  # whether a thread listens for signals
_last_words: list[Callable[[], str]] = []
_imported = time.monotonic()
_ORDER = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"


def prepare_process() -> None:
    """Makes the memory settings of a CPU run, and gives JAX a directory for compiled programs.

    The C library reads its settings when a process starts. If they are missing, the program starts
    itself again, once, unless it has imported JAX already. The restart loses what the process
    holds: call this before anything else, slow imports included. Where JAX may find an
    accelerator, there are no memory settings to make.

    libtpu, which plans for TPUs on any machine, is not asked for TPUs where there are none. It
    would print lines that look like failures.

    Until `take_interrupts`, Ctrl-C ends the process with a line: imports turn the usual exception
    into tracebacks of their own.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    if _STARTED_AGAIN in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        earlier = set(os.environ[_STARTED_AGAIN].split()) & set(os.environ)
        _chosen.update({name: os.environ[name] for name in earlier})
    if "JAX_PLATFORMS" not in os.environ and _has_libtpu_alone():
        _chosen["JAX_PLATFORMS"] = os.environ["JAX_PLATFORMS"] = "cpu"
    if not _may_have_accelerators():
        missing = _missing_tunables()
        once = _STARTED_AGAIN not in os.environ  # even where the settings get lost
        if missing and once and "jax" not in sys.modules:
            os.environ |= missing | {_STARTED_AGAIN: " ".join(_chosen)}
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # waits for the next start
            os.execv(sys.executable, sys.orig_argv)
        os.environ |= _missing_order()
    if any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        flags = os.environ.get("XLA_FLAGS", "")
        # What a user sets wins.
        _set_flags[:] = [flag for flag in _GPU_FLAGS if flag.partition("=")[0] not in flags]
        os.environ["XLA_FLAGS"] = " ".join([flags, *_set_flags]).strip()
    if _CACHE not in os.environ:
        place = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        chosen = {_CACHE: str(place / "gpt2-jax" / "xla"), _LEAST_SECONDS: "0.5"}
        _chosen.update({name: chosen[name] for name in chosen if name not in os.environ})
        os.environ |= _chosen


def take_interrupts() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, for work that has to tidy up.

    A second one ends the process at once. A thread sees to that, since the main thread acts on
    signals only between two lines of Python, not while XLA compiles or a device is waited for.
    """
    global _is_watched
    if _is_watched or signal.getsignal(signal.SIGINT) is not _stop:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A child's signals are its own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    _is_watched = True
    threading.Thread(target=_watch_interrupts, args=(reader,), name="signals", daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_on_interrupt() -> None:
    """Lets Ctrl-C end the process with a line, at once. For work with nothing to tidy up.

    An exception may come where it is printed and lost, such as in a callback of JAX.
    """
    if _is_watched:
        signal.signal(signal.SIGINT, _stop)


def ignore_interrupts() -> None:
    """Lets the first Ctrl-C do nothing: all is done, and an exception would only spoil the end."""
    if _is_watched:
        signal.signal(signal.SIGINT, _do_nothing)  # SIG_IGN would hide the second from the thread


def say_when_left(words: Callable[[], str]) -> None:
    """Lets a Ctrl-C that ends the process at once add what `words` returns to its line.

    A thread calls it. It may fail or hang, and is then left out.
    """
    _last_words[:] = [words]


def seconds_since_start() -> float:
    """Returns how old this process is. Where it started itself again, both starts count."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.monotonic() - _imported


def _watch_interrupts(reader: int) -> None:
    """Ends the process at the first or the second SIGINT that `reader` gives."""
    first: float | None = None
    while number := os.read(reader, 1):
        if number[0] != signal.SIGINT:
            continue
        if signal.getsignal(signal.SIGINT) is _stop:  # to which the main thread may not come
            _stop(signal.SIGINT, None)
        now = time.monotonic()
        if first is not None and now - first > _SAME_PRESS:
            _end(f"left at once by a second SIGINT{_find_last_words()}")
        first = now if first is None else first


def _find_last_words() -> str:
    if not _last_words:
        return ""
    found: list[str] = []

    def find() -> None:
        with contextlib.suppress(Exception):  # of any kind: this is the only way to leave
            found.extend(words() for words in _last_words)

    thread = threading.Thread(target=find, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread starts once the interpreter ends
        thread.start()
        thread.join(_LAST_SECONDS)
    return "".join(found)


def _do_nothing(*_: object) -> None:
    pass


def _stop(*_: object) -> None:
    _end(f"stopped by SIGINT{_find_last_words()}")


def _end(line: str) -> None:
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # which a progress bar hides
    try:
        if _leaving.acquire(timeout=_LAST_SECONDS):  # two threads may hear of one press
            os.write(2, f"{show_cursor}{line}\n".encode())
    finally:  # nobody may read it
        os._exit(128 + signal.SIGINT)


def environment_to_measure() -> dict[str, str]:
    """Returns the variables of a process that is timed: a CPU run's, without this one's choices."""
    ours = {_STARTED_AGAIN} | {_CACHE, _LEAST_SECONDS} & _chosen.keys()
    rest = {name: value for name, value in os.environ.items() if name not in ours}
    return rest | cpu_environment()


def cpu_environment() -> dict[str, str]:
    """Returns the variables of a CPU run that this process lacks, for processes that it starts."""
    return _missing_tunables() | _missing_order()


def describe_settings() -> str:
    """Returns the settings that `prepare_process` made, as text; empty if there are none."""
    settings = []
    if platforms := _chosen.get("JAX_PLATFORMS"):
        settings.append(f"JAX_PLATFORMS={platforms}, since there is libtpu and no TPU")
    if _set_flags and _may_have_accelerators():
        settings.append(f"XLA_FLAGS={' '.join(_set_flags)}")
    elif _STARTED_AGAIN in os.environ:
        settings.append(
            "huge pages, freed blocks kept (the program started itself again with GLIBC_TUNABLES)"
        )
    return "; ".join(settings)


def release_free_memory() -> None:
    """Returns freed memory to the kernel: glibc keeps hundreds of megabytes after compilation."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _may_have_accelerators() -> bool:
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms != "cpu"
    return any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def _has_libtpu_alone() -> bool:
    """Whether libtpu is the only plugin of JAX here, and no TPU is.

    libtpu reaches a TPU through the device files below. Google's machines and runtimes that have
    one also set variables.
    """
    if importlib.util.find_spec("jax_plugins") or not importlib.util.find_spec("libtpu"):
        return False
    # JAX sets the one that is left out where it finds no TPU.
    told = {name for name in os.environ if re.match("(CLOUD_|JAX_FORCE_|LIB)?TPU", name)}
    if told - {"TPU_SKIP_MDS_QUERY"} or any(map(glob.glob, _TPU_FILES)):
        return False
    try:
        vendors = {Path(path).read_text().strip() for path in glob.glob(_PCI_VENDORS)}
    except OSError:  # not to be read, or gone meanwhile
        return False
    return _GOOGLE not in vendors


def _missing_tunables() -> dict[str, str]:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    missing = [f"{name}={value}" for name, value in _TUNABLES.items() if name not in tunables]
    if not (_has_glibc() and missing):
        return {}
    return {"GLIBC_TUNABLES": ":".join([tunables, *missing]).lstrip(":")}


def _missing_order() -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    if not has_old_xla() or "xla_cpu_scheduler_type" in flags:
        return {}
    return {"XLA_FLAGS": f"{flags} {_ORDER}".lstrip()}


def _has_glibc() -> bool:
    """Whether the C library knows the tunables, and takes thresholds of more than 32 MB."""
    name, release = platform.libc_ver()
    return name == "glibc" and tuple(map(int, release.split(".")[:2])) >= (2, 35)


def has_old_xla() -> bool:
    """Returns whether XLA is that of JAX 0.10, whose flags newer ones do not know.

    An unknown flag in XLA_FLAGS ends the process.
    """
    from importlib.metadata import version  # slow: not before Ctrl-C is a line

    return version("jaxlib").startswith("0.10.")
