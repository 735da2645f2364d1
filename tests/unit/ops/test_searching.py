"""Sums by segment and by place."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.errors import ConfigError, DataError
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.tensor import Variable

X = np.arange(8.0).reshape(4, 2)


def test_sums_of_segments():
    np.testing.assert_array_equal(ops.segment_sum(X, [0, 2, 0, 2]), [[4, 6], [0, 0], [8, 10]])
    np.testing.assert_array_equal(ops.segment_sum(X, [0, 0, 0, 0], num_segments=2), [X.sum(0), [0, 0]])
    w = Variable(X)
    ops.sum(ops.segment_sum(w, [1, 0, 1, 1]) * np.array([[2.0], [3.0]])).backward()
    np.testing.assert_array_equal(w.value.grad, np.array([3, 2, 3, 3])[:, None] * np.ones(2))


def test_values_at_places():
    scattered = ops.scatter([[0, 1], [2, 0], [0, 1]], [1.0, 2.0, 4.0], (3, 2))
    np.testing.assert_array_equal(scattered, [[0, 5], [0, 0], [2, 0]])
    np.testing.assert_array_equal(ops.scatter([[1], [-1]], X[:2], (3, 2)), [[0, 0], X[0], X[1]])


def test_refused():
    for build, message in (
        (lambda: ops.segment_sum(X, [0, 1, 2, 3], 3), "index 3 is out of range"),
        (lambda: ops.scatter([[3]], [1.0], (3,)), "index 3 is out of range"),
        (lambda: ops.searchsorted(X, 1.0), "expected a vector"),
        (lambda: ops.searchsorted(X[0], 1.0, "middle"), "'left' or 'right'"),
        (lambda: ops.select([X > 1], []), "expected one choice for each condition"),
    ):
        with pytest.raises(ConfigError, match=message):
            build()
    with pytest.raises(ConfigError, match="pass num_segments"):
        trace(lambda ids: {"y": ops.segment_sum(X, ids)}, {"ids": ((4,), np.int64)})


def test_rows_of_negative_segments_are_in_none():
    ids = np.array([0, -1, 1, -3, 1])
    np.testing.assert_array_equal(ops.segment_sum(np.arange(5.0), ids).numpy(), [0, 6])
    np.testing.assert_array_equal(ops.segment_sum(np.arange(5.0), ids, 3).numpy(), [0, 6, 0])
    program = trace(lambda i: {"sums": ops.segment_sum(np.arange(5.0), i, 3)}, {"i": ((5,), "int64")})
    np.testing.assert_array_equal(evaluate(program, {"i": ids})[0]["sums"], [0, 6, 0])
    with pytest.raises(ConfigError, match="index 3 is out of range for a length of 3"):
        ops.segment_sum(np.arange(2.0), np.array([3, -1]), 3)


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_indices_count_from_the_end_once(options):
    class Taken(dp.Model):
        def call(self, x):
            return ops.take(np.arange(10.0), ops.cast(x, "int32")) + ops.take(np.arange(300), ops.cast(x, "int8")) * 0

    model = Taken()
    model.compile(**options)
    np.testing.assert_array_equal(model.predict(np.array([[-1], [-10], [3]]), verbose=0), [[9], [0], [3]])
    for index in (-11, -13, 10):
        with pytest.raises((DataError, ConfigError), match=f"{index}"):
            model.predict(np.array([[index], [3]]), verbose=0)


NAN_LAST = np.array([-np.inf, -1, 0, 0.5, 1, 2, np.inf, np.nan])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("row", [[0.0, 1, 1, 2], [0.0, 1, np.inf, np.nan, np.nan], []], ids=str)
def test_nan_is_after_all_numbers(row, dtype):
    row, values = ops.cast(np.array(row), dtype), ops.cast(NAN_LAST, dtype)
    for side in ("left", "right"):
        expected = np.searchsorted(np.float64(row), NAN_LAST, side)
        np.testing.assert_array_equal(ops.searchsorted(row, values, side), expected)
    np.testing.assert_array_equal(ops.digitize(values, row), expected)


@pytest.mark.parametrize("length", [256, 257, 511, 512, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_long_sequences_are_bisected(length, dtype, compiled):
    rng = np.random.default_rng(0)
    row = np.sort(rng.integers(0, 90, length).astype(dtype))
    needles = np.concatenate([rng.integers(0, 99, 40).astype(dtype), row[:3], row[-3:]])
    if row.dtype.kind == "f":
        row[-3:], row[0] = (np.inf, np.nan, np.nan), -np.inf
        needles[:3] = np.nan, np.inf, -np.inf
    for side in ("left", "right"):
        expected = np.searchsorted(row, needles, side)
        if compiled:
            program = trace(lambda x, side=side: {"y": ops.searchsorted(row, x, side)}, {"x": (needles.shape, dtype)})
            result = evaluate(program, {"x": needles})[0]["y"]
        else:
            result = ops.searchsorted(row, needles, side).numpy()
        assert result.dtype == np.int32
        np.testing.assert_array_equal(result, expected)


def test_a_million_bins_are_bisected_in_a_model():
    bounds = np.arange(1_000_000) / 8
    model = dp.Sequential([dp.layers.Input((3,)), dp.layers.Discretization(bounds.tolist())])
    x = np.array([[-1, 0, 0.2], [7.9, 1e5, 1e9]], np.float32)
    np.testing.assert_array_equal(model.predict(x, verbose=0), np.digitize(x, bounds))
    program = trace(lambda x: {"y": ops.digitize(x, bounds)}, {"x": (x.shape, np.float32)})
    assert max(int(np.prod(tensor.shape)) for tensor in program.tensors) == len(bounds)  # not for each element of x
