"""What a model may have in addition to GPT-2: a file each.

The core applies a seam of `gpt2.model.seams.Ingredient` without knowing the ingredients. Deleting
one takes its file and its option.
"""

import dataclasses
import functools
import importlib
import pkgutil

from gpt2.config import GPTConfig
from gpt2.model.seams import Ingredient


def _find_ingredients() -> tuple[type[Ingredient], ...]:
    """Import every file of this folder; sort its ingredients like their options."""
    for file in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{file.name}")
    options = [field.name for field in dataclasses.fields(GPTConfig)]
    kinds = Ingredient.__subclasses__()
    return tuple(sorted(kinds, key=lambda kind: options.index(kind.option)))


# In the order of their options in configs/default.py, which is the order in which they act.
INGREDIENTS = _find_ingredients()


@functools.cache
def ingredients_of(config: GPTConfig) -> tuple[Ingredient, ...]:
    """Return the ingredients of a model; GPT-2 has none."""
    return tuple(kind(config) for kind in INGREDIENTS if kind.is_wanted(config))


def score_term_options(config: GPTConfig) -> tuple[str, ...]:
    """Return the options, such as `model.attention_sink`, that bring a term of the scores."""
    return tuple(
        f"model.{ingredient.option}"
        for ingredient in ingredients_of(config)
        if ingredient.acts_at("score_terms")
    )
