"""Tensors of the Open Inference Protocol: names of datatypes, and arrays from JSON and from bytes.

Whatever a request claims, no array is allocated before its data is there.
"""

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.data.texts import object_array
from dptrain.errors import DataError
from dptrain.runtime.text import counted, short
from dptrain.runtime.types import TYPES, is_floating

Array = npt.NDArray[Any]

BYTES = "BYTES"  # the datatype of texts
# By datatype; bytes are little-endian.
_DTYPES = {known.protocol: known.storage for known in TYPES.values() if known.protocol is not None}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What JSON has for a datatype, by the kind of its dtype.
_JSON_TYPES: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "true and false"),
    "i": ({int}, "integers"),
    "u": ({int}, "integers"),
    "f": ({int, float}, "numbers"),
    "O": ({str}, "texts"),
}
_LARGEST_RANK = 32


@dataclass(frozen=True)
class TensorSpec:
    """A model's input or output.

    Attributes:
        name: in requests and answers.
        datatype: in the protocol's words.
        shape: of one sample; None for a length that is open.
    """

    name: str
    datatype: str
    shape: tuple[int | None, ...]

    def metadata(self) -> dict[str, Any]:
        """Return the tensor as the protocol describes it; -1 is any length, that of the rows among them."""
        shape = [-1, *(-1 if length is None else length for length in self.shape)]
        return {"name": self.name, "datatype": self.datatype, "shape": shape}

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether rows have this shape, (rows, ...)."""
        return len(shape) == len(self.shape) + 1 and all(
            length in (None, found) for length, found in zip(self.shape, shape[1:], strict=True)
        )


def datatype_of(dtype: Any) -> str:
    """Return a dtype's name in the protocol; DataError if it has none."""
    dtype = np.dtype(dtype)
    if dtype.kind in "OU":
        return BYTES
    if dtype not in _NAMES:
        raise DataError(f"{dtype} has no name in the Open Inference Protocol")
    return _NAMES[dtype]


def dtype_of(datatype: Any) -> np.dtype[Any]:
    """Return the dtype of a datatype, object for texts; DataError if there is no such datatype."""
    if datatype == BYTES:
        return np.dtype(object)
    if not isinstance(datatype, str) or datatype not in _DTYPES:
        raise DataError(f"datatype {short(datatype)}; expected one of {', '.join([*_DTYPES, BYTES])}")
    return _DTYPES[datatype]


def read_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape of at least one row and no empty axis; DataError if it is none."""
    if not isinstance(shape, list) or not 1 <= len(shape) <= _LARGEST_RANK:
        raise DataError(f"shape {short(shape)}; expected a list of 1 to {_LARGEST_RANK} lengths")
    if not all(type(length) is int and length > 0 for length in shape):
        raise DataError(f"shape {short(shape)}; expected lengths of 1 or more")
    return tuple(shape)


def from_json(data: Any, datatype: str, shape: tuple[int, ...]) -> Array:
    """Return the array of a tensor's `data`, flat or nested like its shape; DataError if it does not fit."""
    values, dtype = _flat(data, shape), dtype_of(datatype)
    types, expected = _JSON_TYPES["f" if is_floating(dtype) else dtype.kind]
    if not {*map(type, values)} <= types:
        wrong = next(value for value in values if type(value) not in types)
        raise DataError(f"data holds {short(wrong)}; {datatype} takes {expected}")
    if dtype.kind == "O":
        return object_array(values).reshape(shape)
    try:
        if dtype.kind in "biu":
            return np.array(values, dtype).reshape(shape)
        wide = np.array(values, np.float64)
    except OverflowError:
        raise DataError(f"data holds a number that is too large for {datatype}") from None
    with np.errstate(over="ignore"):
        array: Array = wide.astype(dtype)
    if not np.isfinite(array).all():
        raise DataError(f"data holds a number that is too large for {datatype}")
    return array.reshape(shape)


def _flat(data: Any, shape: tuple[int, ...]) -> list[Any]:
    if not isinstance(data, list):
        raise DataError(f"data is {short(data)}; expected a list")
    values = data
    if data and isinstance(data[0], list):
        levels: list[Any] = [data]
        for length in shape:
            if not all(isinstance(entry, list) and len(entry) == length for entry in levels):
                raise DataError(f"data is not nested like its shape {list(shape)}")
            levels = list(itertools.chain.from_iterable(levels))
        values = levels
    if len(values) != math.prod(shape):
        count = counted(len(values), "value")
        raise DataError(f"data has {count}, its shape {list(shape)} has {math.prod(shape):,}")
    return values


def from_bytes(content: memoryview, datatype: str, shape: tuple[int, ...]) -> Array:
    """Return the array of a tensor's bytes, little-endian; texts each after its length in 4 bytes; or a DataError."""
    dtype, count = dtype_of(datatype), math.prod(shape)
    if dtype.kind == "O":
        return object_array(_texts(content, count)).reshape(shape)
    if len(content) != count * dtype.itemsize:
        expected = f"{list(shape)} of {datatype} has {count * dtype.itemsize:,}"
        raise DataError(f"binary data has {len(content):,} bytes, {expected}")
    array = np.frombuffer(content, dtype.newbyteorder("<"))
    return array.astype(dtype).reshape(shape)


def _texts(content: memoryview, count: int) -> list[str]:
    texts: list[str] = []
    start = 0
    while start < len(content) and len(texts) < count:
        if start + 4 > len(content):
            break
        (length,) = struct.unpack_from("<I", content, start)
        start += 4 + length
        if start > len(content):
            break
        try:
            texts.append(str(content[start - length : start], "utf-8"))
        except UnicodeDecodeError:
            raise DataError(f"text {len(texts)} is not UTF-8") from None
    if start != len(content) or len(texts) != count:
        raise DataError(f"binary data does not hold {counted(count, 'text')}, each after its length in 4 bytes")
    return texts


def to_bytes(array: Array) -> bytes:
    """Return an array's numbers, little-endian."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def to_json(array: Array, name: str) -> list[Any]:
    """Return an array's values, flat, with the shortest numbers that read back as the same; DataError of NaN."""
    require_finite(array, name)
    if array.dtype.kind in "biu":
        return list(array.ravel().tolist())
    return shortest(array.ravel())


def shortest(numbers: Array) -> list[float]:
    """Return (n,) numbers as Python's, with as few digits as tell them apart in their own type."""
    if numbers.dtype == np.float64:
        return list(numbers.tolist())
    return [float(str(number)) for number in numbers]


class NotFiniteError(DataError):
    """A model's outputs are not finite."""


def require_finite(array: Array, name: str) -> None:
    """Refuse outputs that JSON does not have."""
    if is_floating(array.dtype) and not (finite := np.isfinite(array.reshape(len(array), -1)).all(axis=1)).all():
        row = int((~finite).argmax())
        raise NotFiniteError(
            f"output {name!r}, row {row} (counted from 0): NaN or infinite, which JSON does not have; ask for binary "
            "outputs to see it"
        )
