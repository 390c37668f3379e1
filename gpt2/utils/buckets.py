"""A few fixed lengths for sequences of any length, so that few programs are compiled."""

SHORTEST = 32


def bucket(length: int, limit: int) -> int:
    """Returns the smallest 32 * 2^i that holds `length`, at most `limit`."""
    size = SHORTEST
    while size < length:
        size *= 2
    return min(size, limit)
