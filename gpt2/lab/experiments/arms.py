"""Arms: the variants that a comparison trains. The flags `--vary` and `--idea` describe them."""

import contextlib
import csv
import dataclasses
import itertools
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import scipy  # its submodules are imported when they are used

from gpt2.config import (
    Config,
    flatten,
    get_option,
    read_option,
    with_options,
)
from gpt2.config.options import OPTIONS, require_option
from gpt2.errors import UserError
from gpt2.lab.experiments.checkouts import WORKING_TREE, find_commit, source_folder
from gpt2.lab.experiments.run_folder import (
    Run,
    Setting,
    Settings,
    describe,
    options_from,
)
from gpt2.utils.code import SOURCE

# Names that a `--vary` may set in addition to options.
_RECIPE = "recipe"
_CODE = "code"
# A program that prints the options of the recipe `path`.
_READ = "from gpt2.config import read_options; print(json.dumps(read_options(path)))"
# Groups of options whose tuned values may differ between arms. The comparison remains fair.
_TUNABLE = ("optim.", "loss.")
_LONGEST_NAME = 150  # in bytes; file systems allow 255 bytes for a folder's name


@dataclasses.dataclass(frozen=True)
class Arm:
    """A variant that a comparison trains: a config, and a version of the code."""

    # The difference from the baseline, such as `optim.name=muon`. The arm's folder has this name.
    name: str
    config: Config  # its seed is the seed of the arm's first run
    commit: str = ""  # the commit of the arm's code; "" is the working tree
    # Options that only the code of `commit` has.
    extra: Settings = dataclasses.field(default_factory=dict)

    @property
    def options(self) -> dict[str, Setting]:
        """All options by name, including options that only the code of `commit` has."""
        return {**flatten(self.config.to_dict()), **self.extra}

    def source(self, root: Path) -> Path:
        """Return the folder of the arm's code. `root` is the folder of the sweep or ledger."""
        return source_folder(root, self.commit)

    def make_run(
        self,
        root: Path,
        number: int,
        tuned: Settings | None = None,
        *,
        chooses: bool = False,
    ) -> Run:
        """Return the arm's run with its `number`-th seed, counted from 0.

        `root` is the folder of the sweep or ledger. With `chooses`, the run is a tuning run, which
        tries the options `tuned`. Otherwise, `tuned` are the options that tuning has chosen.
        """
        tuned = tuned or {}
        folder = root / "runs" / self.name
        if chooses:
            folder = root / "tune" / self.name / _folder_name(describe(tuned))
        seed = self.config.seed + number
        return Run(
            arm=self.name,
            config=with_options(self.config, {**tuned, "seed": seed}),
            folder=folder / f"seed-{seed}",
            tuned=tuned,
            chooses=chooses,
            source=self.source(root),
            extra=self.extra,
        )

    def to_tree(self) -> dict[str, object]:
        """Return the arguments of `from_options`, as values that JSON can represent."""
        return {"name": self.name, "options": self.options, "commit": self.commit}

    @classmethod
    def from_options(cls, name: str, options: Settings, commit: str) -> "Arm":
        """Return the arm with these options.

        `options` may contain options that only the code of `commit` has.
        """
        known = dict(options)
        extra = {key: known.pop(key) for key in options.keys() - OPTIONS.keys()}
        return cls(name, Config.from_dict(known), commit, extra)


Differences = dict[str, tuple[object, object]]  # option -> the old and the new value


def differences(old: Arm, new: Arm) -> Differences:
    """Return the options of `new` whose values differ in `old`, each with the old and new value.

    The version of the code counts as an option with the name `code`. If `old` does not have an
    option, the old value is `none`.
    """
    before = old.options | {_CODE: old.commit or WORKING_TREE}
    after = new.options | {_CODE: new.commit or WORKING_TREE}
    changed = Differences()
    for name, value in after.items():
        previous = before.get(name, "none")
        if value != previous:
            changed[name] = (previous, value)
    return changed


