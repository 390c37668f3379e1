"""The tables of a suite: summary.md, and the block of docs/performance.md, from the JSON files."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt2.benchmark.measure import OURS
from gpt2.benchmark.suite.parts import Part
from gpt2.benchmark.tables import format_ratio
from gpt2.errors import MALFORMED, UserError
from gpt2.utils.files import write_text
from gpt2.utils.text import format_count

BEGIN, END = "<!-- suite: begin -->", "<!-- suite: end -->"
_COLUMNS = ("what", "step (range)", "tokens/s", "MFU", "memory", "compiled in", "")


def read_result(output: Path, name: str) -> dict[str, Any] | None:
    """Returns what the JSON file of a part holds, None if there is none.

    Raises:
        UserError: the file is damaged.
    """
    path = output / f"{name}.json"
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text())
        named = {name: result[name] for name in ("part", "size", "device", "status")}
        return result | named | {"cases": list(result["cases"])}
    except MALFORMED as error:
        raise UserError(
            f"{path} holds no result of a part ({error})", "Delete it, and run the part again"
        ) from error


def read_results(output: Path) -> list[dict[str, Any]]:
    """Returns the results of all parts in a folder, by name of their files.

    Raises:
        UserError: as for `read_result`.
    """
    found = (read_result(output, path.stem) for path in sorted(output.glob("*.json")))
    return [result for result in found if result]


def check_size(output: Path, size: str) -> None:
    """Raises a UserError if the folder holds results of another size."""
    for other in read_results(output):
        if other["size"] != size:
            raise UserError(
                f"{output / other['part']}.json has results of --size={other['size']}, not {size}",
                "Give another --output",
            )


def check_device(output: Path, device: str) -> None:
    """Raises a UserError if the folder holds results of another device."""
    for other in read_results(output):
        if other["device"] != device:
            raise UserError(
                f"{output / other['part']}.json has results of {other['device']}, not {device}",
                "Give another --output, or delete the file",
            )


def rewrite(path: Path, output: Path, parts: Sequence[Part]) -> None:
    """Puts the tables of a folder of `--size=full` between the two markers of a file.

    Raises:
        UserError: the file does not exist, or lacks a marker; or the folder holds no results, or
            those of another size.
    """
    if not (output / "versions.json").is_file():
        raise UserError(f"--output={output} has no versions.json", "Name the folder of the results")
    check_size(output, "full")
    if not path.is_file():
        raise UserError(f"--report={path} is not a file", "Name a Markdown file with two markers")
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(
            f"--report={path} lacks the markers of the table", f"Add lines of {BEGIN} and {END}"
        )
    write_text(path, f"{before}{BEGIN}\n{block(output, parts)}{END}{after}")


def block(output: Path, parts: Sequence[Part]) -> str:
    """Returns the tables of a folder as Markdown. A part without results has a row that says so.

    Raises:
        UserError: the results are not of one device.
    """
    device = next((result["device"] for result in read_results(output)), None)
    if device:
        check_device(output, device)
    results = {part.name: read_result(output, part.name) for part in parts}
    lines = [_describe_machine(device, read_result(output, "versions")), ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for part in parts:
        if part.name not in ("versions", "attention"):
            lines += map(_line, _rows(part, results))
    lines += [
        "",
        "| attention against the reference | checks passed | error over the reference's |",
    ]
    lines += ["|---|---|---|", *map(_line, _attention_rows(results.get("attention")))]
    return "\n".join(lines) + "\n"


def _describe_machine(device: str | None, result: dict[str, Any] | None) -> str:
    if device is None:
        return "No GPU was measured."
    case = result["cases"][0] if result and result["cases"] else {}
    if "result" not in case:
        return f"{device}; versions: {_problem(case) if case else 'not asked for'}."
    found = case["result"]
    names = ["jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch"]
    names += ["nvidia-cudnn-cu12", "nvidia-cudnn-cu13"]
    versions = [f"{name} {found['versions'][name]}" for name in names if name in found["versions"]]
    parts = [found["device"], f"{found['cpu_cores']} CPU cores", *versions]
    if found["platform"] == "gpu":
        parts.append(f"nvidia-smi: {found['nvidia-smi']}")
    return f"{'; '.join(parts)}. Measured {result['began'][:10] if result else ''}."


def _rows(part: Part, results: dict[str, dict[str, Any] | None]) -> Iterator[list[str]]:
    """Yields the cells of a part's rows."""
    result = results.get(part.name)
    if not (result and result["cases"]):
        yield [part.title, part.unmeasured]
        return
    for case in result["cases"]:
        title = f"{part.title}: {case['name']}"
        if case["status"] != "done":
            yield [title, _problem(case)]
            continue
        contestants = case["result"].get("results")
        if not contestants:
            yield [title, "done, without times"]
            continue
        for name, found in contestants.items():
            note = ""
            if len(contestants) > 1 and name != OURS:
                note = f"{OURS} is faster by {format_ratio(found['speedup'])}"
            if part.name == "loop":
                note = _beside_the_benchmark(case["name"], found, results.get("124m"))
            which = f", {name}" if len(contestants) > 1 else ""
            yield [title + which, *_figures(found), note or _about(found)]


