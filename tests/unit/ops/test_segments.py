"""Segments, counts and updates of every type, with the type's ends among the values, against loops over rows."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.execute import evaluate
from dptrain.program.program import trace

INTEGERS = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
DTYPES = [*INTEGERS, "float32", "float64"]
SEGMENTS, ROWS = 5, 24
# Some rows belong to no segment, and one segment has no row.
IDS = np.random.default_rng(1).choice([-1, 0, 1, 2, 4, SEGMENTS], ROWS).astype(np.int32)


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    if "float" in dtype:
        return np.where(rng.random(shape) < 0.2, np.inf, rng.normal(size=shape)).astype(dtype)
    kind = np.iinfo(dtype)
    ends = np.array([kind.min, kind.max, 0, 1, kind.max - 1, kind.min + 1], dtype)
    return np.where(rng.random(shape) < 0.4, rng.choice(ends, shape), rng.integers(0, 5, shape).astype(dtype))


def ends_of(dtype: str) -> tuple[Any, Any]:
    """Return the least and the greatest number of a type."""
    return (-np.inf, np.inf) if "float" in dtype else (np.iinfo(dtype).min, np.iinfo(dtype).max)


def joined(x: np.ndarray, ids: np.ndarray, length: int, join: Callable[..., Any], first: Any) -> np.ndarray:
    result = np.full((length, *x.shape[1:]), first, x.dtype)
    with np.errstate(all="ignore"):
        for row, segment in zip(x, ids, strict=True):
            if 0 <= segment < length:
                result[segment] = join(result[segment], row)
    return result


def by_trace(call: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    program = trace(
        lambda *inputs: {"y": call(*inputs)}, {f"x{n}": (each.shape, each.dtype) for n, each in enumerate(arrays)}
    )
    return np.asarray(evaluate(program, {f"x{n}": each for n, each in enumerate(arrays)})[0]["y"])


def check(call: Callable[..., Any], expected: np.ndarray, *arrays: np.ndarray) -> None:
    for result in (np.asarray(call(*arrays)), by_trace(call, *arrays)):
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=1e-5 if expected.dtype.kind == "f" else 0)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_segments(dtype, shape):
    x, (least, greatest) = values(dtype, shape), ends_of(dtype)
    joins = {"max": (np.maximum, least), "min": (np.minimum, greatest)}
    joins |= {"sum": (np.add, 0), "prod": (np.multiply, 1)}
    if "float" in dtype:
        x = np.where(np.isinf(x), 0.5, x)  # a sum of infinities is NaN, by any order
    for name, (join, first) in joins.items():
        segment = getattr(ops, f"segment_{name}")
        ids = np.minimum(IDS, SEGMENTS - 1) if name == "sum" else IDS  # a sum refuses ids above all segments
        check(lambda x, ids, f=segment: f(x, ids, SEGMENTS), joined(x, ids, SEGMENTS, join, first), x, ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_at_indices(dtype):
    x, updates = values(dtype, (SEGMENTS, 2)), values(dtype, (6, 2))[::-1].copy()
    places = np.array([[3], [0], [3], [-1], [1], [0]], np.int32)
    if "float" in dtype:
        x, updates = (np.where(np.isinf(each), 0.5, each) for each in (x, updates))
    rules = {None: lambda old, new: new, "add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}
    for reduction, join in rules.items():
        expected = x.copy()
        with np.errstate(all="ignore"):
            for (place,), row in zip(places, updates, strict=True):
                expected[place] = join(expected[place], row)
        check(lambda x, i, u, r=reduction: ops.scatter_update(x, i, u, reduction=r), expected, x, places, updates)


@pytest.mark.parametrize("start", list(itertools.product((-9, -2, 0, 1, 3, 7), (-3, 0, 2, 8))))
def test_blocks_that_begin_anywhere_are_moved_into_the_tensor(start):
    x, block = np.arange(20).reshape(5, 4), -1 - np.arange(6).reshape(2, 3)
    top, left = (min(max(at, 0), length - size) for at, length, size in zip(start, x.shape, block.shape, strict=True))
    expected = x.copy()
    expected[top : top + 2, left : left + 3] = block
    places = np.array(start, np.int32)
    assert by_trace(lambda x, at, block: ops.slice_update(x, at, block), x, places, block).tolist() == expected.tolist()
    part = by_trace(lambda x, at: ops.slice(x, at, (2, 3)), x, places)
    assert part.tolist() == x[top : top + 2, left : left + 3].tolist()
