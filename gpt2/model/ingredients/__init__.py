"""What a model may have beside GPT-2: a file each, and their table, in the order of the seams.

The core calls the seams of `base.Ingredient` without knowing who is there. An ingredient goes by
deleting its file, its row here and its option.
"""

import functools
import math

from gpt2.config import GPTConfig
from gpt2.model.ingredients.alibi import Alibi
from gpt2.model.ingredients.attention_gate import AttentionGate
from gpt2.model.ingredients.attention_sink import AttentionSink
from gpt2.model.ingredients.attention_softcap import AttentionSoftCap
from gpt2.model.ingredients.backout import Backout
from gpt2.model.ingredients.base import (
    Branch,
    Flow,
    Heads,
    Ingredient,
    MakeModule,
)
from gpt2.model.ingredients.bigram_embeddings import BigramEmbeddings
from gpt2.model.ingredients.embedding_skip import EmbeddingSkip
from gpt2.model.ingredients.exclusive_attention import ExclusiveAttention
from gpt2.model.ingredients.experts import Experts
from gpt2.model.ingredients.hyper_connections import HyperConnections
from gpt2.model.ingredients.init import Init
from gpt2.model.ingredients.logit_softcap import LogitSoftCap
from gpt2.model.ingredients.mup import MuP
from gpt2.model.ingredients.norm_position import NormPosition
from gpt2.model.ingredients.parallel_block import ParallelBlock
from gpt2.model.ingredients.qk_norm import QKNorm
from gpt2.model.ingredients.rope_scaling import RopeScaling
from gpt2.model.ingredients.smear import Smear
from gpt2.model.ingredients.value_embeddings import ValueEmbeddings
from gpt2.model.ingredients.value_residual import ValueResidual
from gpt2.model.ingredients.zero_init_projections import ZeroInitProjections

INGREDIENTS: tuple[type[Ingredient], ...] = (
    Init,
    ZeroInitProjections,
    MuP,
    Smear,
    BigramEmbeddings,
    RopeScaling,
    HyperConnections,
    Backout,
    EmbeddingSkip,
    ParallelBlock,
    NormPosition,
    ValueResidual,
    ValueEmbeddings,
    QKNorm,
    AttentionSoftCap,
    Alibi,
    AttentionSink,
    ExclusiveAttention,
    AttentionGate,
    Experts,
    LogitSoftCap,
)


@functools.cache
def ingredients_of(config: GPTConfig) -> tuple[Ingredient, ...]:
    """Returns the ingredients of a model; GPT-2 has none."""
    return tuple(kind(config) for kind in INGREDIENTS if kind.is_wanted(config))


def score_terms(config: GPTConfig) -> dict[str, type]:
    """Returns the options of a model that bring a term of attention's scores, and its kind.

    The kind is `object` for one that no kernel knows.
    """
    kinds: dict[str, type] = {}
    for extra in ingredients_of(config):
        if type(extra).score_terms is not Ingredient.score_terms:
            kinds[f"model.{extra.option}"] = extra.score_term or object
    return kinds


def width_ratio(config: GPTConfig) -> float:
    """Returns a model's width over that for which its rates were tuned."""
    return math.prod(each.width_ratio for each in ingredients_of(config))
