"""Mistakes in flags and in config files are one line that names them."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

import gpt2.cli as cli
from gpt2 import launch
from gpt2.errors import UserError, tell
from gpt2.utils.text import counted

ROOT = Path(__file__).parents[1]


@pytest.fixture
def parse(monkeypatch):
    """Parses flags of a command with `--config`, apart from those of other tests."""
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    cli.define_config()

    def parse(*args):
        monkeypatch.setattr(sys, "argv", ["command", *args])  # where ml_collections finds overrides
        return cli._parse_flags(sys.argv)

    return parse


@pytest.mark.parametrize("form", [["--config=none.py"], ["--config", "none.py"]], ids=len)
def test_a_config_that_is_no_file_is_named_in_both_forms(parse, form):
    with pytest.raises(UserError, match=r"--config=none\.py is not a file"):
        parse(*form)


def test_a_flag_is_not_taken_for_the_value_of_another(parse):
    flags.DEFINE_string("visualize", None, "", flag_values=flags.FLAGS)
    told = r"^--visualize has no value: --config\.seed=1 follows it\. Write --visualize=VALUE\.$"
    with pytest.raises(UserError, match=told):
        parse("--visualize", "--config.seed=1")
    for form in ("-config.seed=1", "--visualize=wte"):
        with pytest.raises(UserError, match="--visualize has no value"):
            parse("--visualize", form)
    parse("--visualize=--config.seed=1")
    for value in ("-- wte", "--x**2 + y", "--unknown", "-1"):
        parse("--visualize", value)
        assert flags.FLAGS.visualize == value


def test_a_folder_of_a_run_and_files_of_other_kinds_are_told(parse, tmp_path):
    run = tmp_path / "quickstart"  # as a file of configs/ is called
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "options.txt").write_text(f"open('{run}/witness', 'w')\n")
    (run / "options.py").write_text("seed = 0\n")
    with pytest.raises(UserError, match=r"options\.py defines no get_config\(\)"):
        parse(f"--config={run}/options.py")
    with pytest.raises(UserError, match=r"txt is neither Python nor the config\.json .* See conf"):
        parse(f"--config={run}/options.txt")
    (run / "config.json").write_text("{}")
    for given in ("", "/metrics.jsonl", "/options.txt"):
        with pytest.raises(UserError, match=rf"{given} is .*Did you mean {run}/config\.json\?"):
            parse(f"--config={run}{given}")
    assert not (run / "witness").exists()


@pytest.fixture
def record(tmp_path):
    """The config.json of a run with a few options of its own."""
    options = {"seed": 7, "model": {"vocab_size": 257, "num_layers": 3, "dropout": 0}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(options))
    return path


@pytest.mark.parametrize(
    "form", ["--config={}", "--config {}", "-config={}", "--flagfile={}.flags"]
)
def test_the_record_of_a_run_is_a_config_and_overrides_come_on_top(parse, record, form):
    Path(f"{record}.flags").write_text(f"--config={record}\n")
    flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, "flagfile", None, ""), flags.FLAGS)
    parse(*form.format(record).split(), "--config.model.dropout=0.5", "--config.seed=8")
    config = cli.parse_config()
    assert (config.seed, config.model.num_layers, config.model.vocab_size) == (8, 3, 257)
    assert (config.model.dropout, config.model.num_heads) == (0.5, 12)  # a default


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--config.seed=x", "--config.seed=x is not of type int."),
        ("--config.sed=1", "no option --config.sed. Did you mean --config.seed?"),
        ("--config=none.json", "--config=none.json is not a file."),
    ],
)
def test_mistakes_beside_a_record_are_told_as_beside_a_config(parse, record, given, told):
    with pytest.raises(UserError, match=re.escape(told)):
        parse(f"--config={record}", given)


def test_a_record_with_a_mistake_is_told_before_its_overrides(parse, record):
    record.write_text('{"seed": 0, "train": 5}')
    with pytest.raises(UserError, match=r"config\.json: train=5 is no group of options"):
        parse(f"--config={record}", "--config.train.num_steps=3")


def test_a_record_names_no_workdir(parse, record):
    parse("--config", cli.configs.default.__file__)
    assert cli.config_name() == "default"
    parse(f"--config={record}")
    with pytest.raises(UserError, match=r"is the record of a run.*Give --workdir\."):
        cli.config_name()


def test_a_records_vocabulary_is_not_taken_for_another_tokenizers(parse, record):
    parse(f"--config={record}", "--config.data.tokenizer=char")
    with pytest.raises(UserError, match=r"vocab_size=257 of the record.*model\.vocab_size=0\."):
        cli.parse_config()


@pytest.mark.parametrize("size", [0, 300])
def test_a_records_vocabulary_gives_way_to_a_given_one(parse, record, size):
    given = ["--config.data.tokenizer=char", f"--config.model.vocab_size={size}"]
    parse(f"--config={record}", *given)
    assert cli.parse_config().model.vocab_size == size


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("gpt2.data.prepare", "--config: File of options, see configs/"),
        ("gpt2.benchmark", "--peers: Any of"),
        ("gpt2.generate", "--temperature: "),
        ("gpt2.hf", "--workdir: "),
    ],
)
def test_help_succeeds_and_lists_the_flags_of_the_command(command, flag):
    done = subprocess.run(
        [sys.executable, "-m", command, "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0
    assert flag in " ".join(done.stdout.split())
    assert "None" not in done.stdout


def test_commands_prepare_their_process_before_they_import_jax():
    """What `python -m` imports before a command's first line must not bring JAX."""
    packages = "gpt2.benchmark, gpt2.data, gpt2.evals, gpt2.hf"
    program = f"import sys, {packages}, gpt2.launch; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
    modules = ["benchmark/__main__", "data/prepare", "evals/harness", "generate", "hf/__main__"]
    modules += ["profile/__main__"]
    commands = ["train.py", "eval.py", *(f"gpt2/{module}.py" for module in modules)]
    for path in commands:
        _docstring, first, second, *_ = ast.parse((ROOT / path).read_text()).body
        assert ast.unparse(first) == "from gpt2 import launch", path
        assert ast.unparse(second).endswith("launch.prepare_process()"), path


