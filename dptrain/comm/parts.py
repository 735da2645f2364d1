"""Cutting rows into contiguous parts."""

from itertools import pairwise


def cut(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into `parts` contiguous ranges whose lengths differ by at most one; some may be empty."""
    length = stop - start
    bounds = [start + length * part // parts for part in range(parts + 1)]
    return list(pairwise(bounds))
