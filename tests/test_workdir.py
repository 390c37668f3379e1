"""What it takes to continue a run: its options, its text, its checkpoints."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

from configs import quickstart
from gpt2.config import Config, DataConfig, OptimConfig
from gpt2.data.dataset import prepare
from gpt2.data.tokenizer import CharTokenizer
from gpt2.errors import UserError
from gpt2.optim import make_schedule
from gpt2.training import workdir as run_files
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.state import TrainState


def make_config(**groups):
    """The quickstart's options with a tiny model, and `group=dict(option=value)` changed."""
    config = Config.from_dict(quickstart.get_config())
    tiny = dict(vocab_size=50, context_length=8, num_layers=1, num_heads=2, embed_dim=16)
    groups = {"model": tiny} | groups
    return dataclasses.replace(
        config,
        **{
            name: dataclasses.replace(getattr(config, name), **options)
            for name, options in groups.items()
        },
    )


def write_run(workdir, config, steps_logged=0, checkpoints=()):
    """Leaves what a run of so many steps leaves, its checkpoints of no content."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    lines = (json.dumps({"step": step}) + "\n" for step in range(1, steps_logged + 1))
    (workdir / "metrics.jsonl").write_text("".join(lines))
    for step in checkpoints:
        (workdir / "checkpoints" / str(step)).mkdir(parents=True)
    return workdir


def test_a_run_that_lost_its_checkpoints_keeps_its_metrics(tmp_path):
    config = make_config(train=dict(checkpoint_every=2))
    workdir = write_run(tmp_path / "outran", config, steps_logged=5)
    with pytest.raises(UserError, match=r"whose checkpoints are gone.*remove the workdir"):
        run_files.check_options(workdir, config)
    only_at_the_end = make_config(train=dict(checkpoint_every=0))
    workdir = write_run(tmp_path / "finished", only_at_the_end, steps_logged=5)
    (workdir / "samples.txt").touch()
    with pytest.raises(UserError, match="whose checkpoints are gone"):
        run_files.check_options(workdir, only_at_the_end)


def test_a_run_that_is_left_says_what_the_same_command_does(tmp_path):
    workdir = tmp_path / "run"
    again = "; nothing is saved yet, and the same command starts again"
    assert run_files.describe_saved(workdir) == again
    write_run(workdir, make_config(), steps_logged=5)
    assert run_files.describe_saved(workdir) == again
    write_run(workdir, make_config(), steps_logged=5, checkpoints=(2, 4))
    assert run_files.describe_saved(workdir) == "; the same command continues from step 4"


def test_a_run_whose_saves_have_all_failed_starts_anew(tmp_path):
    config = make_config(train=dict(checkpoint_every=2))
    workdir = write_run(tmp_path / "unsaved", config, steps_logged=5)
    Checkpointer(workdir).close()
    run_files.check_options(workdir, config)
    state = TrainState.create({"x": jnp.ones(4)}, optax.sgd(1.0), "float32")
    with Checkpointer(workdir) as checkpointer:
        checkpointer.save(state, 2)
    shutil.rmtree(workdir / "checkpoints" / "2")
    with pytest.raises(UserError, match="whose checkpoints are gone"):
        run_files.check_options(workdir, config)


@pytest.mark.parametrize(("every", "steps"), [(2, 4), (3, 5), (0, 50)])
def test_a_run_killed_before_its_first_checkpoint_was_whole_starts_by_itself(
    tmp_path, every, steps
):
    """Its second checkpoint, for which it waits, may be due already."""
    config = make_config(train=dict(checkpoint_every=every))
    workdir = write_run(tmp_path, config, steps_logged=steps)
    (workdir / "checkpoints" / f"{every}.orbax-checkpoint-tmp").mkdir(parents=True)
    run_files.check_options(workdir, config)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A text, prepared."""
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    return prepare(DataConfig(f"text:{tmp_path}/text.txt", "byte", val_fraction=0.2))


@pytest.mark.parametrize(("checkpoints", "kept"), [((), 0), ((2,), 3)])
def test_metrics_that_no_checkpoint_continues_go_before_another_config_comes(
    tmp_path, prepared, checkpoints, kept
):
    """Else a later start would hold them against the other config's checkpoint_every."""
    workdir = write_run(tmp_path / "run", make_config(), 3, checkpoints)
    run_files.write(workdir, make_config(train=dict(checkpoint_every=1)), prepared)
    lines = workdir / "metrics.jsonl"
    assert len(lines.read_text().splitlines() if lines.exists() else ()) == kept


