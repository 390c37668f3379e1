"""Load models from runs and Hugging Face directories, and convert between the two."""

import dataclasses
import re
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags

from gpt2.config import (
    Config,
    DataConfig,
    GPTConfig,
    ModelConfig,
    ParallelConfig,
    load_config,
    with_options,
)
from gpt2.data import tokenizer as tokenizers
from gpt2.errors import UserError, require_choice
from gpt2.hf.config import read_config
from gpt2.hf.directory import load, save
from gpt2.hf.family import FREE, SCALED_ROPE, canonical
from gpt2.hf.tokenizer_files import load_tokenizer
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import (
    ITEMS,
    WEIGHTS,
    find_damage,
    require_safe_path,
    saved_steps,
)
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils import files, stores
from gpt2.utils.scan import in_layout
from gpt2.utils.trees import Tree

# A run that saves a new checkpoint removes the files of an old one within this number of seconds.
_SECONDS_TO_REMOVE = 5.0
_MODEL = {field.name for field in dataclasses.fields(ModelConfig)}


def import_run(source: str | Path, location: str | Path) -> None:
    """Write a new run at `location` with the weights of the Hugging Face directory `source`.

    The run has one checkpoint, at step 0. `location` is a directory or a URL.
    """
    with stores.writing(location) as workdir, files.new_directory(workdir) as scratch:
        require_safe_path(workdir)
        cfg, params, tokenizer = load_model(None, source)
        options = {name: getattr(cfg, name) for name in _MODEL}
        data = DataConfig(tokenizer=f"{location}/tokenizer.json")
        config = Config(model=ModelConfig(**options), data=data)
        files.write_json(scratch / "config.json", config.to_dict())
        tokenizer.save(scratch / "tokenizer.json")
        state = TrainState(jnp.int32(0), params, opt_state=(), loss_scale=None)
        with Checkpointer(scratch) as checkpointer:
            checkpointer.save(state, step=0)
        checkpointer.raise_failure()


def export_run(
    workdir: str | Path, location: str | Path, checkpoint: str | int = "best"
) -> None:
    """Write a checkpoint of the run in `workdir` as a new Hugging Face directory at `location`.

    `checkpoint` is `best`, `latest` or a step.
    """
    with stores.writing(location) as directory:
        save(directory, *load_model(workdir, None, checkpoint))


def define_source() -> None:
    """Define `--workdir`, `--hf` and `--checkpoint`, the arguments of `load_model`."""
    flags.DEFINE_string("workdir", None, "Directory of a run.")
    flags.DEFINE_string(
        "hf", None, "Directory of a Hugging Face model, instead of --workdir."
    )
    flags.DEFINE_string(
        "checkpoint", "best", "Checkpoint of the run: best, latest or a step."
    )
    flags.register_multi_flags_validator(
        ["workdir", "hf"],
        lambda given: bool(given["workdir"]) != bool(given["hf"]),
        "Give either --workdir or --hf",
    )


def load_model(
    workdir: str | Path | None,
    hf_directory: str | Path | None,
    checkpoint: str | int = "best",
) -> tuple[GPTConfig, dict, tokenizers.Tokenizer]:
    """Return the config, the parameters and the tokenizer of a run or a Hugging Face directory.

    If `workdir` is given, it is read, otherwise `hf_directory`. `checkpoint` chooses the checkpoint
    of a run: `best`, `latest` or a step. The parameters are on one device.
    """
    if workdir:
        folder = stores.fetch(workdir)
        config, params = load_params(folder, checkpoint)
        return config.gpt(), params, tokenizers.load(folder / "tokenizer.json")
    folder = stores.fetch(hf_directory or "", stores.HUGGING_FACE)
    cfg, params = load(folder)
    return cfg, jax.device_put(params), load_tokenizer(folder, cfg)


