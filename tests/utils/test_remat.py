"""Rematerialisation: what each policy keeps, what it computes again, and that nothing changes."""

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
from tests.model import test_model
from tests.model.test_model import loss, step_of, tokens_of

# Names of results, and how many arrays of a layer have them: queries, keys, values and the
# projection; attention's output and statistics; the first product of the MLP.
ATTENTION = {"attention/linear": 4, "attention/core": 2}
MLP = {"mlp/linear": 1}
KEEPS = {
    "full": {},
    "attention": ATTENTION,
    "mlp": MLP,
    "dots": ATTENTION | MLP,
}


replaced = functools.partial(test_model.replaced, attention="blocked")


def init(cfg):
    """Parameters do not hang on how layers are rematerialised."""
    return first_params(dataclasses.replace(cfg, remat="none"))


@functools.cache
def compiled(cfg):
    """Compiles as a run does, but for what `compiles_fast` leaves out."""
    key = jax.random.key(5) if cfg.dropout else None
    lowered = step_of.lower(cfg, init(cfg), tokens_of(1), key)
    return lowered.compile(
        compiler_options(cfg.remat, looped=cfg.loops_over_layers, platform="cpu")
    )


def saved_results(cfg, capsys):
    """Returns how many arrays a layer keeps of each name."""
    print_saved_residuals(functools.partial(loss, cfg), init(cfg), tokens_of(1))
    printed = capsys.readouterr().out
    names = collections.Counter(re.findall(r"named '(\w+/\w+)'", printed))
    return {name: number / cfg.num_layers for name, number in names.items()}


@pytest.mark.parametrize("policy", KEPT)
def test_a_policy_keeps_the_products_that_it_names(policy, capsys):
    assert saved_results(replaced(remat=policy), capsys) == KEEPS[policy]


def test_a_linear_map_that_an_ingredient_adds_is_kept_like_others(capsys):
    cfg = replaced(remat="dots", attention_gate=True)
    assert saved_results(cfg, capsys) == KEEPS["dots"] | {"attention/linear": 5}


@pytest.mark.thorough
@pytest.mark.usefixtures("compiles_fully")
@pytest.mark.parametrize("scan_unroll", [0, 1, test_model.SMALL.num_layers])
@pytest.mark.parametrize("policy", KEPT)
def test_the_compiled_program_computes_the_other_products_again(policy, scan_unroll):
    again = collections.Counter()
    cfg = replaced(
        remat=policy, scan_layers=scan_unroll > 0, scan_unroll=max(1, scan_unroll)
    )
    for line in compiled(cfg).as_text().splitlines():
        found = re.search(
            r"rematted_computation/.*\b(attn|mlp)/([^\"]*)/dot_general", line
        )
        if " dot(" in line and found:
            parts = (part for part in found[2].split("/") if part.startswith("c_"))
            name = next(parts, "core").removesuffix(".parts")
            again[f"{found[1]}/{name}"] += 1
    layers = 1 if cfg.loops_over_layers else cfg.num_layers
    wanted = {}
    if policy in ("full", "mlp"):  # two blocks of keys
        wanted |= {"attn/c_attn": layers, "attn/core": 4 * layers}
        wanted |= {"attn/c_proj": layers}
    if policy in ("full", "attention"):
        wanted |= {"mlp/c_fc": layers}
    assert again == wanted


@pytest.mark.parametrize(
    ("policy", "scan_layers", "dropout"),
    [
        ("mlp", True, 0.0),  # test_layouts.py has them all
        thorough("full", False, 0.1),  # the same numbers are dropped again
        *(thorough(policy, True, 0.1) for policy in ("dots", "attention", "mlp")),
    ],
)
def test_remat_changes_no_loss_and_no_gradient(policy, scan_layers, dropout):
    attention = "auto" if dropout else "blocked"
    plain = replaced(scan_layers=scan_layers, dropout=dropout, attention=attention)
    arguments = init(plain), tokens_of(1), jax.random.key(5) if dropout else None
    result = compiled(dataclasses.replace(plain, remat=policy))(*arguments)
    chex.assert_trees_all_close(result, compiled(plain)(*arguments), atol=1e-6)