@pytest.mark.parametrize("content", ["", "[1]", '{"spl', "{}", "3", "[" * 10**5])
@pytest.mark.parametrize("name", ["data.json", "tokenizer.json"])
def test_a_damaged_file_beside_the_checkpoints_is_told_kept_and_written_anew(
    tmp_path, prepared, capsys, name, content
):
    run_files.write(tmp_path / "run", make_config(), prepared)
    path = tmp_path / "run" / name
    whole = path.read_bytes()
    path.write_text(content)
    run_files.check_data(tmp_path / "run", prepared)
    run_files.write(tmp_path / "run", make_config(), prepared)
    assert path.read_bytes() == whole
    assert Path(f"{path}.damaged").read_text() == content
    assert f"{path} was damaged and is written anew" in capsys.readouterr().err


def test_micro_batches_may_change_unless_dropout_draws_by_them(tmp_path):
    changed = dict(train=dict(accumulate_steps=2))
    for dropout in (0.0, 0.1):
        workdir = write_run(tmp_path / str(dropout), make_config(model=dict(dropout=dropout)))
        config = make_config(model=dict(dropout=dropout), **changed)
        if not dropout:
            run_files.check_options(workdir, config)
            continue
        with pytest.raises(UserError, match=r"holds a run with train\.accumulate_steps=1, not 2\."):
            run_files.check_options(workdir, config)


def test_all_options_that_differ_are_named_at_once(tmp_path):
    workdir = write_run(tmp_path, make_config())
    other = make_config(optim=dict(weight_decay=0.2, beta1=0.8))
    with pytest.raises(UserError) as error:
        run_files.check_options(workdir, other)
    assert "optim.beta1=0.9, not 0.8; optim.weight_decay=0.1, not 0.2." in str(error.value)
    assert "--config.optim.beta1=0.9 --config.optim.weight_decay=0.1." in str(error.value)


def test_the_vocabulary_and_the_soft_cap_do_not_change(tmp_path):
    workdir = write_run(tmp_path, make_config(model=dict(vocab_size=64, attention="reference")))
    not_known = make_config(model=dict(vocab_size=0, attention="xla"))
    run_files.check_options(workdir, not_known)
    with pytest.raises(
        UserError, match=r"model\.vocab_size=64, not 50\. .*--config.model.vocab_size"
    ):
        run_files.check_options(workdir, not_known.with_vocabulary(50))
    capped = make_config(model=dict(vocab_size=64, attention_softcap=50.0))
    with pytest.raises(UserError, match=r"model\.attention_softcap=0\.0, not 50\.0\."):
        run_files.check_options(workdir, capped)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (dict(eval_batches=0), dict(eval_batches=2), "validation takes other batches"),
        (dict(eval_batches=2), dict(eval_batches=2, accumulate_steps=2), "validation takes other"),
        (dict(eval_batches=2), dict(eval_batches=4, accumulate_steps=2), ""),
        (dict(eval_batches=0), dict(eval_batches=0, accumulate_steps=2), ""),
    ],
)
def test_a_run_that_is_validated_otherwise_than_before_says_so(
    tmp_path, prepared, capsys, before, now, told
):
    workdir = write_run(tmp_path / "run", make_config(train=before), 3, (2,))
    run_files.begin(workdir, make_config(train=now), prepared, 2)
    err = capsys.readouterr().err
    assert told in err and (told or "validation" not in err)


def test_ademamix_of_a_run_that_is_extended_says_what_changes(tmp_path, prepared, capsys):
    optim = dict(name="ademamix", schedule="constant", end_learning_rate=4e-3)
    workdir = write_run(tmp_path / "run", make_config(optim=optim), 3, (2,))
    run_files.begin(workdir, make_config(optim=optim, train=dict(num_steps=9)), prepared, 2)
    told = capsys.readouterr().err
    assert "from step 2 on, alpha and beta3 of ademamix rise over 9 steps" in told


