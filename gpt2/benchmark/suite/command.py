"""Measures all that docs/performance.md says of a machine, in one command and without a network.

    python -m gpt2.benchmark suite --output=DIR

Each case runs in a process of its own, and a part has a time limit, so that a failure costs no
more than its own row. DIR gets a JSON file for each part, summary.md, the output of every command
in logs/, and on a GPU target.txtpb for `train.py --plan_chips`. Data, checkpoints and compiled
programs go into a temporary directory of the part. A part whose JSON is there is not run again.
Delete the file to repeat it. All results of a DIR are of one device.

    python -m gpt2.benchmark suite --output=DIR --report=docs/performance.md

measures nothing. It writes the table of DIR between the two markers of that file.
"""

import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from absl import flags

from gpt2 import cli, launch
from gpt2.benchmark.suite import report
from gpt2.benchmark.suite.parts import SIZES, Case, Part, make_parts
from gpt2.errors import UserError, require_choice, require_writable
from gpt2.utils.files import write_json, write_text
from gpt2.utils.text import format_duration

# Lines that tell why a process ended, and those of them that tell of memory. XLA warns of an
# allocation that it can do without; such a line is neither.
_TOLD = re.compile(r"^\w[\w.]*(Error|Exception|Interrupt)\b|^error: ")
_SHORT = re.compile(r"RESOURCE_EXHAUSTED|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY")
ASK_SECONDS = 40  # CUDA may take ten to start


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the suite."""
    flags.DEFINE_string("output", None, "The folder of the results.", flag_values=values)
    about = "full needs a GPU of 80 GB and takes up to 46 minutes; tiny runs on any CPU."
    flags.DEFINE_enum("size", "full", SIZES, about, flag_values=values)
    flags.DEFINE_list("parts", [], "Those to run; all if empty.", flag_values=values)
    about = "Measure nothing, and write the table of --output into this Markdown file."
    flags.DEFINE_string("report", None, about, flag_values=values)


def main(_: str) -> int:
    """Runs the suite, or writes its report, and returns the exit code: 1 if a part failed."""
    options = flags.FLAGS
    if not options.output:
        raise UserError("there is no --output", "Name the folder of the results")
    output = Path(options.output)
    known = make_parts(options.size, output)
    parts = choose_parts(known, options.parts)
    if options.report is not None:
        for name in ("parts", "size"):
            cli.refuse_ignored(name, "--report writes the table of all parts")
        report.rewrite(Path(options.report), output, make_parts("full", output))
        return 0
    require_writable("output", output)
    report.check_size(output, options.size)
    # What ends this process ends the case that runs, which holds the device.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    device = ask_device(output, options.size)
    report.check_device(output, device)
    results = run_parts(parts, known, output, options.size, device)
    print(f"see {output / 'summary.md'}")
    return int(any(result["status"] == "failed" for result in results))


def choose_parts(parts: Sequence[Part], names: Sequence[str]) -> tuple[Part, ...]:
    """Returns the parts of these names, in their own order; all if there are no names.

    Raises:
        UserError: there is no such part.
    """
    known = tuple(part.name for part in parts)
    for name in names:
        require_choice("--parts", name, known, flag=False)
    return tuple(part for part in parts if not names or part.name in names)


def ask_device(output: Path, size: str) -> str:
    """Returns what a process of its own finds: the number and the kind of this machine's devices.

    Raises:
        UserError: it finds none, or the size is `full` and the machine has nothing but a CPU.
    """
    case = Case("device", ("-m", "gpt2.benchmark.suite.versions"))
    ran = run_case(case, ASK_SECONDS, output / "logs" / case.name)
    if ran["status"] != "done":
        raise UserError(f"JAX finds no device: {ran['reason']}", f"See {output}/logs/device.err")
    found = ran["result"]
    if found["platform"] == "cpu" and size == "full":
        raise UserError(
            f"--size=full needs a GPU, and this machine has {found['device']}",
            "Use --size=tiny with another --output",
        )
    return found["device"]


def run_parts(
    parts: Sequence[Part], known: Sequence[Part], output: Path, size: str, device: str
) -> list[dict[str, Any]]:
    """Runs the parts that have no results yet, and returns the results of all.

    Args:
        parts: in the order in which they run.
        known: all parts, of which the summary tells: others may have run before.
        output: where results go.
        size: of the parts, for their record.
        device: as `ask_device` returns it, for their record.

    Raises:
        UserError: the JSON file of a part is damaged.
    """
    results = []
    for part in parts:
        result = report.read_result(output, part.name)
        if result and result["status"] != "running":
            print(f"{part.name}: not run again, since {output / part.name}.json is there")
        else:
            result = _run_part(part, output, size, device)
        results.append(result)
        write_text(output / "summary.md", _summarise(output, known))
    return results


def _summarise(output: Path, parts: Sequence[Part]) -> str:
    """Returns the tables; a fault of theirs must not end the measurements."""
    try:
        return report.block(output, parts)
    except Exception as error:
        told = (
            f"the table failed ({type(error).__name__}: {error}); the JSON files hold the results"
        )
        print(f"warning: {told}", file=sys.stderr, flush=True)
        return f"{told}\n"


def _run_part(part: Part, output: Path, size: str, device: str) -> dict[str, Any]:
    """Runs the cases of a part; its JSON says after each what there is so far."""
    result: dict[str, Any] = {
        **{"part": part.name, "title": part.title, "size": size, "device": device},
        "status": "running",
        **{"began": datetime.datetime.now().astimezone().isoformat(timespec="seconds")},
        **{"limit_seconds": part.seconds, "seconds": 0.0, "cases": []},
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="suite-", ignore_cleanup_errors=True) as work:
        variables = {"TMPDIR": work}  # also for what a case that is ended cannot remove
        if part.shares_cache:
            variables["JAX_COMPILATION_CACHE_DIR"] = f"{work}/compiled"
        for case in part.cases:
            left = part.seconds - (time.monotonic() - began)
            log = output / "logs" / f"{part.name}-{_file_name(case.name)}"
            ran = run_case(case, left, log, variables)
            told = f"{part.name}: {case.name}: {ran['status']} ({format_duration(ran['seconds'])})"
            print(told, flush=True)
            result["cases"].append(ran)
            result["seconds"] = time.monotonic() - began
            write_json(output / f"{part.name}.json", result)
            if part.until_one_fits and ran["status"] == "done":
                break
    failed = any(ran["status"] in ("failed", "out of time") for ran in result["cases"])
    result["status"] = "failed" if failed else "done"
    write_json(output / f"{part.name}.json", result)
    return result


def run_case(
    case: Case, seconds: float, log: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Runs a command that prints JSON, and returns its record, whatever becomes of it.

    The record's `status` is `done`, `does not fit`, `not installed`, `not on this device`,
    `out of time` or `failed`. `result` is the last object that the command printed, whatever ended
    it. `error` holds the last lines of a command that failed, and `reason` the one that tells most.

    Args:
        case: the command.
        seconds: after which the command and all that it started are ended.
        log: its output goes to `log`.out and `log`.err.
        variables: of its environment, beside those of the case.
    """
    command = [sys.executable, *case.arguments]
    record: dict[str, Any] = {"name": case.name, "seconds": 0.0}
    record["command"] = shlex.join(["python", *case.arguments])
    if case.needs and find_spec(case.needs) is None:
        return record | {"status": "not installed", "reason": f"{case.needs} is not installed"}
    if seconds <= 0:
        return record | {"status": "out of time", "reason": "no time was left"}
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    out, err = (Path(f"{log}.{kind}") for kind in ("out", "err"))
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**launch.environment_to_measure(), **case.environment, **variables},
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    record["seconds"] = time.monotonic() - began
    result = _read_json(out)
    if result is not None:
        record["result"] = result
        if "absent" in result:
            return record | {"status": "not on this device", "reason": result["absent"]}
        if code == 0:
            return record | {"status": "done"}
    error = err.read_text(errors="replace")
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    record["error"] = lines[-12:]
    if code is None:
        return record | {"status": "out of time", "reason": f"no end within {seconds:.0f} s"}
    told = [line for line in lines if _TOLD.search(line)] or lines or [f"exit code {code}"]
    # The process of a contestant tells why; the one that waited for it only that it ended.
    ends = [line for line in told if "Its own message above" not in line] or told
    if _SHORT.search(ends[-1]):
        return record | {"status": "does not fit", "reason": "the device's memory is too small"}
    return record | {"status": "failed", "reason": ends[-1][:300]}


def _end_group(process: subprocess.Popen) -> None:
    """Ends a process and those that it started: one that is left would hold the GPU's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_json(path: Path) -> dict[str, Any] | None:
    """Returns the last whole object that a command printed; libraries may print around it."""
    text = path.read_text(errors="replace")
    for start in reversed([match.start() for match in re.finditer(r"^\{", text, re.MULTILINE)]):
        with contextlib.suppress(ValueError):  # cut off
            return json.JSONDecoder().raw_decode(text, start)[0]
    return None


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name)
