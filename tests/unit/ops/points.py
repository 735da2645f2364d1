"""Where functions of elements, and of rows, are tried: at 0, corners, ties, bounds, infinities, and far out.

A generic test runs over these tables for every way to compute (`test_points.py`, `tests/ops/test_points_on_cuda.py`),
and beside JAX (`tests/against_keras/test_points.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain import activations, losses, ops
from dptrain.program.gradient import gradients
from dptrain.program.lowering import Element
from dptrain.program.program import trace
from dptrain.program.tensor import OPS, differentiable

INF, NAN = np.inf, np.nan
# Bounds of hard activations (0.5, 1, 3, 6) among them.
MAGNITUDES = (0.0, 1e-9, 1e-5, 0.25, 0.5, 0.75, 1, 2, 3, 4, 6, 20, 40, 88.7, 89, 100, 800, 1e30, INF)
POINTS = np.array([sign * size for size in MAGNITUDES for sign in (1, -1)] + [NAN])
# Of two operands all pairs, equal ones among them.
_SIDE = np.array([0.0, -0.0, 0.5, -0.5, 1, -1, 2, -2, 5.5, -5.5, 100, -100, 1e30, -1e30, INF, -INF, NAN])
PAIRS = tuple(side.ravel() for side in np.meshgrid(_SIDE, _SIDE, indexing="ij"))
# Numbers that a float32 holds without all its digits.
DENORMAL = {"float32": np.array([1e-45, -1e-40]), "float64": np.array([5e-324, -1e-310])}

_LOW, _HIGH = -0.5, 2.0
_NAMES = """
    absolute angle arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil celu cos cosh deg2rad elu erf erfc exp exp2
    expm1 fabs floor gelu hard_shrink hard_sigmoid hard_silu hard_tanh isfinite isinf isnan isneginf isposinf leaky_relu
    log log10 log1p log2 log_sigmoid logical_not nan_to_num negative rad2deg reciprocal relu relu6 round rsqrt selu
    sigmoid sign signbit silu sin sinc sinh soft_shrink softplus softsign sparse_plus sparse_sigmoid sqrt square
    squareplus stop_gradient tan tanh tanh_shrink trunc
"""
UNARY: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(ops, name) for name in _NAMES.split()},
    "mish": activations.mish,
    "exact_gelu": lambda x: ops.gelu(x, approximate=False),
    "threshold": lambda x: ops.threshold(x, 0.5, 7.0),
    "clip": lambda x: ops.clip(x, _LOW, _HIGH),
    "leaky_relu_to_6": lambda x: activations.relu(x, negative_slope=0.1, max_value=6.0),
    "relu_to_6": lambda x: activations.relu(x, max_value=6.0),
    "relu_from_1": lambda x: activations.relu(x, threshold=1.0),
    # Gradients that are infinite beside those that are 0: to be selected, not multiplied.
    "root_of_maximum": lambda x: ops.sqrt(ops.maximum(x, 0.0)),
    "root_of_minimum": lambda x: ops.sqrt(-ops.minimum(x, 0.0)),
    "root_of_clip": lambda x: ops.sqrt(ops.clip(x, 0.0, 2.0)),
    "root_of_relu": lambda x: ops.sqrt(ops.relu(x)),
    "root_of_relu6": lambda x: ops.sqrt(ops.relu6(x)),
    "logarithm_of_maximum": lambda x: ops.log(ops.maximum(x, 0.0)),
    "logarithm_of_clip": lambda x: ops.log(ops.clip(x, 0.0, 2.0)),
    "inverse_of_maximum": lambda x: ops.reciprocal(ops.maximum(x, 0.0)),
    **{f"power_{n}": lambda x, n=n: ops.power(x, n) for n in (0, 1, 2, 3, -1, 0.5, 1.5)},
    "polynomial": lambda x: ops.sum(ops.expand_dims(x, -1) ** np.arange(4.0), -1),
}
_BINARY_NAMES = """
    add arctan2 divide divide_no_nan equal floor_divide fmax fmin fmod greater greater_equal heaviside hypot isclose
    less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum mod multiply not_equal power
    subtract