def _figures(found: dict[str, Any]) -> list[str]:
    """Returns the cells of a contestant's step, tokens per second, MFU, memory and compilation."""

    def cell(name: str, text: str, scale: float = 1.0) -> str:
        value = found.get(name)
        return text.format(value * scale) if value is not None else ""

    least, most = min(found["turns"]) * 1e3, max(found["turns"]) * 1e3
    rate = found.get("tokens_per_second")
    return [
        cell("step_seconds", "{:,.2f} ms", 1e3) + f" ({least:,.2f} to {most:,.2f})",
        format_count(rate) if rate else "",
        cell("mfu", "{:.1f} %", 100),
        cell("peak_bytes", "{:.2f} GB", 1e-9),
        cell("compile_seconds", "{:.1f} s"),
    ]


def _about(found: dict[str, Any]) -> str:
    """Returns the time by part of the model where that was asked for, else the attention in use."""
    shares = [f"{name} {share:.0%}" for name, share in (found.get("shares") or {}).items()]
    return ", ".join(shares) or (f"attention {found['attention']}" if "attention" in found else "")


def _beside_the_benchmark(name: str, found: dict[str, Any], measured: dict[str, Any] | None) -> str:
    """Compares a step of train.py with the benchmark's step of the same name."""
    wait = found.get("data_wait_seconds")
    notes = [f"{1e3 * wait:.2f} ms of it waiting for data"] if wait is not None else []
    for case in (measured or {"cases": []})["cases"]:
        if case["name"] == name and case["status"] == "done":
            ratio = found["step_seconds"] / case["result"]["results"][OURS]["step_seconds"]
            notes.insert(0, f"{ratio:.3f} of the benchmark's step")
    return ", ".join(notes)


def _attention_rows(result: dict[str, Any] | None) -> Iterator[list[str]]:
    if not (result and result["cases"]):
        yield ["cudnn", "not measured", ""]
        return
    for case in result["cases"]:
        checks = case.get("result", {}).get("checks")
        if checks is None:
            yield [case["name"], _problem(case), ""]
            continue
        passed = sum(check["passed"] for check in checks)
        pairs = [pair for check in checks for pair in check.get("errors", {}).values()]
        ratios = [found / reference for found, reference in pairs if reference]
        worst = f"{max(ratios):.2f} at most" if ratios else ""
        planned = case["result"]["planned"]
        cut = f", then {_problem(case)}" if len(checks) < planned else ""
        yield [case["name"], f"{passed} of {planned}{cut}", worst]


def _problem(case: dict[str, Any]) -> str:
    """Returns what became of a case that has no result, in the words of a table."""
    status, reason = case["status"], case.get("reason", "")
    return status if status == "does not fit" or not reason else f"{status}: {reason}"


def _line(cells: Sequence[str]) -> str:
    padded = [*cells, *[""] * (len(_COLUMNS) - len(cells))] if len(cells) == 2 else cells
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in padded) + " |"
