"""Known numbers, and what is said of tensors."""

import ml_dtypes
import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.tensor import Variable

X = np.array([-1.5, 0.0, 300.0])


def test_tensors_of_values():
    assert ops.array([1, 2], "float32").dtype.name == "float32"
    np.testing.assert_array_equal(ops.copy(X), X)
    np.testing.assert_array_equal(ops.empty((2, 1)), np.zeros((2, 1)))
    assert ops.empty_like(X, "int32").dtype.name == "int32"
    for function in (ops.real, ops.conj, ops.conjugate):
        np.testing.assert_array_equal(function(X), X)
    np.testing.assert_array_equal(ops.isreal(X), [True] * 3)


def test_what_is_said_of_tensors():
    assert [ops.is_tensor(value) for value in (ops.array(X), X, 1.0)] == [True, False, False]
    assert [ops.dtype(value) for value in (X, Variable(X, dtype="float32"), ops.array([1]))] == [
        *("float64", "float32", "int32")
    ]


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (X, "uint8", [0, 0, 255]),
        (X, "int8", [-1, 0, 127]),
        (X, "float32", X),
        (np.float32([3e9, -3e9, 1e30]), "int32", [2147483520, -2147483648, 2147483520]),
        (np.array([3e9]), "int32", [2147483647]),
        (np.array([300, -300, 7]), "int8", [127, -128, 7]),
        (np.array([200], "uint8"), "int32", [200]),
        (np.array([True]), "uint8", [1]),
        (np.float32([1e5, -1e5, np.inf, 2.5]), "float16", [65504, -65504, 65504, 2.5]),
        (np.array([1e39, -np.inf]), "float32", [np.finfo(np.float32).max, np.finfo(np.float32).min]),
        (np.array([70_000, -3]), "float16", [65504, -3]),
        (np.array([1e39]), "bfloat16", [ml_dtypes.finfo("bfloat16").max]),
    ],
)
def test_casts_that_keep_within_bounds(value, dtype, expected):
    actual = ops.saturate_cast(value, dtype)
    assert actual.dtype.name == dtype
    np.testing.assert_array_equal(actual, expected)


def test_known_numbers_are_numpys():
    for name, arguments in (
        *((name, (n,)) for name in ("bartlett", "blackman", "hamming", "hanning") for n in (0, 1, 6)),
        ("kaiser", (6, 3.0)),
        ("logspace", (0, 2, 5)),
        ("logspace", (0, 2, 5, False, 2)),
        ("geomspace", (1, 100, 4)),
    ):
        output = getattr(ops, name)(*arguments)
        assert output.dtype.name == "float32"
        np.testing.assert_allclose(output, getattr(np, name)(*arguments), rtol=1e-6, atol=1e-7)
    with pytest.raises(ConfigError, match=r"hamming: x=2\.5; expected an integer"):
        ops.hamming(2.5)


def test_pythons_integers_are_int32_where_they_fit():
    mask = ops.array([True, False])
    for tensor in (
        *(ops.convert_to_tensor(value) for value in (1, [1, 2], ((1,), (2,)), range(3), -(2**31))),
        *(ops.add(mask, 1), ops.where(mask, 1, 0), ops.multiply([1, 2], [3, 4]), ops.sum(mask)),
        *(ops.argmax(X), ops.argmin(X, 0), ops.cumsum(mask)),
    ):
        assert tensor.dtype.name == "int32"
    for tensor in (ops.array([2**31]), ops.array([1, -(2**31) - 1]), ops.array(np.arange(3)), ops.array([np.int64(1)])):
        assert tensor.dtype.name == "int64"
    assert [ops.array(value).dtype.name for value in ([], 1.0, [1, 2.5], True)] == [*["float32"] * 3, "bool"]
    assert ops.add(np.ones(2, np.int8), 1).dtype.name == "int8"


@pytest.mark.parametrize("name", ["arctan2", "hypot", "logaddexp", "logaddexp2", "heaviside"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_stays_beside_integers(name, half):
    function = getattr(ops, name)
    assert function(ops.ones(2, half), ops.ones(2, "int16")).dtype.name == half
    assert function(ops.ones(2, "bool"), ops.ones(2, half)).dtype.name == half
    assert function(ops.ones(2, "int8"), ops.ones(2, "bool")).dtype.name == "float32"


def test_a_number_of_points_may_be_a_tensor():
    np.testing.assert_allclose(ops.hanning(ops.array(5)), np.hanning(5), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.swapaxes(X, 0, 1), ConfigError, "axis 1 is out of bounds for 1 dim"),
        (lambda: ops.softmax(X, 3), ConfigError, "axis 3 is out of bounds for 1 dim"),
        (lambda: ops.slice(X, (0, 0), (1,)), ConfigError, "found 1, 1 and 2"),
        (lambda: ops.slice(X, (0,), (1, 1)), ConfigError, "found 1, 2 and 1"),
        (lambda: ops.slice_update(X, (0, 0), X), ConfigError, "in `updates` and `start_indices`; found 1, 1 and 2"),
        (lambda: ops.slice_update(X, (1,), X), ConfigError, "slice_update: 1 to .* is out of range for axis 0"),
        (lambda: ops.scan(3, 0, [1]), TypeError, "`f` should be a callable"),
    ],
)
def test_arguments_that_fit_nothing(call, error, message):
    with pytest.raises(error, match=message):
        call()