def test_a_config_that_ends_the_program_is_no_help(parse, tmp_path):
    config, options = tmp_path / "config.py", tmp_path / "options"
    config.write_text("import sys\ndef get_config():\n    sys.exit('set DATA_DIR first')")
    options.write_text(f"--config={config}\n")
    flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, "flagfile", None, ""), flags.FLAGS)
    with pytest.raises(SystemExit, match="set DATA_DIR first"):
        parse(f"--flagfile={options}")


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("import not_a_module", "ModuleNotFoundError.*not_a_module"),
        ("def get_config(:", "SyntaxError"),
        ("def get_config():\n    return {}['depth']", "KeyError.*depth"),
        ("def get_config():\n    pass", r"TypeError: get_config\(\) returned None"),
        ("import sys\ndef get_config():\n    sys.exit(0)", "SystemExit: 0"),
        ("class Mine(Exception): pass\nraise Mine('no data')", "Mine: no data"),
    ],
)
def test_errors_inside_a_config_file_are_a_line_that_names_it(parse, tmp_path, text, about):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"{path} fails \({about}") as error:
        parse(f"--config={path}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("optim=3", "has optim=3 in place of a group"),
        ("optim=None", "has optim=None in place of a group"),
        ("optim=dict(name='adam')", r"lacks optim\.adam_learning_rate"),
        ("parallel=dict(default.get_config().parallel, rules=0)", r"has parallel\.rules=0 in"),
    ],
)
def test_what_is_no_group_is_told_before_it_is_overridden(parse, tmp_path, text, told):
    path = tmp_path / "broken.py"
    path.write_text(
        "from configs import default\ndef get_config():\n"
        f"    return default.get_config().to_dict() | dict({text})"
    )
    with pytest.raises(UserError, match=rf"{path} {told}.*\. Start from configs/default\.py"):
        parse(f"--config={path}", "--config.optim.eps=1e-5")


def test_options_are_overridden_and_unknown_ones_refused(parse):
    config = cli.configs.default.__file__
    parse("--config", config, "--config.seed=3")
    assert flags.FLAGS.config.seed == 3
    with pytest.raises(UserError, match=r"config\.sed.*--config\.seed"):
        parse("--config", config, "--config.sed=3")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--num_steps=60", "no option --num_steps. Did you mean --config.train.num_steps?"),
        ("--parallel.fsdp=2", "no option --parallel.fsdp. Did you mean --config.parallel.fsdp?"),
        ("--config.fsdp=2", "no option --config.fsdp. Did you mean --config.parallel.fsdp?"),
        ("--noconfig.logging.wandbx", "Did you mean --config.logging.wandb?"),
        ("--confg=x", "no option --confg. Did you mean --config?"),
        ("--accumulate=2", "Did you mean --config.train.accumulate_steps?"),
        ("--lr=1", "no option --lr. Did you mean --config.optim.learning_rate?"),
        ("--config.optim.lr=1", "Did you mean --config.optim.learning_rate?"),
        ("--config.model.n_layer=1", "Did you mean --config.model.num_layers?"),
        ("--frobnicate=1", "no option --frobnicate. See configs/default.py and --help."),
        ("--config.model=1", "--config.model is a group of options. Name one, such as"),
        ("--config.=1", "--config. names no option. See configs/default.py and --help."),
        ("--config.data.batch_size=x", "batch_size=x is not of type int. Give a whole number"),
        ("--config.optim.learning_rate=x:", "=x: is not of type float. Give a number"),
        ("--config.logging.wandb=maybe", "wandb=maybe is not of type bool. Give True or False."),
    ],
)
def test_short_names_and_wrong_types_are_told_in_our_words(parse, given, told):
    with pytest.raises(UserError, match=re.escape(told)):
        parse("--config", cli.configs.default.__file__, given)


