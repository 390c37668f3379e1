"""The command line: flags, config files, the screen, and what a process does before its imports."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

import gpt2.cli as cli
from gpt2.config.options import DEFAULTS, OPTIONS
from gpt2.errors import UserError
from gpt2.utils import launch

ROOT = Path(__file__).parents[2]
DEFAULT = "configs/default.py"


@pytest.fixture
def parse(monkeypatch):
    """Parses flags of a command with `--config`, apart from those of other tests."""
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    cli.define_config()
    flags.DEFINE_flag(
        flags.Flag(flags.ArgumentParser(), None, "flagfile", None, ""), flags.FLAGS
    )

    def parse(*args):
        # Where ml_collections finds overrides.
        monkeypatch.setattr(sys, "argv", ["command", *args])
        return cli.parse_flags(sys.argv)

    return parse


def test_options_of_the_command_line_and_of_a_users_file_are_chosen(parse, tmp_path):
    parse("--config.model.num_layers=12", "--config.seed=0")
    assert cli.chosen_options() == {"model.num_layers", "seed"}
    file = tmp_path / "quickstart.py"  # not the one that is read without `--config`
    lines = ["from configs import default", "def get_config():"]
    lines += ["    config = default.get_config()", "    config.seed = 4"]
    lines += ["    return config"]
    file.write_text("\n".join(lines))
    parse(f"--config={file}")
    assert cli.chosen_options() == {"seed"}
    record = json.dumps(DEFAULTS.to_dict() | {"seed": 3})
    (tmp_path / "config.json").write_text(record)
    parse(f"--config={tmp_path}/config.json")
    assert cli.chosen_options() == {"seed"}


@pytest.mark.parametrize("form", ["--config={}", "--config {}", "--flagfile={}.flags"])
def test_the_record_of_a_run_is_a_config_and_overrides_come_on_top(
    parse, tmp_path, form
):
    record = tmp_path / "config.json"
    options = {"seed": 7, "model": {"vocab_size": 257, "num_layers": 3, "dropout": 0}}
    record.write_text(json.dumps(options))
    Path(f"{record}.flags").write_text(
        f"--config={record}\n--config.train.num_steps=9\n"
    )
    parse(
        *form.format(record).split(), "--config.model.dropout=0.5", "--config.seed", "8"
    )
    config = cli.parse_config()
    assert (config.seed, config.model.num_layers, config.model.vocab_size) == (
        8,
        3,
        257,
    )
    assert (config.model.dropout, config.model.num_heads) == (0.5, 12)  # a default
    of_file = {"train.num_steps": 9} if "flagfile" in form else {}
    assert cli.overrides() == {"model.dropout": 0.5, "seed": 8} | of_file


def test_without_a_config_file_options_are_the_quickstarts(parse):
    parse("--config.seed=3")
    assert (cli.config_name(), cli.parse_config().seed) == ("quickstart", 3)


def test_the_argument_of_a_config_file_is_no_part_of_its_name(parse, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def get_config(rate='0'):\n    return {'seed': len(rate)}\n")
    parse(f"--config={path}:a/0.5")
    assert (cli.config_name(), cli.parse_config().seed) == ("mine", 5)


def test_a_config_file_may_set_a_few_options_in_dicts_and_numbers_of_numpy(
    parse, tmp_path
):
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\ndef get_config():\n    return {'seed': np.int64(3)}\n"
    )
    parse(f"--config={path}", "--config.train.num_steps=5000", "--noconfig.model.bias")
    config = cli.parse_config()
    assert (config.seed, config.train.num_steps, config.model.bias) == (3, 5000, False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--num_steps=60", "mean --config.train.num_steps?"),
        ("--config.fsdp=2", "mean --config.parallel.fsdp?"),
        ("--config.optim.lr=1", "mean --config.optim.learning_rate?"),
        ("--config.optim.min_lr=1", "mean --config.optim.end_fraction?"),
        ("--config.data.block_size=1", "mean --config.model.context_length?"),
        ("--block_size=1", "mean --config.model.context_length?"),
        ("--init_from=gpt2", "mean --config.train.init_from?"),
        ("--init_from=resume", "same --workdir"),
        ("--out_dir=out", "mean --workdir?"),
        ("--config.model.n_layer=1", "mean --config.model.num_layers?"),
        ("--config.model.num_heads[0]=3", "mean --config.model.num_heads?"),
        ("--frobnicate=1", "frobnicate"),
        ("--config.data.batch_size=x", "data.batch_size=x is not a whole number"),
        ("--config.model.bias=maybe", "model.bias=maybe is not True or False"),
        ("--config=none.py", "none.py"),
        ("--flagfile=none", "none"),
    ],
)
def test_mistakes_in_flags_are_told_with_the_nearest_name(parse, given, told):
    with pytest.raises(UserError) as error:
        parse("--config", DEFAULT, given)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_help_shows_own_flags_first_and_then_every_option_with_value_and_meaning():
    given = ["--help", "--config=configs/quickstart.py", "--config.optim.beta1=0.5"]
    command = [sys.executable, "train.py", *given]
    text = subprocess.check_output(command, cwd=ROOT, text=True)
    own, listed = text.split("Options of --config:\n")
    assert "--workdir" in own and "model.num_layers=" not in own
    assert max(map(len, listed.splitlines())) <= 80
    listed = listed.replace("\n      ", " ").split("\n  ")
    listed[0] = listed[0].strip()
    assert {line.partition("=")[0] for line in listed} == {*OPTIONS}
    values = {line.partition("  ")[0] for line in listed}
    assert {"model.num_layers=4", "optim.beta1=0.5"} <= values
    meaning = "optim.weight_decay=0.1  weight decay of kernels and embeddings"
    assert any(line.startswith(meaning) for line in listed)


def test_commands_prepare_their_process_before_they_import_jax():
    """What `python -m` imports before a command's first line must not bring JAX."""
    packages = "gpt2.lab.benchmark, gpt2.data, gpt2.evals, gpt2.hf"
    program = f"import sys, {packages}, gpt2.utils.launch; print('jax' in sys.modules)"
    assert (
        subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
    )
    modules = ["data/prepare", "generate", "hf/__main__"]
    modules += ["lab/benchmark/__main__", "lab/plan/__main__"]
    commands = ["train.py", "eval.py", *(f"gpt2/{module}.py" for module in modules)]
    for path in commands:
        _docstring, first, second, *_ = ast.parse((ROOT / path).read_text()).body
        assert ast.unparse(first) == "from gpt2.utils import launch", path
        assert ast.unparse(second).endswith("launch.prepare_process()"), path


