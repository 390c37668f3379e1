"""Results as text for a terminal, and as rows of a file."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpt2.benchmark.first_step import Agreement, first_difference
from gpt2.benchmark.measure import OURS
from gpt2.utils.files import write_text
from gpt2.utils.terminal import columns as terminal_columns
from gpt2.utils.terminal import wrap
from gpt2.utils.text import counted

_SETTINGS = (
    *("subject", "model", "num_layers", "num_heads", "embed_dim", "context_length", "vocab_size"),
    *("batch_size", "compute", "matmul_precision", "optimizer", "with_data", "remat"),
    *("scan_layers", "backend", "data", "fsdp", "tensor"),
)
_FIGURES = (
    *("step_seconds", "tokens_per_second", "mfu", "peak_bytes", "compile_seconds"),
    *("warm_up_seconds", "compared"),
)
_STEADY = 1.5  # what the slowest turn may take of the fastest one's time

Results = dict[str, dict[str, Any]]


def rows(case: dict[str, Any], results: Results) -> list[dict[str, Any]]:
    """Returns a row for each contestant of a case: settings, figures and ratio, by name."""
    found = []
    for name, result in results.items():
        speedup, low, high = result["speedup"]
        # A variation may compute in another type. Peers compute as we do.
        products = results[OURS] | result
        settings = case | {_setting(option): value for option, value in result["vary"].items()}
        settings["compute"] = case["compute"]  # in which the rows of a case are compared
        found.append(
            {"contestant": name}
            | {setting: settings[setting] for setting in _SETTINGS}
            | {"attention": case["attention"], "our_attention": result.get("attention")}
            | {"our_compute": result.get("compute")}
            | {"device": result["device"], "cpu_cores": os.cpu_count()}
            | {"versions": " ".join(f"{k} {v}" for k, v in result["versions"].items())}
            | {figure: result[figure] for figure in _FIGURES}
            | {"least_step_seconds": min(result["turns"]), "rounds": len(result["turns"])}
            | {"most_step_seconds": max(result["turns"])}
            | {"speedup": speedup, "speedup_low": low, "speedup_high": high}
            | {"product_flops": products["peak_flops"], "product_source": products["peak_source"]}
        )
    return found


def _setting(option: str) -> str:
    """Returns the name in a case of an option of the config."""
    return "optimizer" if option == "optim.name" else option.rpartition(".")[2]


def write_csv(path: Path, table: Sequence[dict[str, Any]]) -> None:
    """Writes `rows` of one case or more to a file, seconds and bytes unrounded."""
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_text(path, text.getvalue())


def table(case: dict[str, Any], results: Results) -> str:
    """Returns all settings, and a line for each contestant, as text for a terminal."""
    ours = results[OURS]
    columns = [_column("", max(14, *(len(name) + 1 for name in results)), results)]
    columns += [
        _column("step ms", 10, (f"{1e3 * r['step_seconds']:,.1f}" for r in results.values())),
        _column("(least", 9, (f"{1e3 * min(r['turns']):,.1f}" for r in results.values())),
        _column("most)", 9, (f"{1e3 * max(r['turns']):,.1f}" for r in results.values())),
        _column("tokens/s", 12, (f"{r['tokens_per_second']:,.0f}" for r in results.values())),
        _column("MFU", 6, (f"{r['mfu']:.0%}" if r["mfu"] else "-" for r in results.values())),
        _column("memory GB", 11, (f"{r['peak_bytes'] / 1e9:.2f}" for r in results.values())),
        _column("compile s", 11, (f"{r['compile_seconds']:.1f}" for r in results.values())),
        _column("warm-up s", 11, (f"{r['warm_up_seconds']:.1f}" for r in results.values())),
    ]
    if len(results) > 1:
        ratios = ("" if n == OURS else format_ratio(r["speedup"]) for n, r in results.items())
        columns.append(["  jax is faster by (95 %)", *(f"  {ratio}" for ratio in ratios)])
    lines = [wrap(line) for line in _header(case, results)] + _beside(columns)
    if unsteady := [n for n, r in results.items() if max(r["turns"]) > _STEADY * min(r["turns"])]:
        lines += [
            "",
            f"turns of {', '.join(unsteady)} differ more than {_STEADY:g} times: other programs "
            "may take the machine, so measure again",
        ]
    if ours["shares"]:
        shares = ", ".join(f"{scope} {share:.0%}" for scope, share in ours["shares"].items())
        lines += ["", f"time by part: {shares}"]
    return "\n".join(lines)


def _column(title: str, width: int, cells: Iterable[str]) -> list[str]:
    """Returns the cells of a column, which numbers end and the names of contestants begin."""
    return [cell.rjust(width) if title else cell.ljust(width) for cell in (title, *cells)]


def _beside(columns: list[list[str]]) -> list[str]:
    """Returns the lines of a table: of several where the terminal is too narrow for all columns."""
    names, lines = columns[0], []
    shown = [names]
    for column in [*columns[1:], None]:
        if column is None or sum(len(c[0]) for c in [*shown, column]) > terminal_columns():
            rows = ("".join(cells).rstrip() for cells in zip(*shown, strict=True))
            lines += ["", *rows]
            shown = [names]
        if column is not None:
            shown.append(column)
    return lines


def format_ratio(speedup: list[float | None]) -> str:
    """Writes a ratio and its interval."""
    middle, low, high = speedup
    return f"{middle:.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def _header(case: dict[str, Any], results: Results) -> list[str]:
    ours = results[OURS]
    by_name = dict(item for result in results.values() for item in result["versions"].items())
    versions = ", ".join(f"{name} {version}" for name, version in by_name.items())
    rates = {result["compute"]: result for result in results.values() if "compute" in result}
    products = "; ".join(
        (f"{compute} " if len(rates) > 1 else "")
        + (
            f"{each['peak_flops'] / 1e9:,.0f} GFLOP/s, {each['peak_source']}"
            if each["peak_flops"]
            else "-"
        )
        for compute, each in rates.items()
    )
    layout = " ".join(f"{name}={case[name]}" for name in ("data", "fsdp", "tensor"))
    compared = [name for name, result in results.items() if result["compared"] and name != OURS]
    measured = f"products: {products}; {counted(len(ours['turns']), 'turn')} each"
    if compared:
        measured += f"; the first steps of {', '.join(compared)} equal jax's"
    lines = [
        f"{case['subject']} {case['model']} ({counted(case['num_layers'], 'layer')}, "
        f"{counted(case['num_heads'], 'head')}, width {case['embed_dim']}, "
        f"{case['vocab_size']} tokens in the vocabulary), "
        f"{case['batch_size']} x {case['context_length']} tokens",
        f"{case['compute']}, precision of products {case['matmul_precision']}, attention "
        f"{case['attention']} ({ours['attention']} in jax)"
        + (f", {case['optimizer']}" if case["subject"] == "train" else ""),
        f"remat {case['remat']}, layers {'scanned' if case['scan_layers'] else 'unrolled'} in jax, "
        f"{case['backend']} {layout}, data {'in' if case['with_data'] else 'out'}side of the time",
        f"{ours['device']}, {os.cpu_count()} CPU cores, {versions}",
        measured,
    ]
    # Of a step that only reads text, the second and the third line would tell nothing.
    return [lines[0], *lines[3:]] if case["subject"] == "data" else lines


def agreement_table(case: dict[str, Any], found: Iterable[tuple[str, list[Agreement]]]) -> str:
    """Returns how the first steps of peers compare, a line for each: the largest differences."""
    lines = [
        f"first steps of {case['model']}, {case['batch_size']} x {case['context_length']} tokens, "
        f"{case['compute']}, precision of products {case['matmul_precision']}, "
        f"{case['optimizer']}, attention {case['attention']}",
        "",
        "differences".ljust(18) + "".join(f"{t:18s}" for t in ("loss", "gradients", "weights")),
    ]
    for name, agreements in found:
        columns = [
            max(
                (a for a in agreements if a.what.startswith(what)),
                key=lambda a: a.found,
                default=None,
            )
            for what in ("loss", "gradient of", "weights of")
        ]
        largest = [f"{a.found:.0e} of {a.allowed:g}" if a else "-" for a in columns]
        difference = first_difference(agreements)
        verdict = f"differs: {difference}" if difference else "equal"
        lines.append(f"{name:18s}" + "".join(f"{text:18s}" for text in largest) + verdict)
    return "\n".join(lines)