@pytest.mark.parametrize("form", [["--config.parallel.data=-1"], ["--config.parallel.data", "-1"]])
def test_a_value_may_be_negative_in_both_forms(parse, form):
    parse("--config", cli.configs.default.__file__, *form)
    assert flags.FLAGS.config.parallel.data == -1


def test_numbers_are_read_as_absl_reads_them(parse):
    parse("--config", cli.configs.default.__file__, "--config.seed=0x10")
    assert flags.FLAGS.config.seed == 16


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--steps", "-x"], "--steps=-x is not of type int. Give a whole number, such as 1000."),
        (["--flagfile={file}"], "--steps=many is not of type int."),
        (["--now=maybe"], "--now=maybe is not of type bool."),
    ],
)
def test_wrong_types_of_flags_are_told_however_they_are_given(monkeypatch, tmp_path, given, told):
    (tmp_path / "flags").write_text("--steps=many\n")
    define_flags_of_a_command(monkeypatch)
    with pytest.raises(UserError, match=re.escape(told)):
        cli._parse_flags(["command", *(arg.format(file=tmp_path / "flags") for arg in given)])


def test_a_boolean_flag_leaves_the_argument_after_it_alone(monkeypatch):
    define_flags_of_a_command(monkeypatch)
    assert cli._parse_flags(["command", "--now", "train", "--steps", "-5"]) == ["command", "train"]
    assert (flags.FLAGS.now, flags.FLAGS.steps) == (True, -5)
    assert cli._parse_flags(["command", "--nonow"]) == ["command"]
    assert flags.FLAGS.now is False


def define_flags_of_a_command(monkeypatch):
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    flags.DEFINE_integer("steps", 1, "", flag_values=flags.FLAGS)
    flags.DEFINE_bool("now", False, "", flag_values=flags.FLAGS)


def test_commands_without_a_config_do_not_offer_its_options(monkeypatch):
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    flags.DEFINE_string("workdir", None, "", flag_values=flags.FLAGS)
    for given, told in (("--num_steps=1", "See --help"), ("--config.seed=1", "See --help")):
        with pytest.raises(UserError, match=told):
            cli._parse_flags(["command", given])


def test_one_is_counted_in_the_singular():
    counts = [counted(number, "device") for number in (0, 1, 2048)]
    assert counts == ["0 devices", "1 device", "2,048 devices"]


def test_ctrl_c_while_xla_compiles_is_a_line_and_130():
    program = """
import signal, threading, jax, jax.numpy as jnp
from gpt2.errors import exit_on_user_error

@exit_on_user_error
def main():
    x = jnp.ones((64, 64))
    for width in range(40):  # in turns, so that the end falls into one
        def layers(x, width=width):
            for i in range(60):
                x = jnp.sin(x @ x) * (i + width)
            return x
        threading.Thread(target=jax.jit(layers).lower(x).compile, daemon=True).start()
    signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        # JAX would leave what it is just writing cut short, for the next that reads it.
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    assert (done.returncode, done.stderr) == (130, "stopped by SIGINT\n")


@pytest.mark.parametrize("screen", ["full disk", "no reader"])
def test_a_screen_that_takes_no_line_neither_ends_a_program_nor_alters_its_exit_code(screen):
    program = """
import sys
from gpt2.errors import UserError, exit_on_user_error, tell, warn
from gpt2.telemetry.progress import Progress

@exit_on_user_error
def main():
    warn("lost")
    with Progress(total=10) as shown:
        shown.write(1, {"train/loss": 1.0})
        shown.say("lost")
    tell("lost", sys.stdout)
    raise UserError("lost", "lost", exit_code=5)

main()
"""
    if screen == "full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=writer, stderr=writer, cwd=ROOT, timeout=60)
    os.close(writer)
    assert done.returncode == 5


def test_a_reader_that_wants_no_more_is_left_without_a_word():
    program = """
