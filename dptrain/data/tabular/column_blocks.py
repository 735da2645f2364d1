"""Handles columns of numbers in blocks: pandas takes a millisecond a column, NumPy for hundreds of them."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK_BYTES = 1 << 24
_FIRST_DAY, _LAST_DAY = 19_000_101, 21_001_231


def blocks(frame: Any, names: Collection[str]) -> Iterator[tuple[list[str], npt.NDArray[np.float64]]]:
    """Yield names and values, (columns, rows), of numeric columns, NaN where missing; skips absent and double names."""
    selected, there = set(names), [str(column) for column in frame.columns]
    twice = {name for name, count in Counter(there).items() if count > 1}
    places = [
        place
        for place, (name, dtype) in enumerate(zip(there, frame.dtypes, strict=True))
        if name in selected and name not in twice and dtype.kind in "iuf"
    ]
    size = max(1, _BLOCK_BYTES // max(1, 8 * len(frame)))
    for begin in range(0, len(places), size):
        chosen = places[begin : begin + size]
        values = frame.iloc[:, chosen].to_numpy(dtype=np.float64, na_value=np.nan)
        yield [there[place] for place in chosen], np.ascontiguousarray(values.T)


def plain_numbers(frame: Any, names: Collection[str]) -> set[str]:
    """Return number columns, maybe not all, without missing, infinite, constant, ID-like or imprecise values."""
    plain: set[str] = set()
    for block, values in blocks(frame, names):
        with np.errstate(all="ignore"):
            least, largest = values.min(axis=1), values.max(axis=1)
            size = np.maximum(np.abs(least), np.abs(largest))
            is_plain = (size <= np.finfo(np.float32).max) & (least < largest)  # False of NaN
            is_plain &= np.spacing(size.astype(np.float32)) <= 0.01 * values.std(axis=1)
            whole = np.flatnonzero(is_plain & (values == np.floor(values)).all(axis=1))
            steps = np.diff(values[whole], axis=1)
            in_order = (steps >= 0).all(axis=1) | (steps <= 0).all(axis=1)
            unlike = (np.diff(np.sort(values[whole], axis=1, kind="stable"), axis=1) > 0).all(axis=1)
            dates = (least[whole] >= _FIRST_DAY) & (largest[whole] <= _LAST_DAY)
        is_plain[whole[in_order | unlike | dates]] = False
        plain.update(name for name, flag in zip(block, is_plain, strict=True) if flag)
    return plain


def fill_numbers(
    frame: Any, names: Sequence[str], means: Sequence[float | None], out: npt.NDArray[np.float32]
) -> set[str]:
    """Write numeric columns into the first columns of `out`, missing values as `means`; return the columns written."""
    place = {name: number for number, name in enumerate(names)}
    filled: set[str] = set()
    for block, values in blocks(frame, names):
        numbers = np.array([place[name] for name in block], np.int64)
        fill = np.array([np.nan if means[number] is None else means[number] for number in numbers], np.float64)
        values = np.where(np.isnan(values), fill[:, None], values)
        with np.errstate(all="ignore"):
            is_sound: Any = (np.abs(values) <= np.finfo(np.float32).max).all(axis=1)  # False of NaN
            out[:, numbers[is_sound]] = values[is_sound].T
        filled.update(name for name, flag in zip(block, is_sound, strict=True) if flag)
    return filled
