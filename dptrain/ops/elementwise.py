"""Arithmetic, comparisons and functions of single elements, broadcast as in NumPy."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.ops.common import (
    boolean,
    broadcast_shape,
    common_dtype,
    elementwise,
    first_dtype,
    floating_dtype,
    numeric_dtype,
    unbroadcast,
)
from dptrain.ops.operation_calls import operation
from dptrain.program.codegen.views import identity
from dptrain.program.lowering import Element, ViewMap
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import Op, op
from dptrain.program.operand import METHODS, Operator
from dptrain.program.schema import TypeName
from dptrain.program.tensor import FLOATX, Array, Tensor, as_tensors, in_double
from dptrain.program.types import promoted_as_keras
from dptrain.runtime.floatx import floatx
from dptrain.runtime.types import is_floating, is_narrow

_ARITHMETIC: dict[str, Any] = {"shape": broadcast_shape, "letters": elementwise, "dtype": common_dtype}
_COUNTING: dict[str, Any] = {"shape": broadcast_shape, "letters": elementwise, "dtype": numeric_dtype}
_FUNCTION: dict[str, Any] = {"shape": broadcast_shape, "letters": elementwise, "dtype": floating_dtype}
_COMPARISON: dict[str, Any] = {"shape": broadcast_shape, "letters": elementwise, "dtype": boolean}


def _as_float(x: Array) -> Array:
    """Return integers as float64, like compiled code; NumPy would use float16 for 8 bits."""
    return x if is_floating(x.dtype) else x.astype(np.float64)


def in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a function to compute half precision in float32 and round its result."""

    @functools.wraps(function)
    def computed(*arguments: Any, **keywords: Any) -> Tensor:
        tensor = as_tensors([*arguments[:1], *([keywords["x"]] if not arguments else [])])[0]
        if not is_narrow(tensor.dtype):
            return function(*arguments, **keywords)
        wide = cast(tensor, FLOATX)
        result = function(wide, *arguments[1:], **keywords) if arguments else function(**{**keywords, "x": wide})
        return cast(result, tensor.dtype)

    return computed


# Two operands


@op(**_ARITHMETIC, linear="joint", ufunc=np.add, lowering=Element("{0} + {1}"), onnx="Add", operator="+")
def add(x1: Array, x2: Array, *, out: Array) -> None:
    """x1 + x2."""
    np.add(x1, x2, out=out)


