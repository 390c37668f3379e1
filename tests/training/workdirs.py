"""Small configs, and workdirs in which a run has ended."""

import json

from configs import quickstart
from gpt2.config import Config, with_options
from tests.helpers import options_of

TINY_MODEL = """
    model.vocab_size=50 model.context_length=8 model.num_layers=1 model.num_heads=2
    model.embed_dim=16"""


def make_config(text="", **data):
    """Return the quickstart's config with a tiny model, the options in `text`, and `data`."""
    config = Config.from_dict(quickstart.get_config())
    options = options_of(f"{TINY_MODEL} {text}")
    for name, value in data.items():
        options[f"data.{name}"] = value
    return with_options(config, options)


def write_run(workdir, config, checkpoints=()):
    """Write the files of a run, with empty checkpoints."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    for step in checkpoints:
        (workdir / "checkpoints" / str(step)).mkdir(parents=True)
    return workdir
