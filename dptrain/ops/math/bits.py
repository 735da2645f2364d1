"""Bit operations, greatest common divisors, and floating-point numbers by their exponents."""

from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.common import boolean, broadcast_shape, common_dtype, elementwise, floating_dtype, unbroadcast
from dptrain.ops.elementwise import cast, floating, floor_divide, logical_not, power
from dptrain.ops.operation_calls import operation
from dptrain.program.lowering import Element, HostCall
from dptrain.program.op import Op, op
from dptrain.program.schema import TypeName
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Array, DType, Tensor, as_tensors
from dptrain.runtime.types import is_floating


def _integer_dtype(name: str) -> Any:
    """Return a type rule for integers and booleans only."""

    def dtype(*dtypes: DType, **attributes: Any) -> Any:
        if any(operand_dtype.kind not in "biu" for operand_dtype in dtypes):
            names = ", ".join(operand_dtype.name for operand_dtype in dtypes)
            raise ConfigError(f"{name}: expected integers, found {names}")
        return common_dtype(*dtypes)

    return dtype


def _integer_op(name: str, function: Any, c: str, expensive: bool = False) -> Op:
    def compute(x1: Array, x2: Array, *, out: Array) -> None:
        function(x1, x2, out=out, casting="unsafe")

    compute.__name__, compute.__doc__ = name, f"numpy.{function.__name__}."
    record = {"dtype": _integer_dtype(name), "lowering": Element(c), "expensive": expensive}
    return op(shape=broadcast_shape, letters=elementwise, **record)(compute)


bit_and = _integer_op("bit_and", np.bitwise_and, "{0} & {1}")
bit_or = _integer_op("bit_or", np.bitwise_or, "{0} | {1}")
bit_xor = _integer_op("bit_xor", np.bitwise_xor, "{0} ^ {1}")
left_shifted = _integer_op("left_shifted", np.left_shift, "dp_left_shift({0}, {1})")
right_shifted = _integer_op("right_shifted", np.right_shift, "dp_right_shift({0}, {1})")
greatest_divisor = _integer_op("greatest_divisor", np.gcd, "dp_gcd({0}, {1})", expensive=True)


@op(shape=broadcast_shape, letters=elementwise, dtype=_integer_dtype("bitwise_invert"), lowering=Element("~{0}"))
def bit_invert(x: Array, *, out: Array) -> None:
    """numpy.invert of integers."""
    np.invert(x, out=out)


@operation
def bitwise_and(x: Any, y: Any) -> Tensor:
    """Return the bits set in both integers."""
    return bit_and(x, y)


@operation
def bitwise_or(x: Any, y: Any) -> Tensor:
    """Return the bits set in either integer."""
    return bit_or(x, y)


@operation
def bitwise_xor(x: Any, y: Any) -> Tensor:
    """Return the bits set in exactly one of two integers."""
    return bit_xor(x, y)


@operation
def bitwise_invert(x: Any) -> Tensor:
    """Invert all bits of an integer; booleans are negated."""
    (tensor,) = as_tensors([x])
    return logical_not(tensor) if tensor.dtype.kind == "b" else bit_invert(tensor)


bitwise_not = bitwise_invert


@operation
def bitwise_left_shift(x: Any, y: Any) -> Tensor:
    """Shift x left by y bits; 0 where y is at least the number of bits."""
    return left_shifted(*_integer_operands("bitwise_left_shift", x, y))


@operation
def bitwise_right_shift(x: Any, y: Any) -> Tensor:
    """Shift x right by y bits, filling with the sign."""
    return right_shifted(*_integer_operands("bitwise_right_shift", x, y))


left_shift, right_shift = bitwise_left_shift, bitwise_right_shift


