"""Deletes each ingredient with its row and its option, and shows that other tests mind nothing.

    python -m tests.programs.deletions [OPTION ...]

takes half a minute for each. What needs the ingredient, such as a family of Hugging Face's models,
goes with it in truth; tests of those are not run.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpt2.model.ingredients import INGREDIENTS
from gpt2.training.losses import LOSS_TERMS

ROOT = Path(__file__).parents[2]
CHECKS = (
    ["-m", "pytest", "-n0", "tests/model/test_switches.py", "-k", "llama or modded"],
    ["-c", "from gpt2.training import Program"],
)
# Values of options that the core has too.
# Options that go with another.
MORE = {
    "rope_scaling": ("rope_factor", "rope_context"),
    "ahead": ("ahead_fade",),
    "num_experts": (
        "experts_per_token",
        "expert_capacity",
        "expert_balance_loss",
        "expert_z_loss",
    ),
}
VALUES = {"alibi": '"alibi", '}


def copy(place):
    """Copies the files that git knows."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    for name in names.splitlines():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)


def delete(place, kind):
    """Deletes a class's file, its row and its option."""
    module = Path(*kind.__module__.split(".")).with_suffix(".py")
    (place / module).unlink()
    line = f"from {kind.__module__} import {kind.__name__}\n"
    for table in (place / module.parent).glob("*.py"):
        text = table.read_text()
        if line in text:
            text = text.replace(line, "")
            table.write_text(re.sub(rf"\b{kind.__name__},? ?\n?", "", text))
    options = place / "configs/default.py"
    text = options.read_text()
    if module.stem in VALUES:
        assert VALUES[module.stem] in text
        text = text.replace(VALUES[module.stem], "")
    else:
        for option in (kind.option, *MORE.get(kind.option, ())):
            # Up to the next field, class or blank line.
            field = rf"    {option}: .*\n(?:     .*\n|    [\])].*\n)*"
            text, times = re.subn(field, "", text, count=1)
            assert times == 1, option
    options.write_text(text)


def main(names):
    wrong = []
    for kind in (*INGREDIENTS, *LOSS_TERMS):
        name = kind.__module__.rpartition(".")[2]
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as place:
            copy(Path(place))
            delete(Path(place), kind)
            done = [
                subprocess.run([sys.executable, *check], cwd=place, capture_output=True)
                for check in CHECKS
            ]
        is_fine = not any(each.returncode for each in done)
        print("fine" if is_fine else "WRONG", name, flush=True)
        if not is_fine:
            wrong.append(name)
            print(done[0].stdout[-1500:].decode(), done[1].stdout[-1500:].decode())
    if wrong:
        raise SystemExit(f"missed: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
