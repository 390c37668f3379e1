r"""How long a run takes to its first step line, by stage, with cached programs.

    python -m tests.programs.starts --config=configs/quickstart.py

starts train.py some times with a cache of programs in our own folder, and with one that a person
chose by JAX_COMPILATION_CACHE_DIR. The first start of each fills the cache. Seconds are counted
from before Python starts, and each stage's from the end of the one before.
"""

import os
import subprocess
import sys
import tempfile
import time

import numpy as np

STARTS = 6  # of which the first fills the cache
BEGAN = "GPT2_TEST_BEGAN"
MARK = "stage: "
STAGES = {  # by the function of train.py that ends them
    "find_devices": "options and devices",
    "prepare": "data",
    "make_program": "program",
    "first_state": "state",
}


def tell(stage):
    seconds = time.time() - float(os.environ[BEGAN])
    print(f"{MARK}{stage}={seconds}", flush=True)


def run():
    """Runs train.py in this process, and tells when each stage ends."""
    from gpt2.utils import launch

    launch.prepare_process()
    import train
    from gpt2 import cli
    from gpt2.training import Program

    tell("Python and imports")

    def told(function, stage):
        def call(*args, **options):
            result = function(*args, **options)
            tell(stage)
            return result

        return call

    for name, stage in STAGES.items():
        setattr(train, name, told(getattr(train, name), stage))
    Program.describe = told(Program.describe, "compiled")
    cli.run(train.main, cli.define_run)


def measure(arguments, environment):
    """Returns the seconds at which each stage of one start ended."""
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "-m", "tests.programs.starts", "run", *arguments]
        inherited = dict(os.environ)
        # It would compile all of Python's code at each start.
        inherited.pop("PYTHONDONTWRITEBYTECODE", None)
        began = time.time()
        process = subprocess.Popen(
            [*command, f"--workdir={workdir}/run", "--config.train.log_every=1"],
            env=inherited | environment | {BEGAN: str(began)},
            stdout=subprocess.PIPE,
            text=True,
        )
        ends = {}
        for line in process.stdout:
            if line.startswith(MARK):
                stage, _, seconds = line.removeprefix(MARK).partition("=")
                ends[stage] = float(seconds)
            elif line.startswith("step ") and " loss " in line:
                ends["first step"] = time.time() - began
                break
        process.kill()
        process.wait()
    assert "first step" in ends, "the run ended before its first step"
    return ends


def main(arguments):
    with tempfile.TemporaryDirectory() as home:
        for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
            environment = {name: f"{home}/{name}"}
            print(f"{name}, seconds (median of {STARTS - 1}; the first start)")
            found = [measure(arguments, environment) for _ in range(STARTS)]
            lasted = [np.diff([0, *ends.values()]) for ends in found]
            lasted = np.column_stack([np.array(lasted), [sum(x) for x in lasted]])
            middle = np.median(lasted[1:], axis=0)
            for row, stage in enumerate([*found[0], "in all"]):
                print(f"  {stage:<20} {middle[row]:6.2f} {lasted[0][row]:6.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        del sys.argv[1]
        run()
    else:
        main(sys.argv[1:])