def refuse_differences(
    what: str, changed: Mapping[str, tuple[object, object]], remedy: str
) -> None:
    """Raise a UserError if an option in `changed` has two different values.

    `changed` maps options to pairs of the old and the new value. The message begins with `what` and
    lists the options that differ. `remedy` states what the user can do.
    """
    texts = []
    for name, (old, new) in changed.items():
        if old != new:
            texts.append(f"{name}={old}, not {new}")
    if texts:
        raise UserError(f"{what} with {'; '.join(texts)}", remedy)


def make_arms(
    config: Config,
    vary: Sequence[str],
    *,
    one_at_a_time: bool,
    fixed: Collection[str] = (),
) -> list[Arm]:
    """Return the arms of a comparison. The first one is the baseline, whose config is `config`.

    Each element of `vary` is `OPTION=VALUE,...`, `recipe=FILE,...` or `code=BRANCH,...`. The branch
    `.` is the working tree. A value may set further options, as in
    `optim.name=muon+optim.weight_decay=0.0`. After `code=BRANCH`, these may be options that only
    the branch has. A value that contains a comma has to be quoted. There is an arm for each
    combination of the elements' values or, with `one_at_a_time`, for each single value. A recipe
    replaces all options of `config` except those in `fixed`.
    """
    axes = [_read_axis(text) for text in vary]
    points: Iterable[Sequence[Settings]] = itertools.product(*axes)
    if one_at_a_time:
        points = itertools.product(itertools.chain(*axes))
    arms = {"baseline": Arm("baseline", config)}
    for point in points:
        usual: dict[str, Setting] = {_CODE: WORKING_TREE}
        # A recipe replaces all options of the config. If an arm has a recipe and another option,
        # the label therefore names this option even if the config has the same value.
        if not any(_RECIPE in value for value in point):
            usual |= flatten(config.to_dict())
        labels = []
        for value in point:
            if not value.items() <= usual.items():
                labels.append(_label(value))
        if not labels:
            continue  # this point is the baseline
        name = _folder_name(",".join(labels))
        arm = _make_arm(config, point, name, fixed)
        if arms.setdefault(name, arm) != arm:
            raise UserError(
                f"Two arms have the name {name}", "Rename one of the recipes"
            )
    return list(arms.values())


def draw_trials(tune: Sequence[str], number: int) -> str:
    """Return a value for the flag `--tune`: `number` quasi-random points in the ranges in `tune`.

    A range is `OPTION=LOW..HIGH`. A point has a value for the option of each range: an integer if
    the option is an integer, and otherwise three significant digits. If LOW is above 0, the values
    are spread over a logarithmic scale.
    """
    ranges = []
    for text in tune:
        name, _, ends = text.partition("=")
        require_option(name)
        try:
            low, high = map(float, ends.split(".."))
        except ValueError:
            raise UserError(
                f"--tune={text} is not a range of numbers, which --trials needs",
                "Use for example --tune=optim.learning_rate=1e-3..1e-2",
            ) from None
        ranges.append((name, low, high))
    if not ranges:
        raise UserError(
            f"--trials={number} has no effect without --tune",
            "Add for example --tune=optim.learning_rate=1e-3..1e-2",
        )
    trials = dict[str, None]()  # without duplicates
    halton = scipy.stats.qmc.Halton(len(ranges), scramble=False)
    for point in halton.random(number + 1)[1:]:  # the first point has all lower ends
        settings = []
        for fraction, (name, low, high) in zip(point, ranges, strict=True):
            value = low + fraction * (high - low)
            if low > 0:
                value = low * (high / low) ** fraction
            digits = ".0f" if OPTIONS[name].kind is int else ".3g"
            settings.append(f"{name}={value:{digits}}")
        trials["+".join(settings)] = None
    first = f"{ranges[0][0]}="
    return first + ",".join(trial.removeprefix(first) for trial in trials)


