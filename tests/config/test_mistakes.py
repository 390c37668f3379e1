"""The mistakes people make, in every command: one line, exit code 2, and nothing is written."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.forks import run_command
from tests.helpers import TINY, metrics_of

SHORT = [*TINY, "--config.train.num_steps=2", "--config.train.eval_batches=1"]
SHORT += ["--config.data.corpus=text:in.txt"]
RUN = "--workdir=run"
TRAIN = ["train.py", *SHORT]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A folder with a text, a run of train.py, its weights in Hugging Face's format, and damage."""
    folder = tmp_path_factory.mktemp("pristine")
    (folder / "in.txt").write_text(
        "".join(f"{i} is a number, {i * i} its square.\n" for i in range(600))
    )
    for arguments in (
        [*TRAIN, RUN, "--config.data.data_dir=data"],
        ["gpt2.hf", "export", RUN, "--to=hf"],
    ):
        done = run_command(*arguments, cwd=folder, seconds=200)
        assert done.code == 0, done.stderr
        (folder / f"{arguments[0]}.out").write_text(done.stdout)
    (folder / "mine.py").write_text(
        "def get_config():\n    return {'optim': {'lr': 1.0}}\n"
    )
    (folder / "seeded.py").write_text("def get_config():\n    return {'seed': 7}\n")
    (folder / "fails.py").write_text("import no_such_module\n")
    (folder / "ends.py").write_text("raise SystemExit(1)\n")
    (folder / "ready.py").write_text("def batches(split):\n    return []\n")
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": 3\n')
    lossy = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.save(str(folder / "lossy.json"))
    (folder / "points.csv").write_text("steps,loss\n1,2\n")
    tree = json.loads((folder / "run" / "config.json").read_text())
    (folder / "older").mkdir()
    (folder / "older" / "config.json").write_text(json.dumps(tree | {"seeds": 0}))
    shutil.copytree(folder / "run", folder / "moved")
    tree["data"]["corpus"] = "text:other.txt"
    (folder / "moved" / "config.json").write_text(json.dumps(tree))
    (folder / "other.txt").write_text("another number\n" * 600)
    shutil.copytree(folder / "hf", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder


# A command, where SHORT stands for the options of a short run, and a word of the line.
MISTAKES = """
    train.py SHORT --config.train.num_stps=3 | --config.train.num_steps
    train.py SHORT --config.model.position=rope --config.model.rope_base=1 | (1, inf)
    gpt2.lab.plan --devices=2 --chips=h100-1 | (devices, chips)
    train.py SHORT --workdr=x | mean: workdir
    train.py SHORT --config.optim.name=adamv | adam
    train.py SHORT --config.optim.name=adamW | Did you mean adamw?
    train.py SHORT --config.parallel.data=3 | parallel
    train.py SHORT --config.model.context_length=100000 | context_length
    train.py SHORT --workdir=in.txt | in.txt
    train.py SHORT --workdir=in.txt/run | in.txt
    train.py SHORT --workdir=none://bucket/run | none://bucket/run
    train.py SHORT --workdir=dropbox://bucket/run | dropbox
    train.py SHORT --config.data.corpus=text:none://bucket/*.txt | none://bucket
    train.py SHORT --workdir=run --config.optim.beta1=0.5 | optim.beta1
    train.py SHORT --workdir=run --config.data.corpus=text:bad.jsonl | corpus
    train.py SHORT --config.data.corpus=text:none.txt | none.txt
    train.py SHORT --config.data.corpus=jsonl:bad.jsonl | bad.jsonl
    train.py SHORT --config.data.corpus=tokens:in.txt | in.txt
    train.py SHORT --config.data.tokenizer=gpt-2 | gpt-2
    train.py SHORT --config.train.init_from=hf:run | run
    train.py SHORT --config.train.init_from=hf:cut | cut
    train.py SHORT --config.train.init_from=run:run@7 | 7
    train.py --config=quickstart | quickstart
    train.py --config=mine.py | optim.learning_rate
    train.py --config=fails.py | no_such_module
    train.py --config=ends.py | ends.py calls sys.exit
    train.py --config=hf/config.json --workdir=x | hf/config.json
    train.py SHORT --num_processes=2 | coordinator
    train.py SHORT --coordinator=localhost | HOST:PORT
    train.py SHORT --coordinator=localhost:99999 | 65535
    train.py SHORT --process_index=7 --num_processes=2 --coordinator=localhost:1 | process_index=7
    eval.py | workdir
    eval.py --workdir=older | seed
    eval.py --workdir=moved | not the one
    eval.py --workdir=run --checkpoint=9 | 9
    eval.py --workdir=run --tasks=lambda | lambada
    eval.py --workdir=run --corpus=text:other.txt --val_fraction=2 | See --help
    eval.py --workdir=run --corpus=text:other.txt --val_fraction=nan | is not a number
    eval.py --workdir=run --val_fraction=1 | --corpus
    eval.py --workdir=run --corpus=text:other.txt --tasks=lambada:x | --tasks contains
    eval.py --workdir=run --tasks= | it must name a task
    gpt2.generate --workdir=run --hf=hf | hf
    gpt2.generate --hf=cut --prompt=1 | cut
    gpt2.hf copy | import
    gpt2.hf exprt | mean export
    gpt2.hf export --workdir=run --to=hf | hf
    gpt2.hf export --workdir=run --to=in.txt/hf | in.txt
    gpt2.lab.compare run --reference=points.csv | points.csv
    gpt2.lab.profile in.txt | in.txt
    gpt2.lab.ablate SHORT --vary=optim.nme=adam --workdir=sweep | optim.name
    gpt2.lab.ablate SHORT --config.data.corpus=text:none.txt --workdir=sweep | --vary is missing
    gpt2.lab.ablate SHORT --vary=recipe=seeded.py --paired --workdir=sweep | set different seeds
    gpt2.lab.ladder SHORT --vary=optim.name=lion --workdir=sweep | sizes would be validated
    gpt2.lab.ablate SHORT --vary=model.num_kv_heads=0 --workdir=sweep | only the baseline
    gpt2.lab.ablate SHORT --config.train.eval_batches=0 --vary=data.tokenizer=lossy.json \
        --workdir=sweep | loses bytes
    gpt2.lab.ledger SHORT --ledger=s3://bucket/ideas | --ledger
    gpt2.lab.ledger SHORT --ledger=ideas --config.data.corpus=python:ready:batches | returns batches
"""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_mistake_is_a_line_that_names_it_and_nothing_is_written(pristine, mistake):
    command, word = mistake.split(" | ")
    command = command.replace("SHORT", " ".join(SHORT)).split()
    before = snapshot(pristine)
    done = run_command(*command, cwd=pristine, seconds=60)
    *warnings, line = done.stderr.splitlines() or [""]
    assert (done.code, line[:7]) == (2, "error: "), done
    assert word in line and all(each.startswith("warning: ") for each in warnings), done
    assert snapshot(pristine) == before


def snapshot(folder: Path) -> dict[str, int]:
    """The files of a folder, except the caches: prepared corpora, and Python's bytecode."""
    files = {}
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        is_cached = parts[0] == "data" or "__pycache__" in parts
        if path.is_file() and not is_cached:
            files[str(path)] = path.stat().st_mtime_ns
    return files


def test_the_same_command_without_a_mistake_continues_the_run(pristine, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(pristine, folder)
    given = [*TRAIN, RUN, "--config.train.num_steps=3", "--config.data.data_dir=data"]
    done = run_command(*given, cwd=folder, seconds=200)
    assert done.code == 0, done
    assert [line["step"] for line in metrics_of(folder / "run")] == [1, 2, 3]
    # Of two steps the rate rose in all, of three it does not.
    assert "the learning rate only rises" in (pristine / "train.py.out").read_text()
    assert "the learning rate only rises" not in done.stdout


def test_every_command_has_help_and_options_of_our_own_whatever_lies_there(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.py").write_text("1 / 0")
    lab = ("lab.ablate", "lab.compare", "lab.profile", "lab.benchmark")
    modules = ("generate", "hf", *lab)
    for command in ("train.py", "eval.py", *(f"gpt2.{name}" for name in modules)):
        done = run_command(command, "--help", cwd=tmp_path)
        assert (done.code, done.stderr) == (0, ""), done
        assert "--helpfull" in done.stdout