from gpt2.errors import exit_on_user_error

@exit_on_user_error
def main():
    while True:
        print("more")

main()
"""
    for command in ("-c", program), (str(ROOT / "train.py"), "--help"):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, *command], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, timeout=60
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")


def test_what_a_screen_cannot_show_ends_no_command():
    program = """
from gpt2 import cli
cli.parse()
print("3.79 ± 0.01 µs")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stdout) == (0, b"3.79 ? 0.01 ?s\n"), done.stderr


def test_a_pipe_that_is_not_the_screen_keeps_its_traceback():
    program = """
import os
from gpt2.errors import exit_on_user_error

@exit_on_user_error
def main():
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")

main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


def test_a_line_that_a_full_disk_does_not_take_is_lost_and_the_next_is_not(tmp_path):
    log = tmp_path / "log"
    with open("/dev/full", "w") as stream, log.open("w") as disk:
        tell("lost", stream)
        os.dup2(disk.fileno(), stream.fileno())  # there is room again
        tell("heard", stream)
        assert log.read_text() == "heard\n"


def run_early(program):
    """Runs a program whose Ctrl-C is not ignored, as that of jobs in the background is."""
    start = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", start + "from gpt2 import interrupts, launch\n" + program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_while_modules_are_imported_is_a_line_and_130():
    """Whatever the module does with exceptions."""
    program = """
launch.prepare_process()
{}
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("caught")
"""
    assert run_early(program.format("")) == (130, "", "stopped by SIGINT\n")
    assert run_early(program.format("interrupts.take()")) == (0, "caught\n", "")


@pytest.mark.parametrize(
    ("modules", "variable", "file", "platforms"),
    [
        ({"libtpu"}, None, None, "cpu"),
        ({"libtpu"}, "TPU_SKIP_MDS_QUERY", None, "cpu"),
        ({"libtpu"}, "JAX_PLATFORMS", None, ""),  # what a user sets wins
        ({"libtpu"}, "TPU_WORKER_ID", None, None),
        ({"libtpu"}, "JAX_FORCE_TPU_INIT", None, None),
        ({"libtpu"}, None, "/dev/accel0", None),
        ({"libtpu"}, None, "/dev/vfio/1", None),
        ({"libtpu"}, None, "/sys/bus/pci/devices/0/vendor", None),
        ({"libtpu", "jax_plugins"}, None, None, None),
        (set(), None, None, None),
    ],
)
def test_libtpu_is_not_asked_for_tpus_that_cannot_be_here(
    monkeypatch, modules, variable, file, platforms
):
    program = f"""
import fnmatch, glob, importlib.util
from pathlib import Path
importlib.util.find_spec = lambda name: name in {modules}
glob.glob = lambda pattern: fnmatch.filter({[file] if file else []}, pattern)
Path.read_text = lambda path: "0x1ae0\\n"
os.environ[launch._STARTED_AGAIN] = "1"
launch._missing_order = dict
launch.prepare_process()
if "JAX_PLATFORMS" in launch._chosen:  # also where the program starts itself again
    os.environ[launch._STARTED_AGAIN] = "JAX_PLATFORMS"
    launch._chosen.clear()
    launch.prepare_process()
    assert launch.describe_settings().startswith("JAX_PLATFORMS=cpu, since there is libtpu and")
print(os.environ.get("JAX_PLATFORMS"))
"""
    for name in [name for name in os.environ if "TPU" in name or name == "JAX_PLATFORMS"]:
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "")
    assert run_early(program) == (0, f"{platforms}\n", "")


def test_flags_for_gpus_are_set_where_their_compiler_is_and_those_of_a_user_win(monkeypatch):
    flag = "--xla_gpu_dot_merger_threshold_mb"
    program = """
import importlib.util
importlib.util.find_spec = lambda name: name in {}
os.environ[launch._STARTED_AGAIN] = os.environ["JAX_PLATFORMS"] = ""
launch.prepare_process()
print(os.environ.get("XLA_FLAGS"))
print(launch.describe_settings())
"""

    def told(*modules):
        code, out, _ = run_early(program.format({"jax_plugins", *modules}))
        assert code == 0
        return out.splitlines()

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    flags, settings = told("jax_cuda12_plugin")
    assert f"{flag}=0" in flags.split() and settings == f"XLA_FLAGS={flags}"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=mine")
    flags, settings = told("jax_cuda12_plugin")
    assert flags.split()[0] == f"{flag}=mine" and flags.count(flag) == 1
    assert flag not in settings and "--xla_gpu" in settings
    assert told("jax_cuda13_plugin")[0] == flags and told()[0] == f"{flag}=mine"


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
