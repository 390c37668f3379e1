"""What is decided about arms and ideas. Terminal, reports and files show the enums' values."""

from enum import StrEnum, auto


class Decision(StrEnum):
    """What a sweep or a ladder decides about an arm.

    An arm that cannot be judged, for example because a run diverged, has a sentence with the reason
    instead of a decision.
    """

    OPEN = "to be decided"  # runs have not ended, or another analysis follows
    UNDECIDED = auto()
    BETTER = auto()  # in a sweep
    WORSE = auto()
    GROWS = auto()  # in a ladder: how the compute multiplier changes with size
    FADES = auto()
    FLIPS = auto()
    CONSTANT = auto()


class Answer(StrEnum):
    """What a ledger decides about an idea, which is a change of the best version so far."""

    OPEN = ""
    KEEP = auto()
    DISCARD = auto()
    UNDECIDED = auto()
    FAILED = auto()
