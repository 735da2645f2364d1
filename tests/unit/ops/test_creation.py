"""Known numbers, and what is said of tensors."""

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
    for same in (ops.real, ops.conj, ops.conjugate):
        np.testing.assert_array_equal(same(X), X)
    np.testing.assert_array_equal(ops.isreal(X), [True] * 3)


def test_what_is_said_of_tensors():
    assert [ops.is_tensor(one) for one in (ops.array(X), X, 1.0)] == [True, False, False]
    assert [ops.dtype(one) for one in (X, Variable(X, dtype="float32"), ops.array([1]))] == [
        *("float64", "float32", "int64")
    ]


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        (X, "uint8", [0, 0, 255]),
        (X, "int8", [-1, 0, 127]),
        (X, "float32", X),
        (np.float32([3e9, -3e9, 1e30]), "int32", [2147483520, -2147483648, 2147483520]),
        (np.array([3e9]), "int32", [2147483647]),
        (np.array([300, -300, 7]), "int8", [127, -128, 7]),
        (np.array([200], "uint8"), "int32", [200]),
        (np.array([True]), "uint8", [1]),
    ],
)
def test_casts_that_keep_within_bounds(given, dtype, expected):
    found = ops.saturate_cast(given, dtype)
    assert found.dtype.name == dtype
    np.testing.assert_array_equal(found, expected)


def test_known_numbers_are_numpys():
    for name, given in (
        *((name, (n,)) for name in ("bartlett", "blackman", "hamming", "hanning") for n in (0, 1, 6)),
        ("kaiser", (6, 3.0)),
        ("logspace", (0, 2, 5)),
        ("logspace", (0, 2, 5, False, 2)),
        ("geomspace", (1, 100, 4)),
    ):
        found = getattr(ops, name)(*given)
        assert found.dtype.name == "float32"
        np.testing.assert_allclose(found, getattr(np, name)(*given), rtol=1e-6, atol=1e-7)
    with pytest.raises(ConfigError, match=r"hamming: 2\.5 points"):
        ops.hamming(2.5)
