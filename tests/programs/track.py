"""Judge records of the track, and print their rows of the table in docs/track.md.

    python -m tests.programs.track docs/track/plain.csv

The mean of a record, over all seeds from 0 on, is below the target according to Student's one-sided
t-test of one mean (1908, Biometrika 6). docs/track.md has the rules.
"""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from configs.track import MAX_PARAMETERS, TARGET

LEVEL = 0.001
MIN_SEEDS = 5
# The number of tokens to predict in the validation split, and its number of bytes.
TARGETS = 286_739
BYTES = 1_217_047
LEAST = 0.5  # bits per byte; no model of English is better
COLUMNS = (
    *("arm", "purpose", "seed", "state", "code", "parameters", "tokens", "flops"),
    *("eval/loss", "eval/bits_per_byte"),
)
COUNTS = {"k": 1e3, "M": 1e6, "B": 1e9}  # as a run prints them


def judge(path: Path) -> str:
    """Return the table row of a record, given its results.csv. Raise ValueError if a rule fails."""
    runs = pd.read_csv(path, dtype={"parameters": str})

    def demand(holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(
                f"{path} is not a record, because it breaks this rule: {rule}"
            )

    for name in COLUMNS:
        demand(name in runs, f"it has the column {name}")
    scores = runs["eval/bits_per_byte"]
    demand(
        list(runs.seed) == list(range(len(runs))), "seeds are 0, 1, 2, ... without gaps"
    )
    demand(len(runs) >= MIN_SEEDS, f"there are {MIN_SEEDS} seeds or more")
    demand(set(runs.state) == {"finished"}, "all runs have finished")
    for same in ("arm", "purpose", "code", "tokens", "flops", "parameters"):
        demand(runs[same].nunique() == 1, f"all runs have the same {same}")
    first = runs.iloc[0]
    demand(first.purpose == "compare", "no run chose an option")
    demand(first.tokens > 0, "it has read tokens")
    demand(first.flops > first.tokens, "a token costs FLOPs")
    demand(scores.nunique() == len(runs), "seeds have different scores")
    demand(scores.min() > LEAST, f"scores are above {LEAST} bits per byte")
    count = re.fullmatch(r"(\d+)(?:\.(\d+))?([kMB])", first.parameters)
    demand(
        count is not None,
        "its number of parameters has the form in which a run prints it",
    )
    number, decimals, unit = count.groups(default="")
    # The largest number that is printed in this way.
    largest = float(f"{number}.{decimals}5") * COUNTS[unit]
    demand(largest <= MAX_PARAMETERS, f"it has at most {MAX_PARAMETERS:,} parameters")
    whole = runs["eval/loss"] * TARGETS / BYTES / math.log(2)
    demand(
        np.allclose(scores, whole, rtol=1e-9, atol=0),
        "it is scored on the whole validation split, with the fixed vocabulary",
    )
    p_value = stats.ttest_1samp(scores, TARGET, alternative="less").pvalue
    demand(p_value < LEVEL, f"its mean is below {TARGET} with p < {LEVEL}")
    cells = [
        f"[{path.stem}](track/{path.name})",
        f"{first.tokens:,}",
        f"{first.flops / 1e12:.2f}",
        first.parameters,
        f"{scores.mean():.4f} ± {scores.std():.4f}",
        f"{len(runs)}",
        f"{p_value:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(judge(Path(name)))