def _integer_operands(name: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    a, b = as_tensors([x, y])
    if a.dtype.kind == "b" and b.dtype.kind == "b":
        raise ConfigError(f"{name}: expected integers, found bool")
    return a, b


@operation
def gcd(x1: Any, x2: Any) -> Tensor:
    """Return the greatest common divisor of integers; 0 of two zeros."""
    return greatest_divisor(*_integer_operands("gcd", x1, x2))


@operation
def lcm(x1: Any, x2: Any) -> Tensor:
    """Return the least common multiple of integers; 0 where either is 0."""
    from dptrain.ops.arrays import abs
    from dptrain.ops.elementwise import maximum, multiply

    a, b = _integer_operands("lcm", x1, x2)
    size = abs(a) if a.dtype.kind == "i" else a
    magnitude = abs(b) if b.dtype.kind == "i" else b
    divisor = greatest_divisor(size, magnitude)
    return multiply(floor_divide(size, maximum(divisor, np.ones((), divisor.dtype))), magnitude)


# Floating-point numbers


@op(shape=broadcast_shape, letters=elementwise, dtype=floating_dtype, lowering=Element("dp_nextafter({0}, {1})"))
def nextafter_along(x1: Array, x2: Array, *, out: Array) -> None:
    """numpy.nextafter."""
    np.nextafter(x1, x2, out=out)


@nextafter_along.gradient
def _nextafter(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, None]:
    return unbroadcast(dy, x1), None


@operation
def nextafter(x1: Any, x2: Any) -> Tensor:
    """Return the next number after x1 towards x2 in its type."""
    a, b = as_tensors([x1, x2])
    dtype = floating_dtype(a.dtype, b.dtype)
    return nextafter_along(cast(a, dtype), cast(b, dtype))


@op(shape=broadcast_shape, letters=elementwise, dtype=boolean, lowering=Element("dp_signbit({0})"))
def has_sign(x: Array, *, out: Array) -> None:
    """numpy.signbit."""
    if x.dtype.kind == "b":
        out.fill(False)
    else:
        np.signbit(x, out=out) if is_floating(x.dtype) else np.less(x, 0, out=out)


@operation
def signbit(x: Any) -> Tensor:
    """Return whether a number is negative or -0."""
    return has_sign(x)


@operation
def ldexp(x1: Any, x2: Any) -> Tensor:
    """Return x1 times 2 to the power of x2, which are integers."""
    (number,), (exponent,) = as_tensors([x1]), as_tensors([x2])
    if exponent.dtype.kind not in "iu":
        raise ConfigError(f"ldexp exponent must be an integer type. Received: x2 dtype={exponent.dtype.name}")
    number = floating(number)
    half = floor_divide(exponent, np.int32(2).astype(exponent.dtype))  # 2^exponent alone may be infinite

    def power_of_two(n: Tensor) -> Tensor:
        return power(np.asarray(2, number.dtype), cast(n, number.dtype))

    return number * power_of_two(half) * power_of_two(exponent - half)


def _viewed_shape(shape: Shape, *, dtype: str, itemsize: int) -> Shape:
    ratio = itemsize, np.dtype(dtype).itemsize
    if ratio[0] == ratio[1]:
        return shape
    if not shape or int(shape[-1]) * ratio[0] % ratio[1]:
        raise ConfigError(
            f"view: elements of {ratio[0]} bytes in shape {shape} cannot be viewed as {dtype}, of {ratio[1]} bytes"
        )
    return (*shape[:-1], int(shape[-1]) * ratio[0] // ratio[1])


def _viewed_letters(shapes: Any, out: Any, attributes: Any) -> str:
    from dptrain.program.sharding.sharding_rule import names

    if attributes["itemsize"] == np.dtype(attributes["dtype"]).itemsize:
        return f"{names(len(out))}->{names(len(out))}"
    rows = names(len(out) - 1)
    return f"{rows}X->{rows}X"


@op(
    shape=_viewed_shape,
    letters=_viewed_letters,
    dtype=lambda x, *, dtype, itemsize: np.dtype(dtype),
    lowering=HostCall(),
)
def bits_as(x: Array, *, dtype: TypeName, itemsize: int, out: Array) -> None:
    """numpy.ndarray.view."""
    out[...] = np.ascontiguousarray(x).view(out.dtype).reshape(out.shape)


bits_as.takes_halves = True  # the 16 bits of half precision, not the 32 that arithmetic takes


@bits_as.gradient
def _bits_as(y: Tensor, dy: Tensor, x: Tensor) -> None:
    return None


@operation
def view(x: Any, dtype: Any = None) -> Tensor:
    """Return the same bytes as another type; the last axis becomes longer or shorter with the size of its elements."""
    (tensor,) = as_tensors([x])
    if dtype is None or np.dtype(dtype) == tensor.dtype:
        return tensor
    return bits_as(tensor, dtype=np.dtype(dtype).name, itemsize=tensor.dtype.itemsize)
