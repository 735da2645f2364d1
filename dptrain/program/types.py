"""Promotion of number types, and their names as Keras' users write them."""

import functools
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.runtime.floatx import floatx
from dptrain.runtime.types import FLOATX, DType, is_floating, is_narrow, type_of


def _no_promotion(dtypes: tuple[Any, ...]) -> ConfigError:
    return ConfigError(
        "There is no implicit conversions from float8 dtypes to others. You must cast it internally. Received: "
        f"{dtypes}"
    )


@functools.cache
def promoted(*dtypes: DType) -> DType:
    """Return the common type, as NumPy's `result_type`; for both half types it is float32.

    Integers, but for the smallest, take bfloat16 as it is, as in Keras and JAX.

    Raises:
        ConfigError: a float8 beside another floating-point type.
    """
    floats = [dtype for dtype in dtypes if is_floating(dtype)]
    if len(set(floats)) > 1 and not all(type_of(dtype).mixes for dtype in floats):
        raise _no_promotion(tuple(dtype.name for dtype in dtypes))
    if len({dtype for dtype in floats if is_narrow(dtype)}) == 2:
        floats = [FLOATX, *(dtype for dtype in floats if not is_narrow(dtype))]
    return np.result_type(*(dtypes if all(type_of(dtype).is_numpy for dtype in dtypes) else floats))


@functools.cache
def promoted_as_keras(*dtypes: DType) -> DType:
    """Return the promoted type; integers take a floating-point type as it is."""
    return promoted(*([dtype for dtype in dtypes if is_floating(dtype)] or dtypes))


@functools.cache
def promoted_in_kernels(result: DType, *dtypes: DType) -> DType:
    """Return the type in which mixed types enter an expression: NumPy's, which rounds at the end."""
    common = np.result_type(*dtypes)
    return np.dtype(np.float64) if is_floating(result) and not is_floating(common) else common


# By their names, as Keras' users write them

_PYTHON_TYPES = {bool: "bool", int: "int32", float: "float32", str: "string"}


def standardize_dtype(dtype: Any) -> str:
    """Return a type's name; None is `config.floatx`, Python's int "int32", float "float32"; or ConfigError."""
    if dtype is None:
        return floatx().name
    if isinstance(dtype, type) and dtype in _PYTHON_TYPES:
        return _PYTHON_TYPES[dtype]
    try:
        numpy_dtype = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Invalid dtype: {dtype}") from error
    if numpy_dtype.kind == "O" or numpy_dtype.names is not None:
        raise ConfigError(f"Invalid dtype: {dtype}")
    return "string" if numpy_dtype.kind in "SUT" else numpy_dtype.name


def is_float_dtype(dtype: Any) -> bool:
    """Whether a type, or its name, is floating-point."""
    return standardize_dtype(dtype).startswith(("float", "bfloat"))


def is_int_dtype(dtype: Any) -> bool:
    """Whether a type, or its name, is integer, signed or not."""
    return standardize_dtype(dtype).startswith(("int", "uint"))


def result_type(*dtypes: Any) -> str:
    """Return the name of the common type of several; `config.floatx` for none.

    Args:
        dtypes: types or their names; Python's `bool`, `int` and `float` stand for Python numbers, which take the type
            of tensors beside them, and None for `config.floatx`.

    Raises:
        ConfigError: tensors do not have this type, or it is a float8, which is not promoted.
    """
    names = [standardize_dtype(dtype) for dtype in dtypes]
    if any(name.startswith("float8") for name in names):
        raise _no_promotion(dtypes)
    of_tensors = [name for name, dtype in zip(names, dtypes, strict=True) if dtype not in (int, float)]
    if not of_tensors:
        return floatx().name if float in dtypes or not dtypes else "int32"
    common = promoted_as_keras(*(np.dtype(name) for name in of_tensors))
    if float in dtypes and common.kind in "biu":
        return floatx().name
    return "int32" if int in dtypes and common.kind == "b" else common.name
