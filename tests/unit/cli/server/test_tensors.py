"""Tensors of the Open Inference Protocol, to and from JSON and bytes."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from dptrain.cli.server.tensors import (
    NotFiniteError,
    TensorSpec,
    datatype_of,
    dtype_of,
    from_bytes,
    from_json,
    read_shape,
    shortest,
    to_bytes,
    to_json,
)
from dptrain.errors import DataError

ARRAYS = [
    np.array([[True, False]]),
    *(
        np.array([[0, 1, np.iinfo(f"{kind}{bits}").max]], f"{kind}{bits}")
        for kind in ("uint", "int")
        for bits in (8, 16, 32, 64)
    ),
    *(np.array([[0.1, -3, 1e-7]], dtype) for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.dtype.name)
def test_numbers_come_back_from_json_and_from_bytes(array):
    name = datatype_of(array.dtype)
    assert dtype_of(name) == array.dtype
    through_json = from_json(json.loads(json.dumps(to_json(array, "y"))), name, array.shape)
    through_bytes = from_bytes(memoryview(to_bytes(array)), name, array.shape)
    for back in (through_json, through_bytes, from_json(array.tolist(), name, array.shape)):
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


def test_numbers_have_the_fewest_digits_that_tell_them_apart():
    assert shortest(np.float32([0.1, 1 / 3])) == [0.1, 0.33333334]
    assert shortest(np.array([0.1])) == [0.1]


def texts(*values: bytes) -> memoryview:
    return memoryview(b"".join(struct.pack("<I", len(value)) + value for value in values))


def test_texts():
    for array in (
        from_json(["a", "bü"], "BYTES", (2,)),
        from_bytes(texts(b"a", "bü".encode()), "BYTES", (2,)),
    ):
        assert array.tolist() == ["a", "bü"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (texts(b"a"), "2 texts"),
        (texts(b"a", b"b", b"c"), "2 texts"),
        (texts(b"a", b"b")[:-1], "2 texts"),
        (memoryview(b"\xff\xff\xff\xffab"), "2 texts"),
        (memoryview(b"ab"), "2 texts"),
        (texts(b"a", b"\xff"), "text 1 is not UTF-8"),
    ],
)
def test_bytes_that_are_no_texts(content, message):
    with pytest.raises(DataError, match=message):
        from_bytes(content, "BYTES", (2,))


@pytest.mark.parametrize(
    ("data", "datatype", "message"),
    [
        ([1, 2.5], "INT32", "2.5; INT32 takes integers"),
        ([1, True], "INT32", "True"),
        ([1, 300], "UINT8", "too large for UINT8"),
        ([1, -1], "UINT8", "too large for UINT8"),
        ([1, 10**400], "FP64", "too large for FP64"),
        ([1, 70000], "FP16", "too large for FP16"),
        ([1, 1e39], "BF16", "too large for BF16"),
        ([1, 0], "BOOL", "true and false"),
        ([1, "a"], "BYTES", "texts"),
        ([[1], [2]], "FP32", "data holds .1.; FP32 takes numbers"),
        ([[1, [2]]], "FP32", "not nested"),
        ([1], "FP32", "1 value, its shape"),
        (None, "FP32", "expected a list"),
        ({}, "FP32", "expected a list"),
    ],
)
def test_data_that_does_not_fit(data, datatype, message):
    with pytest.raises(DataError, match=message):
        from_json(data, datatype, (2,))


@pytest.mark.parametrize("shape", [None, [], [0], [-1], [1.0], [True], ["1"], [1] * 33, 1])
def test_what_is_no_shape(shape):
    with pytest.raises(DataError, match="shape"):
        read_shape(shape)


def test_open_lengths():
    spec = TensorSpec("x", "FP32", (None, 3))
    assert spec.metadata() == {"name": "x", "datatype": "FP32", "shape": [-1, -1, 3]}
    assert spec.takes((5, 7, 3))
    assert not spec.takes((5, 7, 2))
    assert not spec.takes((5, 3))


def test_json_has_no_nan():
    for value in (np.nan, np.inf):
        with pytest.raises(NotFiniteError, match="output 'y', row 1"):
            to_json(np.array([[1], [value]]), "y")
