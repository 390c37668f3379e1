"""Rematerialisation: what each policy saves and recomputes, with the same loss and gradients."""

import collections
import dataclasses
import functools
import re

import chex
import jax
import pytest
from jax.ad_checkpoint import print_saved_residuals

from gpt2.utils.remat import KEPT, compiler_options
from tests.helpers import first_params, thorough
from tests.model import models
from tests.model.models import loss, step_of
from tests.model.switches import tokens_of

# The number of arrays that a policy saves in a layer, by the names of the results: queries, keys,
# values and the projection; the output and statistics of attention; the first product of the MLP.
ATTENTION = {"attention/linear": 4, "attention/core": 2}
MLP = {"mlp/linear": 1}
SAVED = {"full": {}, "attention": ATTENTION, "mlp": MLP, "dots": ATTENTION | MLP}


replaced = functools.partial(models.replaced, attention="blocked")


def init(cfg):
    """Return parameters, which do not depend on the rematerialisation."""
    return first_params(dataclasses.replace(cfg, remat="none"))


@functools.cache
def compiled(cfg):
    """Compile as a run does, except for the optimizations that `compiles_fast` turns off."""
    key = jax.random.key(5) if cfg.dropout else None
    lowered = step_of.lower(cfg, init(cfg), tokens_of(1), key)
    options = compiler_options(cfg.remat, looped=cfg.loops_over_layers, platform="cpu")
    return lowered.compile(options)


def saved_results(cfg, capsys):
    """Return the number of arrays that a layer saves of each name."""
    print_saved_residuals(functools.partial(loss, cfg), init(cfg), tokens_of(1))
    printed = capsys.readouterr().out
    names = collections.Counter(re.findall(r"named '(\w+/\w+)'", printed))
    return {name: number / cfg.num_layers for name, number in names.items()}


@pytest.mark.parametrize("policy", KEPT)
def test_a_policy_keeps_the_products_that_it_names(policy, capsys):
    assert saved_results(replaced(remat=policy), capsys) == SAVED[policy]


def test_a_linear_map_that_an_ingredient_adds_is_kept_like_others(capsys):
    cfg = replaced(remat="dots", attention_gate=True)
    assert saved_results(cfg, capsys) == SAVED["dots"] | {"attention/linear": 5}


@pytest.mark.thorough
@pytest.mark.usefixtures("compiles_fully")
@pytest.mark.parametrize("scan_unroll", [0, 1, models.SMALL.num_layers])
@pytest.mark.parametrize("policy", KEPT)
def test_the_compiled_program_computes_the_other_products_again(policy, scan_unroll):
    cfg = replaced(remat=policy)
    if scan_unroll:
        cfg = dataclasses.replace(cfg, scan_layers=True, scan_unroll=scan_unroll)
    recomputed = collections.Counter()
    pattern = re.compile(r'rematted_computation/.*\b(attn|mlp)/([^"]*)/dot_general')
    for line in compiled(cfg).as_text().splitlines():
        found = pattern.search(line)
        if " dot(" not in line or not found:
            continue
        module, path = found.groups()
        layer = re.search(r"\bc_\w+", path)
        product = layer[0] if layer else "core"
        recomputed[f"{module}/{product}"] += 1
    layers = 1 if cfg.loops_over_layers else cfg.num_layers
    expected = {}
    if policy in ("full", "mlp"):
        expected["attn/c_attn"] = layers
        expected["attn/core"] = 4 * layers  # two blocks of keys
        expected["attn/c_proj"] = layers
    if policy in ("full", "attention"):
        expected["mlp/c_fc"] = layers
    assert recomputed == expected


@pytest.mark.parametrize(
    ("policy", "scan_layers", "dropout"),
    [
        ("mlp", True, 0.0),  # test_layouts.py has every policy
        thorough("full", False, 0.1),  # the recomputation has the same dropout masks
        *(thorough(policy, True, 0.1) for policy in ("dots", "attention", "mlp")),
    ],
)
def test_remat_changes_no_loss_and_no_gradient(policy, scan_layers, dropout):
    attention = "auto" if dropout else "blocked"
    plain = replaced(
        scan_layers=scan_layers,
        dropout=dropout,
        stochastic_depth=dropout,
        attention=attention,
    )
    rematted = dataclasses.replace(plain, remat=policy)
    key = jax.random.key(5) if dropout else None
    arguments = init(plain), tokens_of(1), key
    result = compiled(rematted)(*arguments)
    expected = compiled(plain)(*arguments)
    chex.assert_trees_all_close(result, expected, atol=1e-6)