@add.gradient
def _add(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return unbroadcast(dy, x1), unbroadcast(dy, x2)


@op(
    **_ARITHMETIC,
    linear="joint",
    ufunc=np.subtract,
    lowering=Element("{0} - {1}"),
    onnx="Sub",
    operator="-",
)
def subtract(x1: Array, x2: Array, *, out: Array) -> None:
    """x1 - x2."""
    np.subtract(x1, x2, out=out)


@subtract.gradient
def _subtract(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return unbroadcast(dy, x1), unbroadcast(-dy, x2)


@op(
    **_ARITHMETIC,
    linear="each",
    ufunc=np.multiply,
    lowering=Element("{0} * {1}"),
    onnx="Mul",
    operator="*",
)
def multiply(x1: Array, x2: Array, *, out: Array) -> None:
    """x1 x2, element by element."""
    np.multiply(x1, x2, out=out)


@multiply.gradient
def _multiply(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return unbroadcast(dy * x2, x1), unbroadcast(dy * x1, x2)


@op(
    **_FUNCTION,
    linear="each",
    linear_in=(0,),
    lowering=Element("{0} / {1}"),
    expensive=True,
    quotient=np.nan,
    ufunc=np.divide,
    operator="/",
)
def divide(x1: Array, x2: Array, *, out: Array) -> None:
    """x1 / x2."""
    np.divide(x1, x2, out=out)


@divide.gradient
def _divide(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return unbroadcast(dy / x2, x1), unbroadcast(-(dy * y) / x2, x2)


@op(**_COUNTING, lowering=Element("dp_floor_divide({0}, {1})"), expensive=True, operator="//")
def floor_divide(x1: Array, x2: Array, *, out: Array) -> None:
    """The greatest integer that is at most x1 / x2."""
    np.floor_divide(x1, x2, out=out)


@floor_divide.gradient
def _floor_divide(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[None, None]:
    return None, None


@floor_divide.onnx_lowering
def _floor_divide_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    a, b = (graph.computed(value, output.dtype) for value in (x1, x2))
    zero, unit = graph.constant(0, a.dtype), graph.constant(1, a.dtype)
    if not is_floating(a.dtype):  # the remainder has the divisor's sign
        return graph.node("Div", graph.node("Sub", a, graph.node("Mod", a, b)), b)
    remainder = graph.node("Mod", a, b, fmod=1)  # has the dividend's sign, and is exact, unlike a / b
    quotient = graph.node("Div", graph.node("Sub", a, remainder), b)
    signs = [graph.node("Less", number, zero, dtype=np.bool_) for number in (remainder, b)]
    is_whole = graph.node("Equal", remainder, zero, dtype=np.bool_)
    is_below = graph.node("And", graph.node("Not", is_whole), graph.node("Xor", *signs))
    floored = graph.node(
        "Round", graph.node("Where", is_below, graph.node("Sub", quotient, unit), quotient, dtype=a.dtype)
    )
    by_zero = graph.node("Equal", b, zero, dtype=np.bool_)
    return graph.node("Where", by_zero, graph.node("Div", a, b), floored, dtype=a.dtype)


@op(
    **_COUNTING,
    lowering=Element("dp_power({0}, {1})", exponents=(1,)),
    onnx="Pow",
    expensive=True,
    operator="**",
)
def power(x1: Array, x2: Array, *, out: Array) -> None:
    """x1 to the power of x2."""
    np.power(x1, x2, out=out)
    if x2.size == 1 and x2.dtype.kind == "f" and float(x2.reshape(())) == 0.5:  # NumPy takes the root, NaN of -inf
        np.copyto(out, np.inf, where=np.isneginf(x1))


@power.gradient
def _power(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    # Where x1 is not positive, the gradient in the exponent is 0, as in Keras' backends.
    positive = x1 > 0
    log_x1 = where(positive, log(where(positive, x1, 1)), 0)
    exponent = x2 if _is_nonzero(x2) else where(equal(x2, 0), 1, x2)  # 0 x^0, not 0 times the infinity 0^-1
    return unbroadcast(dy * x2 * power(x1, exponent - 1), x1), unbroadcast(dy * y * log_x1, x2)


def _is_nonzero(x: Tensor) -> bool:
    """Whether x is a single number that is known not to be 0."""
    return x.op is None and x.variable is None and x.value is not None and x.value.size == 1 and bool(x.value.all())


@op(**_ARITHMETIC, ufunc=np.maximum, lowering=Element("dp_maximum({0}, {1})"), onnx="Max")
def maximum(x1: Array, x2: Array, *, out: Array) -> None:
    """The greater of x1 and x2; NaN where either is."""
    np.maximum(x1, x2, out=out)


@maximum.gradient
def _maximum(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return _extremum_gradients(dy, x1 > x2, x1, x2)


@op(**_ARITHMETIC, ufunc=np.minimum, lowering=Element("dp_minimum({0}, {1})"), onnx="Min")
def minimum(x1: Array, x2: Array, *, out: Array) -> None:
    """The lesser of x1 and x2; NaN where either is."""
    np.minimum(x1, x2, out=out)


@minimum.gradient
def _minimum(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return _extremum_gradients(dy, x1 < x2, x1, x2)


def _extremum_gradients(dy: Tensor, first: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Equal operands get half of the gradient each, as in JAX and PyTorch.

    The gradient is selected, not multiplied: times 0 an infinite one would be NaN.
    """
    shared = where(equal(x1, x2), dy * 0.5, 0)
    return (
        unbroadcast(where(first, dy, shared), x1),
        unbroadcast(where(first, 0, where(equal(x1, x2), dy * 0.5, dy)), x2),
    )


def _comparison(name: str, function: Any, operator: Operator, onnx: str | None = None) -> Op:
    def compute(x1: Array, x2: Array, *, out: Array) -> None:
        function(x1, x2, out=out)

    compute.__name__, compute.__doc__ = name, f"Whether x1 and x2 are in this relation: numpy.{name}."
    sign = {"&": "&&", "|": "||"}.get(operator, operator)
    return op(**_COMPARISON, lowering=Element(f"{{0}} {sign} {{1}}"), operator=operator, onnx=onnx)(compute)


equal = _comparison("equal", np.equal, "==", "Equal")
not_equal = _comparison("not_equal", np.not_equal, "!=")
less = _comparison("less", np.less, "<", "Less")
less_equal = _comparison("less_equal", np.less_equal, "<=", "LessOrEqual")
greater = _comparison("greater", np.greater, ">", "Greater")
greater_equal = _comparison("greater_equal", np.greater_equal, ">=", "GreaterOrEqual")
logical_and = _comparison("logical_and", np.logical_and, "&")
logical_or = _comparison("logical_or", np.logical_or, "|")


@not_equal.onnx_lowering
def _not_equal_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    return graph.node("Not", graph.elements("Equal", output, (x1, x2)))


@logical_and.onnx_lowering
def _logical_and_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    return graph.node("And", graph.cast(x1, np.bool_), graph.cast(x2, np.bool_))


@logical_or.onnx_lowering
def _logical_or_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    return graph.node("Or", graph.cast(x1, np.bool_), graph.cast(x2, np.bool_))


@op(**_COMPARISON, lowering=Element("!{0}"), operator="~")
def logical_not(x: Array, *, out: Array) -> None:
    """Whether x is false."""
    np.logical_not(x, out=out)


@logical_not.onnx_lowering
def _logical_not_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return graph.node("Not", graph.cast(x, np.bool_))


def _where_dtype(condition: Any, *dtypes: Any) -> npt.DTypeLike:
    return common_dtype(*dtypes)


@op(
    shape=broadcast_shape,
    letters=elementwise,
    dtype=_where_dtype,
    linear="joint",
    linear_in=(1, 2),
    lowering=Element("{0} ? {1} : {2}", conditions=(0,)),
    operator="select",
)
def where(condition: Array, x1: Array, x2: Array, *, out: Array) -> None:
    """x1 where the condition is true, else x2."""
    np.copyto(out, x2)
    np.copyto(out, x1, where=condition.astype(np.bool_, copy=False))


@where.gradient
def _where(y: Tensor, dy: Tensor, condition: Tensor, x1: Tensor, x2: Tensor) -> tuple[None, Tensor, Tensor]:
    return None, unbroadcast(where(condition, dy, 0), x1), unbroadcast(where(condition, 0, dy), x2)


@where.onnx_lowering
def _where_onnx(graph: OnnxGraph, output: Tensor, condition: Value, x1: Value, x2: Value) -> Value:
    chosen = [graph.computed(value, output.dtype) for value in (x1, x2)]
    return graph.node("Where", graph.cast(condition, np.bool_), *chosen, dtype=chosen[0].dtype)


# One operand


@op(**_ARITHMETIC, linear="each", lowering=Element("-{0}"), onnx="Neg", operator="neg")
def negative(x: Array, *, out: Array) -> None:
    """-x."""
    np.negative(x, out=out)


@negative.gradient
def _negative(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return -dy


@op(**_ARITHMETIC, lowering=Element("dp_absolute({0})"), onnx="Abs", operator="abs")
def absolute(x: Array, *, out: Array) -> None:
    """|x|."""
    np.absolute(x, out=out)


@absolute.gradient
def _absolute(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return where(equal(x, 0), 0, dy * sign(x))  # 0 also where dy is infinite


@op(**_ARITHMETIC, lowering=Element("dp_sign({0})"), onnx="Sign")
def sign(x: Array, *, out: Array) -> None:
    """-1, 0 or 1."""
    np.sign(x, out=out)


@sign.gradient
def _sign(y: Tensor, dy: Tensor, x: Tensor) -> None:
    return None


@op(**_FUNCTION, lowering=Element("dp_exp({0})"), onnx="Exp", expensive=True)
def exp(x: Array, *, out: Array) -> None:
    """e to the power of x."""
    np.exp(_as_float(x), out=out)


@exp.gradient
def _exp(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * y


@op(**_FUNCTION, lowering=Element("dp_log({0})"), onnx="Log", expensive=True)
def log(x: Array, *, out: Array) -> None:
    """The natural logarithm."""
    np.log(_as_float(x), out=out)


@log.gradient
def _log(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy / x


@op(**_FUNCTION, lowering=Element("dp_log1p({0})"), expensive=True)
def log1p(x: Array, *, out: Array) -> None:
    """The natural logarithm of 1 + x, exact near 0."""
    np.log1p(_as_float(x), out=out)


@log1p.gradient
def _log1p(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy / (x + 1)


@log1p.onnx_lowering
def _log1p_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    """With u = 1 + x as it is rounded, x log(u) / (u - 1), and x where u is 1: exact near 0."""
    value = graph.computed(x, output.dtype)
    unit = graph.constant(1, value.dtype)
    u = graph.node("Add", value, unit)
    is_one = graph.node("Equal", u, unit, dtype=np.bool_)
    is_inf = graph.node("IsInf", u, dtype=np.bool_)
    ratio = graph.node("Div", value, graph.node("Sub", u, unit))
    scaled = graph.node("Mul", graph.node("Log", u), ratio)
    exact = graph.node("Where", is_one, value, scaled, dtype=value.dtype)
    return graph.node("Where", is_inf, u, exact, dtype=value.dtype)


@op(**_FUNCTION, lowering=Element("dp_sqrt({0})"), onnx="Sqrt", expensive=True)
def sqrt(x: Array, *, out: Array) -> None:
    """The square root."""
    np.sqrt(_as_float(x), out=out)


@sqrt.gradient
def _sqrt(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * 0.5 / y


@op(**_COUNTING, lowering=Element("{0} * {0}"))
def square(x: Array, *, out: Array) -> None:
    """x^2."""
    np.square(x, out=out)


@square.gradient
def _square(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * 2 * x


@square.onnx_lowering
def _square_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    value = graph.computed(x)
    return graph.node("Mul", value, value)


@op(**_FUNCTION, lowering=Element("dp_sin({0})"), onnx="Sin", expensive=True)
def sin(x: Array, *, out: Array) -> None:
    """The sine of x radians."""
    np.sin(_as_float(x), out=out)


@sin.gradient
def _sin(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * cos(x)


@op(**_FUNCTION, lowering=Element("dp_cos({0})"), onnx="Cos", expensive=True)
def cos(x: Array, *, out: Array) -> None:
    """The cosine of x radians."""
    np.cos(_as_float(x), out=out)


@cos.gradient
def _cos(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return -(dy * sin(x))


@op(**_FUNCTION, lowering=Element("dp_tanh({0})"), onnx="Tanh", expensive=True)
def tanh(x: Array, *, out: Array) -> None:
    """The hyperbolic tangent."""
    np.tanh(_as_float(x), out=out)


@tanh.gradient
def _tanh(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * (1 - y * y)


@op(**_FUNCTION, lowering=Element("dp_expm1({0})"), expensive=True)
def expm1(x: Array, *, out: Array) -> None:
    """e^x - 1, exact near 0."""
    np.expm1(_as_float(x), out=out)


@expm1.gradient
def _expm1(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * (y + 1)


@expm1.onnx_lowering
def _expm1_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    """Near 0, 2 t / (1 - t) with t = tanh(x / 2)."""
    value, unit = graph.computed(x, output.dtype), graph.constant(1, output.dtype)
    t = graph.node("Tanh", graph.node("Mul", value, graph.constant(0.5, output.dtype)))
    near = graph.node("Div", graph.node("Add", t, t), graph.node("Sub", unit, t))
    is_near = graph.node("Less", graph.node("Abs", value), unit, dtype=np.bool_)
    far = graph.node("Sub", graph.node("Exp", value), unit)
    return graph.node("Where", is_near, near, far, dtype=output.dtype)


@op(**_FUNCTION, lowering=Element("dp_sigmoid({0})"), onnx="Sigmoid", expensive=True)
def sigmoid(x: Array, *, out: Array) -> None:
    """1 / (1 + e^-x), without overflow."""
    x = _as_float(x)
    decay = np.exp(-np.abs(x))
    np.divide(np.where(x >= 0, 1, decay), 1 + decay, out=out)


@sigmoid.gradient
def _sigmoid(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * y * (1 - y)


@op(**_FUNCTION, lowering=Element("dp_softplus({0})"), onnx="Softplus", expensive=True)
def softplus(x: Array, *, out: Array) -> None:
    """log(1 + e^x), without overflow."""
    np.logaddexp(_as_float(x), 0, out=out)


@softplus.gradient
def _softplus(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * sigmoid(x)


@op(**_FUNCTION, lowering=Element("{0} < 0 ? 0 : {0}"), onnx="Relu")
def relu(x: Array, *, out: Array) -> None:
    """max(x, 0); NaN stays NaN."""
    np.maximum(x, 0, out=out)


@relu.gradient
def _relu(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return where(y > 0, dy, 0)


@op(**_FUNCTION, lowering=Element("{0} > 0 ? {0} : {0} * {negative_slope}"))
def leaky_relu(x: Array, *, out: Array, negative_slope: float = 0.2) -> None:
    """x where it is positive, else negative_slope x."""
    np.multiply(x, negative_slope, out=out)
    np.copyto(out, x, where=x > 0)


@leaky_relu.gradient
def _leaky_relu(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return where(x > 0, dy, dy * float(y.attributes.get("negative_slope", 0.2)))


@leaky_relu.onnx_lowering
def _leaky_relu_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    slope = graph.constant(output.attributes.get("negative_slope", 0.2), output.dtype)
    value = graph.computed(x, output.dtype)
    positive = graph.node("Greater", value, graph.constant(0, output.dtype), dtype=np.bool_)
    return graph.node("Where", positive, value, graph.node("Mul", value, slope), dtype=output.dtype)


@op(**_FUNCTION, lowering=Element("{0} > 0 ? {0} : {alpha} * dp_expm1({0})"), expensive=True)
def elu(x: Array, *, out: Array, alpha: float = 1.0) -> None:
    """x where it is positive, else alpha (e^x - 1)."""
    np.multiply(np.expm1(np.minimum(_as_float(x), 0)), alpha, out=out)
    np.copyto(out, x, where=x > 0)


@elu.gradient
def _elu(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return where(x > 0, dy, dy * (y + float(y.attributes.get("alpha", 1.0))))


@elu.onnx_lowering
def _elu_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    value, zero = graph.computed(x, output.dtype), graph.constant(0, output.dtype)
    power = graph.node("Sub", graph.node("Exp", graph.node("Min", value, zero)), graph.constant(1, output.dtype))
    scaled = graph.node("Mul", power, graph.constant(output.attributes.get("alpha", 1.0), output.dtype))
    return graph.node("Where", graph.node("Greater", value, zero, dtype=np.bool_), value, scaled, dtype=output.dtype)


@operation
@in_float32
def silu(x: Any) -> Tensor:
    """x sigmoid(x)."""
    return multiply(sigmoid(x), x)


def _cast_dtype(from_dtype: Any, *, dtype: str) -> npt.DTypeLike:
    return np.dtype(dtype)


@op(
    shape=broadcast_shape,
    letters=elementwise,
    dtype=_cast_dtype,
    linear="each",
    lowering=Element("{0}"),
)
def cast_to(x: Array, *, out: Array, dtype: TypeName) -> None:
    """x in another type."""
    np.copyto(out, x, casting="unsafe")


@op(shape=broadcast_shape, letters=elementwise, dtype=_cast_dtype, lowering=Element("{0}"))
def round_to(x: Array, *, out: Array, dtype: TypeName) -> None:
    """x in half precision, as integers or as booleans.

    Not linear: ranks sum their partial results before rounding, so that the result is that of one rank.
    """
    np.copyto(out, x, casting="unsafe")


@cast_to.gradient
@round_to.gradient
def _cast_to(y: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    return cast(dy, x.dtype) if is_floating(x.dtype) else None


@cast_to.onnx_lowering
@round_to.onnx_lowering
def _cast_to_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return x  # the dtype rule casts the result


@operation
def cast(x: Any, dtype: npt.DTypeLike) -> Tensor:
    """Return x in another type, such as "float32"."""
    (tensor,) = as_tensors([in_double(x)])
    target = np.dtype(dtype)
    if tensor.dtype == target:
        return tensor
    rounds = is_narrow(target) or target.kind == "b" or (target.kind in "iu" and is_floating(tensor.dtype))
    return (round_to if rounds else cast_to)(tensor, dtype=target.name)


METHODS["cast"] = cast


def floating(x: Any) -> Tensor:
    """Return x as floating-point numbers: integers and booleans as float32."""
    (tensor,) = as_tensors([x])
    return tensor if is_floating(tensor.dtype) else cast_to(tensor, dtype=floatx().name)


def all_floating(*xs: Any) -> tuple[Tensor, ...]:
    """Promote tensors to one floating-point type; integers alone become floatx."""
    tensors = as_tensors(xs)
    common = promoted_as_keras(*(tensor.dtype for tensor in tensors))
    return tuple(cast(tensor, common if is_floating(common) else floatx()) for tensor in tensors)


def _clipping(name: str, is_inside: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Op:
    """Return an op that clamps x between two bounds; `is_inside` says where x has its gradient."""

    def compute(x: Array, low: Array, high: Array, *, out: Array) -> None:
        np.maximum(x, low, out=out)
        np.minimum(out, high, out=out)

    def gradient(y: Tensor, dy: Tensor, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        above = maximum(x, low) > high
        return (
            unbroadcast(where(is_inside(x, low, high), dy, 0), x),
            unbroadcast(where(logical_and(x < low, low <= high), dy, 0), low),
            unbroadcast(where(above, dy, 0), high),
        )

    def onnx(graph: OnnxGraph, output: Tensor, x: Value, low: Value, high: Value) -> Value:
        return graph.elements("Min", output, (graph.elements("Max", output, (x, low)), high))

    compute.__name__, compute.__doc__ = name, "min(max(x, low), high)."
    record = op(**_ARITHMETIC, lowering=Element("dp_minimum(dp_maximum({0}, {1}), {2})"))(compute)
    record.gradient(gradient)
    record.onnx_lowering(onnx)
    return record


clip_to = _clipping("clip_to", lambda x, low, high: logical_and(x >= low, x <= high))
# For activations: at the bounds, as beyond them, the gradient is 0.
saturate_to = _clipping("saturate_to", lambda x, low, high: logical_and(x > low, x < high))


@operation
def clip(x: Any, x_min: float, x_max: float) -> Tensor:
    """Clamp x between two numbers; the gradient is 0 outside them."""
    return clip_to(x, x_min, x_max)


@op(
    shape=broadcast_shape,
    letters=elementwise,
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(identity),
    onnx="Identity",
    operator="same",
)
def alias(x: Array) -> Array:
    """x in another tensor object, to carry a mask or its own gradient."""
    return x


@alias.gradient
def _alias(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy


@op(
    shape=broadcast_shape,
    letters=elementwise,
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(identity),
    ends_gradients=True,
    operator="identity",
)
def stop_gradient(variable: Array) -> Array:
    """Return a variable or tensor without its gradient."""
    return variable


@stop_gradient.gradient
def _stop_gradient(y: Tensor, dy: Tensor, x: Tensor) -> None:
    return None


@stop_gradient.onnx_lowering
def _stop_gradient_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return x
