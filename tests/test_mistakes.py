"""Generated mistakes are one line and exit code 2, write nothing, and their advice works."""

import json
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, assume, core, given, settings
from hypothesis import strategies as st
from mistakes import (
    DAMAGES,
    MILD,
    copy_tree,
    follow,
    misspell,
    snapshot,
    spoil,
    wild_options,
    with_flags,
    wrong_options,
)

from gpt2.ablate.sweep import register
from gpt2.data.tokenizer import CharTokenizer
from tests.forks import STARTED, Commands, arguments_of, environment
from tests.helpers import ROOT, TINY, metrics_of
from tests.test_ablate import sweep_in

ROUNDS = 8  # of advice: a few for each of up to four mistakes in a command
SHORT = [*TINY, "--config.train.num_steps=2", "--config.train.eval_batches=1"]
SHORT += ["--config.data.corpus=text:in.txt", "--config.logging.tensorboard=False"]


def examples(number):
    """So many examples, the same at each run unless pytest is given a --hypothesis-seed."""
    return settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=core.global_force_seed is None,
        suppress_health_check=list(HealthCheck),
    )


def few_and_many(few, many):
    """Runs a test of generated examples with few of them, and with many where time is no matter."""

    def decorate(test):
        marks = {few: pytest.mark.thorough, many: pytest.mark.slow}
        counts = [pytest.param(count, marks=mark) for count, mark in marks.items()]
        return pytest.mark.parametrize("number", counts)(test)

    return decorate


@pytest.fixture(scope="module")
def commands():
    with Commands() as commands:
        yield commands


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, commands):
    """A folder of all that commands read."""
    folder = tmp_path_factory.mktemp("pristine")
    text = "".join(f"{i} is a number, and {i * i} its square.\n" for i in range(600))
    (folder / "in.txt").write_text(text)
    (folder / "docs.jsonl").write_text("".join(f'{{"text": "number {i}"}}\n' for i in range(300)))
    np.arange(5000, dtype=np.uint16).tofile(folder / "shard_train.bin")
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 500
    with open(folder / "shard_val.bin", "wb") as file:
        header.tofile(file)
        np.arange(500, dtype=np.uint16).tofile(file)
    CharTokenizer("".join(sorted(set(text))), has_eot=False).save(folder / "char.json")
    shutil.copy(ROOT / "configs" / "default.py", folder / "mine.py")
    (folder / "flags").write_text("--config.train.log_every=1\n")
    (folder / "points.csv").write_text("tokens,loss\n64,5.5\n128,5.2\n")
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "lambada.jsonl").write_text('{"text": "one two three"}\n{"text": "four five six"}\n')
    (tasks / "wikitext.txt").write_text("some words of a text\n" * 5)
    (tasks / "cbt.txt").write_text(
        "".join(f"{i} A sentence .\n" for i in range(1, 21))
        + "21 It was XXXXX .\tred\t\tred|blue\n"
        + "21 It was XXXXX .\tred\t\tred|blue\n"
    )
    (tasks / "hellaswag.jsonl").write_text(
        '{"ctx": "a b", "ctx_a": "a", "ctx_b": "b", "activity_label": "c", "endings": '
        '["d", "e", "f", "g"], "label": 1}\n'
    )
    done = commands.run(
        "train.py", *SHORT, "--workdir=run", cwd=folder, seconds=120, to_the_end=True
    )
    assert done.code == 0, done.stderr
    done = commands.run("gpt2.hf", "export", "--workdir=run", "--to=hf", cwd=folder, seconds=120)
    assert done.code == 0, done.stderr
    assert "python eval.py --hf=hf --corpus=text:in.txt --val_fraction=0.02" in done.stdout
    (folder / "sweep").mkdir()
    register(sweep_in(folder / "sweep", "optim.beta1=0.5,0.6"))
    shutil.copytree(folder / "hf", folder / "merges")
    tree = json.loads((folder / "merges" / "tokenizer.json").read_text())
    (folder / "merges" / "tokenizer.json").unlink()
    (folder / "merges" / "vocab.json").write_text(json.dumps(tree["model"]["vocab"]))
    (folder / "merges" / "merges.txt").write_text("#version: 0.2\n")
    columns = pyarrow.table({"text": [f"row {i}" for i in range(300)]})
    pyarrow.parquet.write_table(columns, folder / "docs.parquet")
    done = commands.run("train.py", *PREPARED, cwd=folder, seconds=60)
    assert done.code == STARTED, done
    return folder