COMMAND = """
from absl import flags
from gpt2 import cli, signals
signals.begin_process()

def define_flags():
    flags.DEFINE_integer("steps", 1, "How many.")

def main(*files):
    print("3.79 ± 0.01 µs", flags.FLAGS.steps, *files, flush=True)
    {body}

cli.run(main, define_flags, takes_files=True)
"""


def run_command(*arguments, body="return None", encoding="utf-8", **streams):
    program = COMMAND.format(body=body)
    env = os.environ | {"PYTHONIOENCODING": encoding, "JAX_PLATFORMS": "cpu"}
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE) | streams
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, timeout=120, **streams)


def test_a_command_parses_runs_and_ends_with_the_code_of_its_main():
    done = run_command("--steps=2", "a", body="return 5", encoding="ascii")
    assert (done.returncode, done.stdout) == (5, b"3.79 ? 0.01 ?s 2 a\n"), done.stderr
    done = run_command("--help")
    assert done.returncode == 0 and b"--steps: How many." in done.stdout
    done = run_command("--stps=2")
    assert (done.returncode, done.stdout) == (2, b"") and b"stps" in done.stderr


def test_a_backend_that_jax_has_not_is_a_line():
    body = "import jax; jax.config.update('jax_platforms', 'wrong'); jax.devices()"
    done = run_command(body=body)
    assert done.returncode == 2 and done.stderr.startswith(b"error: Unable to")
    assert done.stderr.count(b"\n") == 1


def test_a_screen_that_takes_no_line_ends_no_program():
    with open("/dev/full", "wb") as full:
        body = "from gpt2.errors import log; log('lost'); log('x', cli.sys.stdout); return 5"
        done = run_command(body=f"pass\n    {body}", stderr=full)
    assert done.returncode == 5


