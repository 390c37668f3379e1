"""Flags of eval.py and of generation that would change nothing are refused."""

import json

import numpy as np
import pytest
from absl import flags

import configs.default
import eval as eval_command
from gpt2.config import Config, GPTConfig, load_config
from gpt2.data.tokenizer import ByteTokenizer
from gpt2.errors import UserError, require_writable_file
from gpt2.evals import options
from gpt2.evals.options import SLIDING, TASK_FILES
from gpt2.evals.tasks import SCORES
from gpt2.hf.config import read_config
from gpt2.weights import load_initial_params


@pytest.fixture
def give(monkeypatch):
    """Gives flags to eval.py, apart from those of other tests."""

    def give(*args):
        monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
        options.define_flags()
        flags.FLAGS(["eval.py", *args])

    return give


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (["--hf=a", "--checkpoint=latest"], "checkpoint"),
        (["--workdir=a", "--stride=8"], "stride"),
        (["--workdir=a", "--tasks=lambada", "--stride=8"], "stride"),
        (["--workdir=a", "--task_dir=b"], "task_dir"),
        (["--workdir=a", "--tasks=enwik8", "--corpus=pystdlib"], "corpus"),
        (["--workdir=a", "--val_fraction=0.1"], "val_fraction"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(give, given, refused):
    give(*given)
    with pytest.raises(UserError, match=f"--{refused} would be ignored"):
        options.check()


def test_a_share_of_a_corpus_may_be_all_of_it(give):
    give("--workdir=a", "--corpus=pystdlib", "--val_fraction=1")
    options.check()
    for share in ("0", "1.5"):
        give("--workdir=a", "--corpus=pystdlib", f"--val_fraction={share}")
        with pytest.raises(UserError, match=r"out of range\. Use a share above 0, up to 1\."):
            options.check()


def test_weights_are_named_before_anything_else(give):
    for given, told in (
        (["--tasks=enwik8", "--corpus=a"], "there are no weights to load. Give --workdir or --hf"),
        (["--workdir=a", "--hf=b", "--checkpoint=1"], "--workdir and --hf both name weights"),
    ):
        give(*given)
        with pytest.raises(UserError, match=told):
            options.check()


@pytest.mark.parametrize(
    ("tasks", "told"),
    [("", "--tasks= names no task"), ("enwik8,enwik8", "--tasks=enwik8,enwik8 names a task twice")],
)
def test_tasks_are_named_and_once_each(give, tasks, told):
    give("--workdir=a", f"--tasks={tasks}")
    with pytest.raises(UserError, match=f"{told}. Choose from validation, "):
        options.check()


def test_every_task_has_a_file_and_a_score():
    assert list(TASK_FILES) == list(SCORES)
    assert set(SLIDING) < set(SCORES)


def test_an_output_that_cannot_be_written_is_refused(give, tmp_path):
    (tmp_path / "file").touch()
    for output, message in (
        (tmp_path / "file" / "scores.json", "nothing can be written in .*/file .*--output"),
        ("/proc/scores/scores.json", "nothing can be written in /proc/scores"),
        (tmp_path, "is a directory"),
    ):
        give("--workdir=a", f"--output={output}")
        with pytest.raises(UserError, match=message):
            eval_command.main()
    require_writable_file("output", tmp_path / "new" / "scores.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_flags_that_count_are_taken(give, tmp_path):
    (tmp_path / "enwik8").write_text("a")
    given = ["--checkpoint=latest", "--tasks=validation,enwik8", f"--task_dir={tmp_path}"]
    give("--workdir=a", *given, "--stride=8")
    options.check()


def test_another_corpus_is_divided_and_kept_as_the_runs(give, tmp_path):
    tree = configs.default.get_config()
    tree.data.update(dict(val_fraction=0.25, data_dir="kept"))
    (tmp_path / "config.json").write_text(json.dumps(Config.from_dict(tree).to_dict()))
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    give(f"--workdir={tmp_path}", "--corpus=synthetic")
    data = eval_command.validation_data()
    assert (data.corpus, data.val_fraction, data.data_dir) == ("synthetic", 0.25, "kept")
    assert data.tokenizer == str(tmp_path / "tokenizer.json")
    give(f"--workdir={tmp_path}", "--corpus=tokens:*.bin")
    assert eval_command.validation_data().tokenizer == "gpt2"
    give(f"--workdir={tmp_path}", "--corpus=synthetic", "--val_fraction=0.1")
    assert eval_command.validation_data().val_fraction == 0.1


def test_an_imported_run_is_scored_on_a_named_corpus_only(give, tmp_path):
    config = Config.from_dict(configs.default.get_config())
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    give(f"--workdir={tmp_path}")
    with pytest.raises(UserError, match=r"came without a corpus.*--corpus"):
        eval_command.validation_data()
    (tmp_path / "data.json").touch()  # which every run that was trained has
    assert eval_command.validation_data().corpus == "pystdlib"
    for share in (0.3, 0.001):  # for which other documents are chosen, not fewer of the same
        give(f"--workdir={tmp_path}", "--corpus=pystdlib", f"--val_fraction={share}")
        with pytest.raises(UserError, match=rf"{share} may hold .* the run learnt from.*0\.005"):
            eval_command.validation_data()
    give(f"--workdir={tmp_path}", "--corpus=pystdlib", "--val_fraction=0.005")
    assert eval_command.validation_data().val_fraction == 0.005


def test_a_share_of_shards_that_are_divided_by_name_would_be_ignored(give, tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    for name in ("train.bin", "val.bin"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / name)
    flags_given = [f"--hf={tmp_path}", "--val_fraction=0.1"]
    give(*flags_given, f"--corpus=tokens:{tmp_path}/*.bin")
    with pytest.raises(UserError, match=r"--val_fraction would be ignored.* files for validation"):
        eval_command.validation_data()
    give(*flags_given, f"--corpus=tokens:{tmp_path}/train.bin")
    assert eval_command.validation_data().val_fraction == 0.1


def test_init_from_tells_a_run_from_a_step_and_from_a_hugging_face_model(tmp_path):
    (tmp_path / "imported" / "checkpoints").mkdir(parents=True)
    (tmp_path / "imported" / "config.json").touch()
    with pytest.raises(UserError, match=r"names a run.* Use .*init_from=run:.*/imported\."):
        load_initial_params(f"hf:{tmp_path}/imported", GPTConfig(), ByteTokenizer())
    (tmp_path / "run@7").mkdir()
    for place, directory in (("run@7", "run@7"), ("run@8", "run")):
        with pytest.raises(UserError, match=rf"^{tmp_path}/{directory} holds no run"):
            load_initial_params(f"run:{tmp_path}/{place}", GPTConfig(), ByteTokenizer())


def test_a_run_and_a_hugging_face_model_are_told_apart(tmp_path):
    config = Config.from_dict(configs.default.get_config())
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(UserError, match=r"is a run.*as --workdir to eval\.py .*gpt2\.hf export"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"is a Hugging Face model.*--hf"):
        load_config(tmp_path)