def check_refusal(done):
    """Asserts that a command ended with one line, warnings apart, and returns the line."""
    *before, last = done.stderr.splitlines() or [""]
    assert done.code == 2 and last.startswith("error: "), done
    assert all(line.startswith("warning: ") for line in before), done
    assert last[-1] in ".?"
    return last


# What a message names without a value that would do: it cannot know one.
WITHOUT_A_VALUE = ("data.corpus", "train.init_from", "optim.layer_rates", "val_fraction")


def follow_to_the_start(commands, folder, arguments, refused=False):
    """Follows the advice of train.py until the run starts, or a message proposes no value.

    Returns the arguments with which it starts, None if it does not.
    """
    before, told = snapshot(folder), []
    for _ in range(ROUNDS):
        done = commands.run("train.py", *arguments, cwd=folder, seconds=300)
        assert snapshot(folder) == before, done
        if done.code == STARTED:  # which takes a minute with 1000 layers
            break
        assert done.seconds < 30, done
        told.append(check_refusal(done))
        assert told[-1] not in told[:-1], told
        changed = follow(arguments, told[-1])
        if changed is None:
            assert any(subject in told[-1] for subject in WITHOUT_A_VALUE), told[-1]
            return None
        arguments = changed
    else:
        raise AssertionError(told)
    assert told or not refused, arguments
    return arguments


PREPARED = [*SHORT[:-2], "--config.data.corpus=synthetic", "--config.data.data_dir=prepared"]


@few_and_many(10, 150)
def test_wrong_options_are_refused_and_their_advice_starts_the_run(commands, pristine, number):
    @examples(number)
    @given(st.lists(wrong_options(), min_size=1, max_size=2, unique_by=lambda f: f.split("=")[0]))
    def check(flags):
        arguments = with_base(flags)
        follow_to_the_start(commands, pristine, arguments, refused=True)

    check()


@few_and_many(8, 150)
def test_options_that_contradict_are_refused_or_the_run_starts(commands, pristine, number):
    @examples(number)
    @given(wild_options())
    def check(flags):
        follow_to_the_start(commands, pristine, with_base(flags))

    check()


@few_and_many(1, 100)
def test_options_that_are_accepted_train_two_steps(commands, pristine, tmp_path, number):
    @examples(number)
    @given(wild_options(MILD))
    def check(flags):
        arguments = follow_to_the_start(commands, pristine, with_base(flags))
        assume(arguments is not None)
        folder = copy_tree(pristine, tmp_path / "folder")
        workdir = folder / "valid"
        given = with_flags(arguments, ["--config.train.num_steps=2", f"--workdir={workdir}"])
        done = commands.run("train.py", *given, cwd=folder, seconds=120, to_the_end=True)
        if done.code == 2:  # two steps are fewer than what an option is about
            check_refusal(done)
            return
        assert done.code == 0, (given, done)
        assert metrics_of(workdir)[-1]["step"] == 2

    check()


