"""Arms: the configs that a sweep compares, from what `--vary` says."""

import contextlib
import csv
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpt2 import cli
from gpt2.config import (
    Config,
    flatten,
    option,
    read_option,
    read_options,
    with_options,
)
from gpt2.config.options import OPTIONS
from gpt2.errors import UserError
from gpt2.lab.ablate.runs import Setting, Settings
from gpt2.utils.code import SOURCE, git
from gpt2.utils.files import locked

# What one value of a `--vary` sets beside options: a recipe's file, or code.
_RECIPE = "recipe"
_CODE = "code"
_HERE = "."
_TUNABLE = ("optim.", "loss.")  # groups that leave the terms of a comparison equal


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the things that are compared."""

    # What makes it differ, such as `optim.name=muon`, or `baseline`; also the name of its folder.
    name: str
    config: Config  # all of its options; the seed is the sweep's first
    commit: str = ""  # of the code that trains it; the working tree's where that is ""
    # Options that only that code has.
    extra: Settings = dataclasses.field(default_factory=dict)

    def source(self, root: Path) -> Path:
        """Returns where the code of the arm lies, in a sweep of the directory `root`."""
        return root / "code" / self.commit if self.commit else SOURCE

    def to_tree(self) -> dict[str, object]:
        """Returns it as JSON has it, and as `from_options` takes it."""
        return {"name": self.name, "options": self.options, "commit": self.commit}

    @classmethod
    def from_options(cls, name: str, options: Settings, commit: str) -> "Arm":
        """Returns the arm of all these options, of which our code need not have each."""
        known = dict(options)
        extra = {each: known.pop(each) for each in options.keys() - OPTIONS.keys()}
        return cls(name, Config.from_dict(known), commit, extra)

    @property
    def options(self) -> dict[str, Setting]:
        """All of its options, those that only its code has too."""
        return {**flatten(self.config.to_dict()), **self.extra}


def differences(old: Arm, new: Arm) -> dict[str, tuple[object, object]]:
    """Returns the options of an arm that another has not, or otherwise, and the values of both."""
    before = old.options | {_CODE: old.commit or _HERE}
    after = new.options | {_CODE: new.commit or _HERE}
    found = dict[str, tuple[object, object]]()
    for name, value in after.items():
        known = before.get(name, "none")
        if value != known:
            found[name] = (known, value)
    return found


def refuse_differences(
    what: str, found: Mapping[str, tuple[object, object]], how: str
) -> None:
    """Raises a UserError that names all values which are not the old ones."""
    told = [
        f"{name}={old}, not {new}" for name, (old, new) in found.items() if old != new
    ]
    if told:
        raise UserError(f"{what} with {'; '.join(told)}", how)


def make_arms(config: Config, vary: Sequence[str], *, one_at_a_time: bool) -> list[Arm]:
    """Returns the arms, the baseline first, which is `config` itself, named or not.

    Each `vary` is `OPTION=VALUE,...`, `recipe=FILE,...` or `code=BRANCH,...`, where `.` is the
    working tree. A value may set more options, as in `optim.name=muon+optim.weight_decay=0.0`, and
    that of `code` such as only the branch has. Quotes protect a comma.
    """
    axes = [_read_axis(text) for text in vary]
    chosen: Iterable[Sequence[Settings]] = itertools.product(*axes)
    if one_at_a_time:
        chosen = itertools.product(itertools.chain(*axes))
    arms = {"baseline": Arm("baseline", config)}
    for grid_point in chosen:
        here: dict[str, Setting] = {_CODE: _HERE}
        in_recipe = any(_RECIPE in value for value in grid_point)
        if not in_recipe:
            here |= flatten(config.to_dict())
        labels = []
        for value in grid_point:
            if not value.items() <= here.items():
                labels.append(_label(value))
        if not labels:
            continue  # the baseline, by its own name
        name = ",".join(labels)
        arm = _apply(config, grid_point, name)
        if arms.setdefault(name, arm) != arm:
            raise UserError(f"two arms are called {name}")
    return list(arms.values())


def read_tuned(tune: Sequence[str], vary: Sequence[str]) -> list[list[Settings]]:
    """Returns the values of each `--tune`, which all arms try."""
    taken = set[str]()
    for text in vary:
        taken.update(*_read_axis(text))
    axes = []
    for text in tune:
        axis = _read_axis(text)
        names = set[str]().union(*axis)
        for name in names:
            if not name.startswith(_TUNABLE):
                raise UserError(
                    f"--tune={text} would change the terms of the comparison",
                    "Tune options of optim. or loss.",
                )
            if name in taken:
                raise UserError(f"{name} is both varied and tuned, or tuned twice")
        taken |= names
        axes.append(axis)
    return axes


def _read_axis(text: str) -> list[Settings]:
    """Reads `OPTION=VALUE,...`."""
    name, _, rest = text.partition("=")
    values = next(csv.reader([rest]), [])
    if not values or not all(values):
        raise UserError(f"{text} names no value", "Write OPTION=VALUE")
    return [_read_value(f"{name}={value}") for value in values]


def _read_value(text: str) -> Settings:
    """Reads `OPTION=VALUE`, and `+OPTION=VALUE` behind it."""
    options: dict[str, Setting] = {}
    for pair in re.split(r"\+(?=[a-z_]+\.[a-z_0-9]+=)", text):
        name, value = pair.split("=", 1)
        if name in (_RECIPE, _CODE):
            options[name] = value
        elif name in OPTIONS or options.get(_CODE, _HERE) == _HERE:
            options[name] = read_option(name, value)
        else:
            options[name] = value
            with contextlib.suppress(ValueError):  # a number or a truth value
                options[name] = json.loads(value.lower())
    if "seed" in options:
        raise UserError("seed cannot be varied", "Use --seeds=N")
    if "train.num_steps" in options:
        raise UserError("train.num_steps follows from --equal")
    return options


def _label(value: Settings) -> str:
    pairs = dict(value)
    if _RECIPE in value:
        pairs[_RECIPE] = Path(str(value[_RECIPE])).stem
    text = "+".join(f"{name}={each}" for name, each in pairs.items())
    return re.sub(r"[^\w.,=+-]+", "_", text)  # it becomes a folder's name


def _apply(config: Config, values: Sequence[Settings], name: str) -> Arm:
    # Set together, since some options only work beside each other.
    options: dict[str, Setting] = {}
    for value in values:
        for each in value.keys() & options.keys():
            raise UserError(f"several --vary set {each}", "Use --one_at_a_time")
        options |= value
    try:
        commit = find_commit(str(options.pop(_CODE, _HERE)))
        if _RECIPE in options:
            recipe = read_options(str(options.pop(_RECIPE)))
            # What the command line sets holds for all arms.
            overrides = {each: option(config, each) for each in cli.overrides()}
            config = with_options(Config.from_dict(recipe), overrides)
        usual = flatten(config.to_dict())
        return Arm.from_options(name, usual | options, commit)
    except UserError as error:
        raise UserError(f"the arm {name} cannot work", str(error)) from None


def find_commit(name: str) -> str:
    """Returns the commit of a branch, tag or commit; "" for the working tree."""
    if name == _HERE:
        return ""
    commit = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not commit:
        raise UserError(f"{name} is no branch, tag or commit of {SOURCE}")
    return commit


def diff(old: Arm, new: Arm, form: str = "--patch") -> str:
    """Returns what the code of an arm has unlike that of another."""
    return _git("diff", form, old.commit, new.commit, "--", "*.py")


def is_on_top(arm: Arm, best: Arm) -> bool:
    """Returns whether the code of an arm has that of another: merging it changes nothing.

    No history has a snapshot of a working tree, and what was kept may have been undone.
    """
    merged = _git("merge-tree", "--write-tree", arm.commit, best.commit)
    return merged == _git("rev-parse", f"{arm.commit}^{{tree}}")


def snapshot() -> str:
    """Returns a commit of the working tree as it is; "" without a checkout."""
    if not _git("ls-files", "train.py"):
        return ""
    return _git("stash", "create") or _git("rev-parse", "HEAD")


def check_out(arm: Arm, root: Path) -> Path:
    """Returns where the code of an arm lies, in a git worktree that is made if there is none."""
    source = arm.source(root)
    if not arm.commit:
        return source
    # Several processes may do so at once.
    with locked(source.parent.with_suffix(".lock")):
        if not source.exists():
            place = str(source.absolute())
            _git("worktree", "add", "-f", "--detach", place, source.name)
        if git(source, "status", "--porcelain", seconds=600) != "":
            raise UserError(
                f"{source} is no clean worktree", "Remove it, and repeat the command"
            )
    return source


def _git(*arguments: str) -> str:
    """Returns what git prints of our source; nothing if it fails."""
    return git(SOURCE, *arguments, seconds=600) or ""