def test_a_run_with_dropout_on_other_devices_says_that_masks_change(tmp_path, prepared, capsys):
    def warnings(line, dropout=0.1, **parallel):
        model = dict(dropout=dropout)
        workdir = write_run(tmp_path / "run", make_config(model=model), 3, (2,))
        (workdir / "environment.jsonl").write_text(f"{line}\n{{torn")
        run_files.begin(workdir, make_config(model=model, parallel=parallel), prepared, 2)
        err = capsys.readouterr().err
        (*_, last) = (workdir / "environment.jsonl").read_text().splitlines()
        shutil.rmtree(workdir)
        return err, json.loads(last)["batch_shards"]

    told = "from step 2 on, dropout draws other masks than before: a batch is split over"
    four, eight = '{"batch_shards": 4}', '{"batch_shards": 8}'
    for line, parallel, number, was in [
        (four, {}, 8, 4),
        (eight, dict(tensor=2), 4, 8),
        (eight, dict(fsdp=4, tensor=2), 4, 8),
    ]:
        err, recorded = warnings(line, **parallel)
        assert f"{told} {number} devices in place of {was}\n" in err and recorded == number
    # The same number; no dropout; not known, as in runs of before or in a damaged line.
    assert "masks" not in warnings(eight)[0] + warnings(eight, fsdp=8)[0]
    assert "masks" not in warnings(four, dropout=0.0)[0]
    for line in ("\0\0", "[1]", '{"devices": 4}'):
        assert "masks" not in warnings(line)[0]


FOLDERS = ["checkpoints", "tensorboard", "profile"]


@pytest.mark.parametrize("name", [".lock", "loss.png", "samples.txt", "metrics.jsonl", *FOLDERS])
def test_a_folder_in_place_of_a_file_is_refused_at_the_start(tmp_path, name):
    workdir = write_run(tmp_path / "run", make_config())
    (workdir / name).unlink(missing_ok=True)
    (workdir / name).touch() if name in FOLDERS else (workdir / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} is (no|a) folder, where a run writes a f"):
        run_files.check_options(workdir, make_config())


def test_a_workdir_where_nothing_can_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/runs/first")):
        with pytest.raises(UserError, match=rf"written in {place} \(.*Give another --workdir"):
            run_files.check_options(place, make_config())
    run_files.check_options(tmp_path / "runs" / "first", make_config())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_folder_of_prepared_corpora_may_lie_in_the_workdir(tmp_path):
    config = make_config(data=dict(data_dir=str(tmp_path / "run" / "data")))
    (tmp_path / "run" / "data").mkdir(parents=True)
    run_files.check_options(tmp_path / "run", config)
    run_files.refuse_changes(tmp_path / "run", config)
    (tmp_path / "run" / "other").touch()
    with pytest.raises(UserError, match="holds files that do not belong to a run"):
        run_files.check_options(tmp_path / "run", config)


def test_a_continued_run_has_no_samples_before_its_end(tmp_path, prepared):
    config = make_config(train=dict(num_steps=4))
    workdir = write_run(tmp_path / "run", config, 4, checkpoints=(2, 4))
    assert not run_files.is_finished(workdir, config, start=4)
    (workdir / "samples.txt").touch()
    assert run_files.is_finished(workdir, config, start=4)
    assert not run_files.is_finished(workdir, config, start=2)  # the last checkpoint is damaged
    longer = make_config(train=dict(num_steps=6))
    assert not run_files.is_finished(workdir, longer, start=4)
    run_files.write(workdir, longer, prepared)
    assert not (workdir / "samples.txt").exists()


@pytest.mark.parametrize(
    ("schedule", "start", "num_steps", "told"),
    [
        *(("cosine", 4, 40, False), ("cosine", 4, 60, True), ("constant", 4, 60, False)),
        *(("cosine", 40, 60, True), ("constant", 40, 60, False), ("wsd", 20, 60, True)),
    ],
)
def test_another_number_of_steps_is_told_where_it_changes_the_learning_rate(
    tmp_path, prepared, capsys, schedule, start, num_steps, told
):
    peak = OptimConfig().learning_rate
    rates = dict(schedule=schedule, warmup_steps=2)
    rates |= dict(end_learning_rate=peak, learning_rate=peak) if schedule == "constant" else {}
    rates |= dict(decay_percent=20.0) if schedule == "wsd" else {}
    begun = make_config(train=dict(num_steps=40), optim=rates)
    now = make_config(train=dict(num_steps=num_steps), optim=rates)
    workdir = write_run(tmp_path / "run", begun, start, (start,))
    run_files.begin(workdir, now, prepared, start)
    line = f"warning: the run was last started with train.num_steps=40; from step {start} on, its "
    old, new = (make_schedule(now.optim, number)(start) for number in (40, num_steps))
    line += "learning rate follows the schedule of 60 steps"
    # wsd is stable at step 20 of 40 and of 60, and falls at another one.
    line += "\n" if schedule == "wsd" else f": {new:.2e} in place of {old:.2e}\n"
    assert capsys.readouterr().err == line * told