def load_params(workdir: Path | str, which: str | int = "best") -> tuple[Config, Tree]:
    """Return the options and the weights of a run. The weights are on one device.

    If the optimizer averages weights, the result contains the averages instead. `which` is
    `latest`, a step, or `best`: the checkpoint with the lowest validation loss, or the latest if no
    checkpoint was validated. The run's values of `parallel.`, `memory.remat` and `model.attention`
    suit the devices on which it trained, so the returned options have the defaults instead. The
    exception is `model.attention=plain`, which works on every device and is retained.
    """
    workdir = Path(workdir)
    saved = saved_steps(workdir)
    try:
        return _load_params(workdir, saved, which)
    except (UserError, OSError):
        # A run that is still training may have saved a newer checkpoint while this process read an
        # older one, and may be removing the files of the older one. Then try again.
        if files.is_locked(workdir / ".lock"):
            time.sleep(_SECONDS_TO_REMOVE)
        if {*saved} <= {*saved_steps(workdir)}:
            raise
    return load_params(workdir, which)


def _load_params(
    workdir: Path, saved: list[int], which: str | int
) -> tuple[Config, Tree]:
    config = load_config(workdir)
    # One device may have only one micro-batch, which cannot measure the noise scale of training.
    options = {"memory.remat": "none", "logging.noise_scale": False}
    if config.model.attention != "plain":  # every device supports `plain`
        options["model.attention"] = "auto"
    config = with_options(config, options)
    config = dataclasses.replace(config, parallel=ParallelConfig())
    if not saved:
        raise UserError(
            f"{stores.url_or_path(workdir)} has no checkpoint yet",
            "Wait until the run saves one, or repeat the command that trains it",
        )
    remedy = "Restore the checkpoint from a copy, or choose another checkpoint"
    if which == "best":
        for candidate in saved:
            if damage := find_damage(workdir, candidate, ("metrics",)):
                raise UserError(damage, remedy)
    program = Program.from_config(config, jax.local_devices()[:1])
    with Checkpointer(workdir, read_only=True) as checkpointer:
        steps = {str(step): step for step in saved}
        steps["latest"] = saved[-1]
        steps["best"] = saved[-1]
        if which == "best" and (best := checkpointer.best()):
            steps["best"] = best[0]
        require_choice(f"{workdir}: checkpoint", str(which), tuple(steps))
        step = steps[str(which)]
        # The averages of the weights belong to the optimizer's state, which can only be read as a
        # whole.
        averages = config.optim.averages
        if damage := find_damage(workdir, step, ITEMS if averages else WEIGHTS):
            raise UserError(damage, remedy)
        if averages:
            return config, checkpointer.restore(step, program).eval_params
        return config, checkpointer.restore_params(step, program)


def with_model_of_weights(
    config: Config, chosen: Collection[str], workdir: Path
) -> Config:
    """Return the config with the `model.` options of the weights that `train.init_from` names.

    `chosen` names the options that the user has set. They do not change, and a UserError is raised
    if one of them does not fit the weights. The options in FREE do not change either, because
    weights do not determine them. If `workdir` already contains a run, this run continues: the
    options then come from the run's config.json.
    """
    names = _MODEL - {*FREE}
    if (
        config.model.vocab_size
    ):  # otherwise the weights' vocabulary, which may be padded
        names.remove("vocab_size")
    if (workdir / "config.json").exists():
        found = load_config(workdir).gpt()
    else:
        source = config.train.init_from
        kind, directory, _ = _split_source(source)
        found, theirs = _read_source(kind, directory)
        spec = config.data.tokenizer
        if tokenizers.is_trained(spec):
            # Tokenizers that are trained on different texts differ.
            if kind == "hf" or load_config(directory).data.corpus != config.data.corpus:
                raise _other_tokenizer(source, directory)
        else:
            end_of_text = config.data.end_of_text
            tokenizer = tokenizers.build(spec, end_of_text=end_of_text)
            _require_same_tokens(source, directory, theirs, tokenizer)
        set_names = {name for name in names if f"model.{name}" in chosen}
        wanted = canonical(config.model)
        _require_same_model(source, canonical(found), wanted, set_names)
        if "context_length" in set_names and found.window >= wanted.context_length:
            found = dataclasses.replace(found, window=0, window_pattern="S")
    options = dict[str, object]()
    for name in names:
        if f"model.{name}" not in chosen:
            options[f"model.{name}"] = getattr(found, name)
    return with_options(config, options)