@few_and_many(2, 20)
def test_a_process_of_its_own_says_what_a_fork_says(commands, pristine, tmp_path, number):
    """In a sample of all kinds of mistakes; beyond it, the tests here trust forks."""
    for command, *arguments in IN_A_PROCESS[:: len(IN_A_PROCESS) // number]:
        folder = copy_tree(pristine, tmp_path / "folder")
        before = snapshot(folder)
        done = commands.run(command, *arguments, cwd=folder)
        apart = subprocess.run(
            arguments_of(command, *arguments),
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert apart.returncode == done.code == 2, (arguments, apart)
        assert apart.stderr == check_refusal(done) + "\n"
        assert snapshot(folder) == before


# Mistakes that are found without a file but the program's own.
WITHOUT_FILES = [
    ("train.py", "--config.train.num_stps=3"),
    ("train.py", "--config.seed=x"),
    ("train.py", "--config.model.num_heads=5"),
    ("train.py", "--workdir="),
    ("train.py", "--num_processes=2"),
    ("train.py", "--chex_n_cpu_devices=1"),
    ("train.py", "--help"),
    ("gpt2.data.prepare", "--config=configs/quickstrat.py"),
    ("gpt2.ablate", "--vary=optim.nme=adam"),
    ("gpt2.benchmark", "train", "--batch_size=x"),
    ("gpt2.compare",),
    ("gpt2.profile", "--txt=step.txt"),
    ("gpt2.profile",),
]


@pytest.mark.parametrize("command", WITHOUT_FILES, ids=" ".join)
def test_a_mistake_that_needs_no_file_is_told_within_three_seconds_and_without_jax(
    command, tmp_path
):
    """Of processor time, as a busy machine gives a process fewer seconds of the clock."""
    here = tmp_path / "here"
    here.mkdir()
    before = children_seconds()
    done = run_where_jax_is("raise ImportError(f'{__name__} is imported')", command, here)
    taken = children_seconds() - before
    if command[-1] == "--help":
        assert done.returncode == 0 and "--plan_search" in "".join(done.stdout.split("[no]")), done
    else:
        assert done.returncode == 2 and done.stderr.startswith("error: "), done
    assert taken < 3, taken
    assert not [*here.iterdir()]


# What takes seconds to import.
SLOW = ("jax", "flax", "optax", "orbax", "tensorflow")


def run_where_jax_is(lines, command, folder):
    """Runs a command in a process of its own, in which these lines stand for JAX and its like."""
    away = folder.with_name("away")
    for name in SLOW:
        (away / name).mkdir(parents=True)
        (away / name / "__init__.py").write_text(lines)
    return subprocess.run(
        arguments_of(*command),
        cwd=folder,
        env=environment() | {"PYTHONPATH": f"{away}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


# As in a callback of JAX, where Python prints an exception and goes on.
CTRL_C = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
finally:
    raise ImportError("Ctrl-C was lost")
"""


@pytest.mark.parametrize(
    "command",
    [
        ("train.py",),
        ("eval.py", "--workdir=run"),
        ("gpt2.generate", "--workdir=run"),
        ("gpt2.hf", "import", "--from=hf", "--workdir=run"),
        ("gpt2.hf", "export", "--workdir=run", "--to=hf"),
        ("gpt2.profile", "run"),
    ],
    ids=" ".join,
)
def test_ctrl_c_while_a_command_imports_is_a_line_and_130(command, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    done = run_where_jax_is(CTRL_C, command, here)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by SIGINT\n")
    assert not [*here.iterdir()]


def children_seconds():
    """Returns the processor time that ended children of this process took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def with_base(flags):
    names = {flag.partition("=")[0] for flag in flags}
    return [each for each in SHORT if each.partition("=")[0] not in names] + flags


IN_A_PROCESS = [
    ("train.py", *SHORT, "--config.train.num_stps=3"),
    ("train.py", *SHORT, "--config.optim.eps=nan"),
    ("train.py", *SHORT, "--config.seed=x"),
    ("train.py", *SHORT, "--config.model.embed_dim=1000000"),
    ("train.py", *SHORT, "--config.data.corpus=text:none/*"),
    ("train.py", *SHORT, "--config.train.init_from=hf:run"),
    ("train.py", *SHORT, "--workdir=run", "--config.optim.beta1=0.5"),
    ("train.py", "--config=in.txt"),
    ("train.py", "--flagfile=run/loss.png"),
    ("eval.py", "--workdir=hf"),
    ("eval.py", "--hf=hf", "--tasks=lambada", "--task_dir=run"),
    ("gpt2.generate", "--workdir=run", "--temperature=nan"),
    ("gpt2.generate", "--hf=none"),
    ("gpt2.hf", "export", "--workdir=run", "--to=run"),
    ("gpt2.hf", "copy"),
    ("gpt2.hf", "export"),
    ("gpt2.compare", "run", "--reference=in.txt"),
    ("gpt2.profile", "in.txt"),
    ("gpt2.data.prepare", "--config.data.corpus=tokens:in.txt"),
    ("gpt2.ablate", *SHORT, "--vary=optim.nme=adam", "--workdir=sweep"),
]

# A command line that works, for each command.
COMMANDS = {
    "eval.py": ["--workdir=run", "--tasks=validation"],
    "gpt2.generate": ["--workdir=run", "--prompt=1", "--max_new_tokens=2"],
    "gpt2.hf": ["export", "--workdir=run", "--to=out"],
    "gpt2.compare": ["run", "--output=out.png"],
    "gpt2.data.prepare": [*SHORT],
    "gpt2.ablate": [*SHORT, "--vary=seed=0,1", "--workdir=sweep", "--dry_run"],
    "gpt2.benchmark": ["train", "--model=quickstart"],
    "train.py": [*SHORT],
}
WRONG_FLAGS = {"int": ("x", "1.5", "", "-3"), "float": ("x", "", "nan"), "bool": ("maybe", "2")}


def flags_of(commands, command, folder):
    """Returns the flags of a command by name, each with `int`, `float`, `bool` or `str`."""
    told = commands.run(command, "--help", cwd=folder).stdout
    kinds = {}
    for flag in re.split(r"\n  --", told.partition("\nflags:\n")[2])[1:]:
        name = re.match(r"(\[no\])?([\w.]+):", flag)
        kind = "float" if "(a number)" in flag or "number)" in flag else "str"
        kind = "int" if re.search(r"\(an? [\w-]* ?integer", flag) else kind
        kinds[name[2]] = "bool" if name[1] else kind
    return kinds


@few_and_many(20, 100)
def test_wrong_flags_of_every_command_are_refused(commands, pristine, number):
    flags = [
        (command, name, kind)
        for command in COMMANDS
        for name, kind in flags_of(commands, command, pristine).items()
    ]
    assert {command for command, *_ in flags} == {*COMMANDS}

    @examples(number)
    @given(st.sampled_from(flags), st.integers(0, 99), st.booleans())
    def check(flag, at, misspelt):
        command, name, kind = flag
        if misspelt or kind == "str":
            given = f"--{misspell(name, at)}=1"
        else:
            values = WRONG_FLAGS[kind]
            given = f"--{name}={values[at % len(values)]}"
        before = snapshot(pristine)
        known = {each for each_command, each, _ in flags if each_command == command}
        if given[2:].partition("=")[0] in known and (misspelt or kind == "str"):
            return
        done = commands.run(command, *COMMANDS[command], given, cwd=pristine)
        check_refusal(done)
        assert snapshot(pristine) == before

    check()


# Command lines, and the files that each reads.
RUN = "--workdir=run"
CHECKPOINT = [
    f"run/checkpoints/2/{part}"
    for part in (
        *("layout/metadata", "metrics/metrics", "_CHECKPOINT_METADATA", "params/_METADATA"),
        *("params/manifest.ocdbt", "rest/manifest.ocdbt"),
    )
]
# What is altered in these is always told. A run that continues looks at all of a checkpoint.
DIGESTED = ("prepared/", "run/checkpoints/2/params/")
# Written after the digests, and read by nothing that decides: when a save began and ended.
UNDIGESTED = ("run/checkpoints/2/_CHECKPOINT_METADATA",)
OF_HF = ["hf/config.json", "hf/model.safetensors", "hf/tokenizer.json"]
TOKENS = ["--config.data.corpus=tokens:shard_*.bin", "--config.data.tokenizer=gpt2"]
BESIDE = ("data.json", "metrics.jsonl", "environment.jsonl", "samples.txt", "loss.png", ".lock")
OF_RUN = ["run/config.json", "run/tokenizer.json", *CHECKPOINT]
READERS = [
    (["train.py", "--config=mine.py", *SHORT], ["mine.py"]),
    (["train.py", *SHORT, "--flagfile=flags"], ["flags"]),
    (["train.py", "--config=run/config.json", "--workdir=new"], ["run/config.json", "in.txt"]),
    (["train.py", *SHORT, "--config.data.corpus=jsonl:docs.jsonl"], ["docs.jsonl"]),
    (["train.py", *SHORT, *TOKENS], ["shard_train.bin", "shard_val.bin"]),
    (["train.py", *SHORT, "--config.data.tokenizer=char.json"], ["char.json", "in.txt"]),
    (["train.py", *SHORT, "--config.train.init_from=hf:hf"], OF_HF),
    (["train.py", *SHORT, "--config.train.init_from=run:run"], OF_RUN),
    (
        ["train.py", *SHORT, RUN, "--config.train.num_steps=3"],
        [*OF_RUN, *(f"run/{name}" for name in BESIDE)],
    ),
    (["eval.py", RUN], ["run/data.json", *OF_RUN]),
    (["gpt2.generate", "--hf=hf", "--prompt=1", "--max_new_tokens=2"], OF_HF),
    (["gpt2.generate", RUN, "--prompt=1", "--max_new_tokens=2"], OF_RUN),
    (["gpt2.hf", "import", "--from=hf", "--workdir=new"], OF_HF),
    (["gpt2.hf", "export", RUN, "--to=new"], OF_RUN),
    (
        ["gpt2.compare", "run", "--reference=points.csv"],
        ["run/config.json", "run/metrics.jsonl", "points.csv"],
    ),
    (["train.py", *SHORT, "--config.data.corpus=parquet:docs.parquet"], ["docs.parquet"]),
    (
        ["gpt2.hf", "import", "--from=merges", "--workdir=new"],
        ["merges/vocab.json", "merges/merges.txt"],
    ),
    (["gpt2.ablate", "--report", "--workdir=sweep"], ["sweep/sweep.json"]),
    (["gpt2.compare", "sweep"], ["sweep/sweep.json"]),
    (
        ["train.py", *PREPARED],
        [
            f"prepared/synthetic-*/{name}"
            for name in ("prepared.json", "tokenizer.json", "tokens-train.*")
        ],
    ),
]
READERS += [
    (["eval.py", "--hf=hf", f"--tasks={Path(file).stem}", "--task_dir=tasks"], [f"tasks/{file}"])
    for file in ("lambada.jsonl", "wikitext.txt", "cbt.txt", "hellaswag.jsonl")
]
FILES = [(command, file) for command, files in READERS for file in files]


@few_and_many(15, 300)
def test_spoilt_files_are_refused_or_passed_over(commands, pristine, tmp_path, number):
    for file in {file for _, file in FILES}:
        assert next(pristine.glob(file)).is_file(), file

    @examples(number)
    @given(st.sampled_from(FILES), st.sampled_from(DAMAGES), st.integers(0, 10**6))
    def check(read, damage, seed):
        read_spoilt(commands, copy_tree(pristine, tmp_path / "folder"), *read, damage, seed)

    check()


def read_spoilt(commands, folder, command, file, damage, seed):
    """Damages a file, and asserts that the command which reads it goes on or refuses it."""
    path = next(folder.glob(file))
    whole = path.read_bytes()
    spoil(path, damage, seed)
    altered = not path.is_file() or path.read_bytes() != whole
    before = snapshot(folder)
    done = commands.run(*command, cwd=folder, seconds=60)
    if done.code in (0, STARTED):
        assert all(line.startswith("warning: ") for line in done.stderr.splitlines()), done
        continues = command[0] == "train.py" and RUN in command
        digested = (*DIGESTED, "run/checkpoints/") if continues else DIGESTED
        told = altered and file.startswith(digested) and file not in UNDIGESTED
        assert done.stderr or not told, done
    else:
        check_refusal(done)
        assert snapshot(folder) == before
    assert not (folder / "witness").exists()