def read_tuned(tune: Sequence[str], vary: Sequence[str]) -> list[list[Settings]]:
    """Return, for each `--tune`, the options that each of its values sets.

    Every arm tries all combinations of the values of different `--tune` flags. `tune` and `vary`
    are the values of the flags --tune and --vary. Raise a UserError if a tuned option is not in
    `optim.` or `loss.`, or if `vary` or another `--tune` also sets it.
    """
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
                    f"--tune={text} sets {name}, which would make the comparison unfair",
                    "Tune only options whose names begin with optim. or loss.",
                )
            if name in taken:
                raise UserError(
                    f"More than one --vary or --tune sets {name}",
                    "Remove one of these flags",
                )
        taken |= names
        axes.append(axis)
    return axes


def _read_axis(text: str) -> list[Settings]:
    """Return the settings of each value in `text`, which has the form `OPTION=VALUE,...`."""
    name, _, rest = text.partition("=")
    values = next(csv.reader([rest]), [])
    if not values or not all(values):
        raise UserError(f"{text} has an option without a value", "Use OPTION=VALUE")
    axis = list[Settings]()
    for value in values:
        settings = _read_value(f"{name}={value}")
        if settings in axis:
            raise UserError(
                f"{text} contains {describe(settings)} more than once",
                "Remove one of the values",
            )
        axis.append(settings)
    return axis


def _read_value(text: str) -> Settings:
    """Return the settings in `OPTION=VALUE` and in each `+OPTION=VALUE` after it."""
    options: dict[str, Setting] = {}
    for pair in re.split(r"\+(?=[a-z_]+\.[a-z_0-9]+=)", text):
        name, value = pair.split("=", 1)
        if name in (_RECIPE, _CODE):
            options[name] = value
        elif name in OPTIONS or options.get(_CODE, WORKING_TREE) == WORKING_TREE:
            options[name] = read_option(name, value)
        else:
            # Only the branch has the option, so its type is not known here. Its value is read as
            # JSON or, if it is not valid JSON, as a string.
            options[name] = value
            with contextlib.suppress(ValueError):
                options[name] = json.loads(value.lower())
    if "seed" in options:
        raise UserError(
            "The option seed cannot be varied",
            "Leave it out. In a sweep or ladder, --seeds=N sets the number of seeds",
        )
    if "train.num_steps" in options:
        raise UserError(
            "The option train.num_steps cannot be varied, because --equal determines it",
            "Start a separate sweep, ladder or ledger for each value of train.num_steps",
        )
    return options


def _folder_name(text: str) -> str:
    """Return `text` or, if it is too long for a folder's name, its start and a checksum."""
    name = text.encode()
    if len(name) <= _LONGEST_NAME:
        return text
    start = name[:_LONGEST_NAME].decode(errors="ignore")  # without half a character
    return f"{start}-{zlib.crc32(name):08x}"


def _label(value: Settings) -> str:
    pairs = dict(value)
    if _RECIPE in value:
        pairs[_RECIPE] = Path(str(value[_RECIPE])).stem
    text = "+".join(f"{name}={setting}" for name, setting in pairs.items())
    return re.sub(r"[^\w.,=+-]+", "_", text)  # the label becomes the name of a folder


def _make_arm(
    config: Config, values: Sequence[Settings], name: str, fixed: Collection[str]
) -> Arm:
    # Set all options together, because some are valid only in combination.
    options: dict[str, Setting] = {}
    for value in values:
        for key in value.keys() & options.keys():
            raise UserError(
                f"More than one --vary flag sets {key}, so their values cannot be combined",
                "Add --one_at_a_time, which does not combine the values of different flags",
            )
        options |= value
    try:
        commit = find_commit(str(options.pop(_CODE, WORKING_TREE)))
        if _RECIPE in options:
            recipe = options_from(_READ, str(options.pop(_RECIPE)), SOURCE)
            kept = {key: get_option(config, key) for key in fixed}
            config = with_options(Config.from_dict(recipe), kept)
        usual = flatten(config.to_dict())
        return Arm.from_options(name, usual | options, commit)
    except UserError as error:
        raise UserError(f"The arm {name} cannot train: {error}") from None