def test_standard_streams_that_are_closed_are_opened_before_other_files():
    program = "from gpt2.utils import launch\nlaunch.prepare_process()\nimport sys\n"
    program += "print('x'); print('x', file=sys.stderr)\n"
    program += "sys.exit(open('train.py').fileno() + len(sys.stdin.read()))"
    shell = 'exec "$0" "$@" <&- >&- 2>&-'
    command = ["sh", "-c", shell, sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT).returncode == 3


def run_early(program):
    """Runs a program whose Ctrl-C is not ignored, as that of jobs in the background is."""
    start = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    start += "from gpt2 import signals\nfrom gpt2.utils import launch\n"
    command = [sys.executable, "-c", start + program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_while_modules_are_imported_is_a_line_and_130():
    program = """
launch.prepare_process()
{}
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("caught")
"""
    assert run_early(program.format("")) == (130, "", "stopped by SIGINT\n")
    assert run_early(program.format("signals.raise_at_interrupt()")) == (
        0,
        "caught\n",
        "",
    )


@pytest.mark.parametrize(
    ("modules", "variable", "file", "platforms"),
    [
        ({"libtpu"}, None, None, "cpu"),
        ({"libtpu"}, "JAX_PLATFORMS", None, ""),  # what a user sets wins
        ({"libtpu"}, None, "/dev/vfio/1", None),
        ({"libtpu", "jax_plugins"}, None, None, None),
    ],
)
def test_libtpu_is_not_asked_for_tpus_that_cannot_be_here(
    monkeypatch, modules, variable, file, platforms
):
    program = f"""
import fnmatch, glob, importlib.util
importlib.util.find_spec = lambda name: name in {modules}
glob.glob = lambda pattern: fnmatch.filter({[file] if file else []}, pattern)
os.environ[launch._STARTED_AGAIN] = "1"
launch.prepare_process()
print(os.environ.get("JAX_PLATFORMS"))
"""
    for name in [
        name for name in os.environ if "TPU" in name or name == "JAX_PLATFORMS"
    ]:
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "")
    assert run_early(program) == (0, f"{platforms}\n", "")


def test_flags_for_gpus_are_set_where_their_compiler_is_and_those_of_a_user_win(
    monkeypatch,
):
    flag = "--xla_gpu_dot_merger_threshold_mb"
    program = """
import importlib.util
importlib.util.find_spec = lambda name: name in {}
os.environ[launch._STARTED_AGAIN] = os.environ["JAX_PLATFORMS"] = ""
launch.prepare_process()
print(os.environ.get("XLA_FLAGS"))
"""

    def told(*modules):
        code, out, _ = run_early(program.format({"jax_plugins", *modules}))
        assert code == 0
        return out.strip()

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert f"{flag}=0" in told("jax_cuda12_plugin").split()
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=mine")
    flags = told("jax_cuda13_plugin")
    assert flags.split()[0] == f"{flag}=mine" and flags.count(flag) == 1
    assert "--xla_gpu_enable_triton_gemm=false" in flags and told() == f"{flag}=mine"


def test_programs_are_not_cached_for_a_user_without_a_home(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    program = """
import pwd
pwd.getpwuid = lambda number: {}[number]
os.environ[launch._STARTED_AGAIN] = "1"
launch.prepare_process()
print(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
"""
    assert run_early(program) == (0, "None\n", "")


def test_cpu_settings_are_asked_for_once_beside_others(monkeypatch):
    monkeypatch.setattr(launch, "has_old_xla", lambda: True)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    asked = launch.cpu_environment()
    assert "glibc.malloc.hugetlb=1" in asked["GLIBC_TUNABLES"]
    assert asked["XLA_FLAGS"].startswith(
        "--xla_cpu_max_isa=AVX2 --xla_cpu_scheduler_type="
    )
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert launch.cpu_environment() == {}
    assert launch.environment_to_measure()["JAX_ENABLE_COMPILATION_CACHE"] == "0"


def test_ctrl_c_between_a_start_and_the_next_is_not_lost(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if not launch.cpu_environment().get("GLIBC_TUNABLES"):
        pytest.skip("needs glibc's tunables, for which a program starts again")
    program = """
if launch._STARTED_AGAIN not in os.environ:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.raise_signal(signal.SIGINT)  # after it was blocked, before the next start
launch.prepare_process()
"""
    assert run_early(program) == (130, "", "stopped by SIGINT\n")
