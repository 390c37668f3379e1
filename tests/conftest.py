"""Settings of all tests: eight simulated devices, and one cache of compiled programs."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from gpt2.utils.launch import cpu_environment
from tests.forks import COMPILES_FAST

# These variables must be set before any module imports JAX.
_FLAGS = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _FLAGS:
    _FLAGS = f"{_FLAGS} --xla_force_host_platform_device_count=8"
if COMPILES_FAST not in _FLAGS:
    _FLAGS = f"{_FLAGS} {COMPILES_FAST}"
os.environ["XLA_FLAGS"] = _FLAGS.strip()
os.environ["JAX_PLATFORMS"] = "cpu"
_SETTINGS = cpu_environment()  # without these, train.py would restart itself
os.environ |= {name: _SETTINGS[name] for name in _SETTINGS if name != "XLA_FLAGS"}
_CACHE = Path(tempfile.gettempdir()) / f"gpt2-tests-{os.getuid()}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("GPT2_DATA_DIR", str(_CACHE / "data"))

# Jobs in the background ignore Ctrl-C, and processes that tests start would also ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The files that take longest run first. Otherwise, the last of them would run in one process while
# other processes are idle.
LONGEST = "train against_numpy steps layouts model packing switches workdir ops"


def pytest_xdist_auto_num_workers() -> int:
    """Use a process for each core, but two to six. Each needs up to 2 GB of memory."""
    cores = os.cpu_count() or 2
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    wanted = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")  # xdist's own variable
    return int(wanted or min(max(cores, 2), 6))


def pytest_collection_modifyitems(items):
    names = [f"test_{name}.py" for name in LONGEST.split()]
    items.sort(key=lambda item: (*names, item.path.name).index(item.path.name))


def pytest_collection_finish():
    """Collect garbage less often, and never visit the objects of imports.

    Tracing allocates many objects and frees few.
    """
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


@pytest.fixture(scope="session", autouse=True)
def compiles_fast():
    """Turn off most of LLVM's optimizations, which take longer than the tests' programs run."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def make(tmp_path):
    """Return a function that prepares a corpus in the test's directory, and returns its tokens."""
    from gpt2.config import DataConfig
    from gpt2.data import prepare_dataset

    def make(corpus, tokenizer="byte", val_fraction=0.1):
        options = dict(tokenizer=tokenizer, data_dir=str(tmp_path / "prepared"))
        dataset = prepare_dataset(
            DataConfig(corpus=corpus, val_fraction=val_fraction, **options)
        )
        (_, tokens) = dataset.parts[""]
        return tokens

    return make


@pytest.fixture(scope="module")
def compiles_fully(compiles_fast):
    """Turn LLVM's optimizations on again, for modules that test the compiled program itself.

    Runs that these modules start compile in the same way as users' runs. This process still has
    `COMPILES_FAST`, because XLA reads its flags only once.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
        yield
    jax.config.update("jax_disable_most_optimizations", True)
