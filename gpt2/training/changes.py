"""What changed options do to a run that continues, where they may change (see workdir.py)."""

from gpt2.config import Config
from gpt2.errors import warn
from gpt2.optim import make_schedule
from gpt2.utils.text import counted


def tell_of_changes(saved: Config, config: Config, start: int) -> None:
    """Warns of options that change what follows `start`.

    Args:
        saved: the options of the run's last start.
        config: those of this one.
        start: the step to continue from.
    """
    _tell_of_schedule(saved, config, start)
    _tell_of_validation(saved, config, start)


def tell_of_masks(before: int | None, now: int, start: int) -> None:
    """Warns that dropout draws other masks where other devices split a batch.

    Args:
        before: over how many a batch was split at the run's last start; None if that is not known.
        now: over how many at this one.
        start: the step to continue from.
    """
    if before not in (None, now):
        warn(
            f"from step {start} on, dropout draws other masks than before: a batch is split over "
            f"{counted(now, 'device')} in place of {before}"
        )


def _tell_of_schedule(saved: Config, config: Config, start: int) -> None:
    """Warns that the learning rate, or AdEMAMix, goes on as another number of steps has it."""
    before, now = saved.train.num_steps, config.train.num_steps
    if before == now:
        return
    if config.optim.name == "ademamix":
        warn(
            f"the run was last started with train.num_steps={before}; from step {start} on, alpha "
            f"and beta3 of ademamix rise over {now} steps"
        )
    old, new = (make_schedule(config.optim, num_steps) for num_steps in (before, now))
    # A finished run that is extended has no step in common: its next rate is not its last one.
    steps = start, max(start, min(before, now) - 1)
    if any(old(min(step, before)) != new(step) for step in steps):
        was, rate = (f"{float(x):.2e}" for x in (old(min(start, before)), new(start)))
        warn(
            f"the run was last started with train.num_steps={before}; from step {start} on, its "
            f"learning rate follows the schedule of {now} steps"
            + (f": {rate} in place of {was}" if rate != was else "")
        )


def _tell_of_validation(saved: Config, config: Config, start: int) -> None:
    """Warns that scores from now on are of other batches than those of the best checkpoint."""

    def rows(config: Config) -> int | None:
        batches = config.train.eval_batches
        return batches and batches * config.data.batch_size // config.train.accumulate_steps

    if rows(saved) != rows(config):
        warn(
            f"from step {start} on, validation takes other batches than before "
            "(train.eval_batches, or train.accumulate_steps with it); the best checkpoint so far "
            "keeps its score"
        )
