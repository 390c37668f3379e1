"""The ingredients: what a model may have in addition to GPT-2, with one file for each.

The model calls the seams of `gpt2.model.seams.Ingredient` without knowing which ingredients exist.
To remove an ingredient, delete its file and its option.
"""

import dataclasses
import functools
import importlib
import pkgutil

from gpt2.config import GPTConfig
from gpt2.config.options import OPTIONS
from gpt2.errors import UserError
from gpt2.model.seams import Ingredient


def _find_ingredients() -> tuple[type[Ingredient], ...]:
    """Import every file of this folder, and return the ingredients in the order of their options.

    Raise a UserError if an ingredient names an option that does not exist.
    """
    for file in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{file.name}")
    options = [field.name for field in dataclasses.fields(GPTConfig)]
    kinds = Ingredient.__subclasses__()
    for kind in kinds:
        if kind.option not in options:
            raise UserError(
                f"The ingredient {kind.__name__} has option={kind.option!r}, which is not an option"
                " of `Model` in configs/default.py",
                "Correct the attribute, or add the option",
            )
    return tuple(sorted(kinds, key=lambda kind: options.index(kind.option)))


# Ingredients act in this order, which is the order of their options in configs/default.py.
INGREDIENTS = _find_ingredients()


@functools.cache
def ingredients_of(config: GPTConfig) -> tuple[Ingredient, ...]:
    """Return the ingredients that `config` turns on. With the default options, there are none.

    Raise a UserError if an option is set, but the file of the option's ingredient has been deleted.
    """
    implemented = {f"model.{kind.option}" for kind in INGREDIENTS}
    for name, option in OPTIONS.items():
        if option.is_ingredient and name not in implemented:
            value = getattr(config, name.removeprefix("model."))
            if value != option.default:
                raise UserError(
                    f"{name}={value} has no effect, because no file in gpt2/model/ingredients "
                    "implements it",
                    "Restore the file, or leave out the option",
                )
    return tuple(kind(config) for kind in INGREDIENTS if kind.is_wanted(config))


def score_term_options(config: GPTConfig) -> tuple[str, ...]:
    """Return the options in use that change attention's scores in a way that no kernel supports.

    An example is `model.attention_sink`.
    """
    return tuple(
        f"model.{ingredient.option}"
        for ingredient in ingredients_of(config)
        if ingredient.acts_at("score_terms") and not ingredient.has_kernel()
    )