def _require_same_model(
    source: str, found: GPTConfig, wanted: ModelConfig, names: set[str]
) -> None:
    free = {*FREE}
    if found.context_length >= wanted.context_length or found.position != "learned":
        free.add("context_length")
    if found.rope_scaling == "none":
        free.update(SCALED_ROPE)
    # Such a window has no effect.
    if found.window >= wanted.context_length and not wanted.window:
        free.update(("window", "window_pattern"))
    different = list[str]()
    for name in sorted(names - free):
        theirs = getattr(found, name)
        ours = getattr(wanted, name)
        if ours != theirs:
            different.append(f"model.{name}={theirs}, not {ours}")
    if different:
        raise UserError(
            f"The weights of {source} have {'; '.join(different)}",
            "Leave these options out, because their values come from the weights",
        )


def _read_source(kind: str, directory: Path) -> tuple[GPTConfig, tokenizers.Tokenizer]:
    """Return the config and the tokenizer in a directory, without reading its weights.

    `kind` is `run` or, for a Hugging Face directory, `hf`.
    """
    if kind == "run":
        cfg = load_config(directory).gpt()
        return cfg, tokenizers.load(directory / "tokenizer.json")
    cfg = read_config(directory)
    tokenizer = load_tokenizer(directory, cfg)
    return dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size), tokenizer


def _require_same_tokens(
    source: str,
    directory: Path,
    theirs: tokenizers.Tokenizer,
    tokenizer: tokenizers.Tokenizer,
) -> None:
    """Raise a UserError unless all tokens of the weights' tokenizer `theirs` are `tokenizer`'s.

    Their end-of-text tokens may differ. `theirs` is given the end-of-text token of `tokenizer`.
    """
    theirs.eot = tokenizer.eot  # data.end_of_text may choose another token
    if tokenizers.fingerprint(theirs) != tokenizers.fingerprint(tokenizer):
        raise _other_tokenizer(source, directory)


def _other_tokenizer(source: str, directory: Path) -> UserError:
    return UserError(
        f"The weights of {source} were trained with another tokenizer than data.tokenizer, which "
        "encodes the corpus",
        f"Use --config.data.tokenizer={directory}/tokenizer.json",
    )


def load_initial_params(
    source: str, cfg: GPTConfig, tokenizer: tokenizers.Tokenizer
) -> dict:
    """Load the weights that `train.init_from` names, to initialise the model that `cfg` describes.

    `source` is the value of `train.init_from`. `cfg` determines whether layers are scanned or
    unrolled. Raise a UserError if `cfg` describes another architecture than the weights have, or if
    `tokenizer` is not the tokenizer of the weights. Two differences are allowed: `cfg` may set
    `model.rope_scaling` if the weights were trained without it, and the context length may differ.
    With learned positions, the context must not be longer than that of the weights. A shorter
    context uses the first position embeddings.
    """
    kind, directory, step = _split_source(source)
    found, theirs = _read_source(kind, directory)
    _require_same_tokens(source, directory, theirs, tokenizer)
    _require_same_model(source, canonical(found), canonical(cfg), _MODEL)
    if kind == "hf":
        _, params, _ = load_model(None, directory)
    else:
        _, params, _ = load_model(directory, None, step)
    if cfg.position == "learned":
        positions = params["wpe"]["embedding"][: cfg.context_length]
        params = params | {"wpe": {"embedding": positions}}
    return jax.jit(partial(in_layout, scanned=cfg.scan_layers))(params)


def _split_source(source: str) -> tuple[str, Path, str]:
    """Split a value of `train.init_from` into its kind (hf or run), directory and checkpoint.

    If the directory is a URL, fetch its files first.
    """
    kind, _, location = source.partition(":")
    if kind == "hf":
        return kind, stores.fetch(location, stores.HUGGING_FACE), "best"
    step = "best"
    named = re.fullmatch(r"(.+)@(\w+)", location)
    # A directory may have an @ in its name.
    if named and not Path(location).expanduser().is_dir():
        location, step = named.groups()
    return kind, stores.fetch(location), step