"""
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(ops, name) for name in _BINARY_NAMES.split()},
    "nextafter": ops.nextafter,
    "where": lambda a, b: ops.where(a > b, a, b),
    "clip_from": lambda a, b: ops.clip(a, b, 1.0),
    "clip_to": lambda a, b: ops.clip(a, -1.0, b),
}

# Rows of the second table: zeros, equal elements, one and two zeros, ties, infinities.
ROWS = np.array(
    [
        *([0.0, 0, 0, 0], [2, 2, 2, 2], [1, -3, 0, 2], [0, 3, 0, -2], [-1, -1, 3, 3], [1e30, 1e30, 1, 0]),
        *([1, INF, 2, 3], [1, -INF, 2, 3], [-INF, -INF, -INF, -INF], [INF, INF, 1, 2], [NAN, 1, 2, 3]),
    ]
)
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    **{name: lambda x, name=name: getattr(ops, name)(x, -1) for name in ("softmax", "log_softmax", "sparsemax", "glu")},
    **{name: lambda x, name=name: getattr(ops, name)(x, -1) for name in ("logsumexp", "max", "min", "sum", "mean")},
    **{name: lambda x, name=name: getattr(ops, name)(x, -1) for name in ("prod", "cumprod", "cumsum", "var", "std")},
    "norm": lambda x: ops.norm(x, axis=-1),
    **{f"norm_{order}": lambda x, order=order: ops.norm(x, order, -1) for order in (1, 2, 3, 0.5, INF, -INF)},
    "normalize": lambda x: ops.normalize(x, -1),
    "normalize_3": lambda x: ops.normalize(x, -1, 3),
    "cosine": lambda x: losses.cosine_similarity(np.ones((len(ROWS), 4)), x),
}


def finite_rows() -> np.ndarray:
    """Rows without NaN and infinities."""
    return ROWS[np.isfinite(ROWS).all(-1)]


def operands(dtype: str) -> dict[str, np.ndarray]:
    """Return x, pairs a and b, and rows in a type."""
    arrays = {"x": np.append(POINTS, DENORMAL[dtype]), "a": PAIRS[0], "b": PAIRS[1], "rows": ROWS}
    return {name: array.astype(dtype) for name, array in arrays.items()}


def results(x: Any, a: Any, b: Any, rows: Any) -> dict[str, Any]:
    """Compute all functions, and the gradients of their sums, by name."""
    tensors: dict[str, Any] = {}
    for functions, inputs in ((UNARY, {"x": x}), (BINARY, {"a": a, "b": b}), (OF_ROWS, {"rows": rows})):
        for name, function in functions.items():
            tensors |= _with_gradients(name, function, inputs)
    return tensors


def _with_gradients(name: str, function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    output = function(*inputs.values())
    tensors = {name: output}
    if output.dtype.kind == "f":
        slopes = gradients(ops.sum(output), list(inputs.values()))
        tensors |= {f"d {name} / d {of}": slope for of, slope in zip(inputs, slopes, strict=True) if slope is not None}
    return tensors


@functools.cache
def eagerly(dtype: str) -> dict[str, np.ndarray]:
    """Return `results` computed one by one."""
    tensors = results(*(differentiable(array) for array in operands(dtype).values()))
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@functools.cache
def program(dtype: str) -> Any:
    """Return `results` as a program."""
    return trace(results, {name: (array.shape, dtype) for name, array in operands(dtype).items()})


def untried() -> set[str]:
    """Return the ops of elements that are in no program, apart from those of integers and of types."""
    tried = {tensor.op.name for tensor in program("float64").tensors if tensor.op is not None}
    wanted = {name for name, record in OPS.items() if isinstance(record.lowering, Element)}
    of_integers = {"bit_and", "bit_invert", "bit_or", "bit_xor", "greatest_divisor", "left_shifted", "right_shifted"}
    return wanted - tried - of_integers - {"cast_to", "round_to", "full", "one_hot_last"}


def apart(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    """Return where results differ: NaN equals NaN, and an infinity itself."""
    a, b = np.broadcast_arrays(np.asarray(actual, np.float64), np.asarray(expected, np.float64))
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= atol + rtol * np.abs(b)
    return ~((a == b) | (np.isnan(a) & np.isnan(b)) | (near & np.isfinite(a) & np.isfinite(b)))


# Relative, and absolute: of what cancels, such as 1 + erf(x) of negative numbers.
_TOLERANCES = {"float32": (2e-5, 3e-7), "float64": (1e-12, 1e-13)}


def wrong(actual: dict[str, np.ndarray], dtype: str, exact: bool = False) -> dict[str, Any]:
    """Return the results that are not the eager ones, each with the first element that differs.

    Compiled code takes denormal numbers for 0; unless results are to be exact they need only not be NaN there.
    """
    expected = eagerly(dtype)
    # A program lacks the gradients that are constants, such as those of a sum.
    missing = {name for name in expected.keys() - actual.keys() if not name.startswith("d ")}
    different: dict[str, Any] = dict.fromkeys(missing | (actual.keys() - expected.keys()))
    for name, value in actual.items():
        differs = apart(value, expected[name], *((0, 0) if exact else _TOLERANCES[dtype]))
        if not exact and len(differs) == len(POINTS) + len(DENORMAL[dtype]):
            at_denormal = np.isnan(value) & ~np.isnan(expected[name]) & ~np.isnan(expected[name][0])
            differs[len(POINTS) :] = at_denormal[len(POINTS) :]
        if differs.any():
            at = tuple(np.argwhere(differs)[0])
            different[name] = (at, value[at], expected[name][at])
    return different