DOCUMENTS = [f"document {i} " * (10 + i % 3) for i in range(30)]


def data_at(directory, documents=DOCUMENTS, **options):
    """Options that name a text of several documents, which is written."""
    directory.mkdir()
    for number, text in enumerate(documents):
        (directory / f"{number:02}.txt").write_text(text)
    return dict(corpus=f"text:{directory}/*.txt", tokenizer="byte", val_fraction=0.2) | options


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Starts a run on data, and gives what continues it on other data."""
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path / "data"))

    def begin(data):
        config = make_config(data=data)
        run_files.write(tmp_path / "run", config, prepare(config.data))

    def resume(data):
        config = make_config(data=data)
        run_files.check_options(tmp_path / "run", config)
        run_files.check_data(tmp_path / "run", prepare(config.data))

    return begin, resume


def test_a_text_with_one_other_character_is_refused(tmp_path, begun):
    begin, resume = begun
    text = "to be or not to be, that is the question. " * 2000
    begin(data_at(tmp_path / "here", [text]))
    for position in (30_001, 41_234, 55_555):
        other = data_at(tmp_path / str(position), [text[:position] + "#" + text[position + 1 :]])
        with pytest.raises(UserError, match=r"text that data\.corpus names is no longer what"):
            resume(other)


def test_a_run_continues_on_its_text_wherever_that_lies(tmp_path, begun):
    begin, resume = begun
    begin(data_at(tmp_path / "here"))
    resume(data_at(tmp_path / "there"))
    altered = [text.replace("ent 7 ", "ent 9 ") for text in DOCUMENTS]
    reordered = [*DOCUMENTS[3:], *DOCUMENTS[:3]]
    for name, documents in (("altered", altered), ("reordered", reordered)):
        with pytest.raises(UserError, match=r"text that data\.corpus names is no longer what"):
            resume(data_at(tmp_path / name, documents))


def test_a_run_continues_with_its_tokenizer_wherever_that_lies(tmp_path, begun):
    begin, resume = begun
    CharTokenizer("".join(sorted(set("".join(DOCUMENTS)))), True).save(tmp_path / "first.json")
    CharTokenizer("".join(sorted(set("".join(DOCUMENTS)) | {"~"})), True).save(tmp_path / "2.json")
    shutil.copy(tmp_path / "first.json", tmp_path / "moved.json")
    data = data_at(tmp_path / "here", tokenizer=f"{tmp_path}/first.json")
    begin(data)
    resume(data | {"tokenizer": f"{tmp_path}/moved.json"})
    with pytest.raises(UserError, match=r"tokenizer that data\.tokenizer names is no longer what"):
        resume(data | {"tokenizer": f"{tmp_path}/2.json"})


def test_another_tokenizer_than_that_of_data_json_is_not_blamed_on_the_text(tmp_path, begun):
    begin, resume = begun
    data = data_at(tmp_path / "here")
    begin(data)
    file = tmp_path / "run" / "data.json"
    tree = json.loads(file.read_text())
    del tree["crc32"], tree["tokenizer_sha256"]  # an earlier version wrote the name alone
    file.write_text(json.dumps(tree | {"tokenizer": "char"}))
    with pytest.raises(UserError, match=r"tokenizer that data\.tokenizer names is no longer what"):
        resume(data)


@pytest.mark.parametrize(
    ("option", "value"),
    [("corpus", "pystdlib"), ("corpus", "jsonl:*.jsonl"), ("tokenizer", "gpt2")],
)
def test_what_is_no_move_is_refused_before_it_is_prepared(tmp_path, begun, option, value):
    begin, resume = begun
    data = data_at(tmp_path / "here")
    begin(data)
    with pytest.raises(UserError, match=rf"holds a run with data\.{option}=.*, not {value[:5]}"):
        resume(data | {option: value})


def test_data_json_of_an_earlier_version_is_compared_in_what_it_holds(tmp_path, begun):
    begin, resume = begun
    data = data_at(tmp_path / "here")
    begin(data)
    file = tmp_path / "run" / "data.json"
    tree = json.loads(file.read_text())
    del tree["token_crc32"]
    file.write_text(json.dumps(tree))
    resume(data)
