"""Functions of elements and of rows at 0, at corners, ties and infinities, beside JAX in float64.

Where dptrain differs on purpose stands in `DIFFERENT`, with the reason; docs/keras.md names the rules.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from tests.sample import sample
from tests.unit.ops import points

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy
nn = jax.nn


def _hard_shrink(x: Any, t: float = 0.5) -> Any:
    return jnp.where(jnp.abs(x) > t, x, 0.0)


def _soft_shrink(x: Any, t: float = 0.5) -> Any:
    return jnp.where(x > t, x - t, jnp.where(x < -t, x + t, 0.0 * x))


def _relu(x: Any, slope: float = 0.0, threshold: float = 0.0) -> Any:
    return jnp.where(x > threshold, x, slope * (x - threshold) if slope else 0.0)


def _cosine(x: Any) -> Any:
    return -jnp.sum(0.5 * _normalized(x, 2), -1)


def _normalized(x: Any, order: float) -> Any:
    if order == 2:
        return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), 1e-14))
    return x / jnp.maximum(jnp.sum(jnp.abs(x) ** order, -1, keepdims=True) ** (1 / order), 1e-7)


def _norm(order: float) -> Callable[[Any], Any]:
    return lambda x: jnp.linalg.norm(x, order, -1)


# The functions that JAX has by other names, or not at all.
OTHERS: dict[str, Any] = {
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "exact_gelu": lambda x: nn.gelu(x, approximate=False),
    "hard_shrink": _hard_shrink,
    "leaky_relu": lambda x: nn.leaky_relu(x, 0.2),
    "rsqrt": jax.lax.rsqrt,
    "soft_shrink": _soft_shrink,
    "softsign": nn.soft_sign,
    "stop_gradient": jax.lax.stop_gradient,
    "squareplus": nn.squareplus,
    "tanh_shrink": lambda x: x - jnp.tanh(x),
    "threshold": lambda x: jnp.where(x > 0.5, x, 7.0),
    "clip": lambda x: jnp.clip(x, -0.5, 2.0),
    "leaky_relu_to_6": lambda x: jnp.minimum(_relu(x, 0.1), 6.0),
    "relu_to_6": nn.relu6,
    "relu_from_1": lambda x: _relu(x, 0.0, 1.0),
    "root_of_maximum": lambda x: jnp.sqrt(jnp.maximum(x, 0.0)),
    "root_of_minimum": lambda x: jnp.sqrt(-jnp.minimum(x, 0.0)),
    "root_of_clip": lambda x: jnp.sqrt(jnp.clip(x, 0.0, 2.0)),
    "root_of_relu": lambda x: jnp.sqrt(nn.relu(x)),
    "root_of_relu6": lambda x: jnp.sqrt(nn.relu6(x)),
    "logarithm_of_maximum": lambda x: jnp.log(jnp.maximum(x, 0.0)),
    "logarithm_of_clip": lambda x: jnp.log(jnp.clip(x, 0.0, 2.0)),
    "inverse_of_maximum": lambda x: 1 / jnp.maximum(x, 0.0),
    **{f"power_{n}": lambda x, n=n: x**n for n in (0, 1, 2, 3, -1)},
    **{f"power_{n}": lambda x, n=n: jnp.power(x, n) for n in (0.5, 1.5)},
    "polynomial": lambda x: 1 + x + x**2 + x**3,
    "divide_no_nan": lambda a, b: jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b)),
    "where": lambda a, b: jnp.where(a > b, a, b),
    "clip_from": lambda a, b: jnp.clip(a, b, 1.0),
    "clip_to": lambda a, b: jnp.clip(a, -1.0, b),
    **{name: lambda x, name=name: getattr(nn, name)(x, -1) for name in ("softmax", "log_softmax", "glu")},
    "logsumexp": lambda x: nn.logsumexp(x, -1),
    **{name: lambda x, name=name: getattr(jnp, name)(x, -1) for name in ("max", "min", "sum", "mean", "prod")},
    **{name: lambda x, name=name: getattr(jnp, name)(x, -1) for name in ("cumprod", "cumsum", "var", "std")},
    "norm": lambda x: jnp.sqrt(jnp.sum(x * x, -1)),
    **{f"norm_{order}": _norm(order) for order in (1, 2, 3, 0.5, np.inf, -np.inf)},
    "normalize": lambda x: _normalized(x, 2),
    "normalize_3": lambda x: _normalized(x, 3),
    "cosine": _cosine,
}


def of_jax(name: str) -> Callable[..., Any] | None:
    """Return JAX' function, or None."""
    return OTHERS.get(name) or getattr(jnp, name, None) or getattr(nn, name, None)


class Difference(NamedTuple):
    """Where results differ on purpose: `where` takes ours, JAX' and the inputs, and returns a mask."""

    names: str
    where: Callable[..., Any]
    reason: str


def _is_zero(ours: Any, theirs: Any, x: Any) -> Any:
    return x == 0


def _are_equal(ours: Any, theirs: Any, a: Any, b: Any) -> Any:
    return a == b


def _is_nan_in_jax(ours: Any, theirs: Any, *inputs: Any) -> Any:
    return np.isnan(theirs) & (ours == 0)


def _beside_zeros(ours: Any, theirs: Any, rows: Any) -> Any:
    return ((rows == 0).all(-1, keepdims=True) | (rows == 0)) & (ours == 0)


def _at(*bounds: float) -> Callable[..., Any]:
    return lambda ours, theirs, x: np.isin(x, bounds)


DIFFERENT = [
    Difference("d absolute / d x, d fabs / d x", _is_zero, "0, between -1 and 1: as in PyTorch and TensorFlow"),
    Difference("d norm_1 / d rows, d norm_-inf / d rows", _beside_zeros, "that of |x|, which is 0 at 0"),
    Difference("d norm_inf / d rows", _beside_zeros, "that of |x|, which is 0 at 0"),
    Difference("d hard_tanh / d x, d sparse_sigmoid / d x", _at(-1, 1), "a hard activation's at its bounds is 0"),
    Difference("d leaky_relu_to_6 / d x", _at(6, -np.inf), "a hard activation's at its bounds is 0"),
    Difference("d leaky_relu / d x", _is_zero, "the slope below 0, as in PyTorch"),
    Difference("d clip / d x", _at(-0.5, 2), "1 at the bounds, as in PyTorch"),
    Difference("d root_of_clip / d x, d logarithm_of_clip / d x", _at(2), "1 at the bounds, as in PyTorch"),
    Difference("d clip_from / d a, d clip_from / d b", lambda y, z, a, b: (a == b) | (a == 1) | (b == 1), "as of clip"),
    Difference("d clip_to / d a, d clip_to / d b", lambda y, z, a, b: (a == b) | (a == -1) | (b == -1), "as of clip"),
    Difference("d angle / d x", _is_zero, "it is constant on each side"),
    Difference("d rsqrt / d x, d root_of_minimum / d x", _is_zero, "the sign of an infinite gradient at -0"),
    Difference("d sinc / d x", lambda y, z, x: abs(x) < 1e-4, "a series, where JAX loses digits"),
    Difference("d root_of_maximum / d x, d root_of_minimum / d x", _is_nan_in_jax, "selected, not infinity times 0"),
    Difference("d root_of_clip / d x, d logarithm_of_clip / d x", _is_nan_in_jax, "selected, not infinity times 0"),
    Difference("d logarithm_of_maximum / d x, d inverse_of_maximum / d x", _is_nan_in_jax, "selected, as above"),
    Difference("d arctan2 / d a, d arctan2 / d b", _is_nan_in_jax, "0 at the origin and at infinity"),
    Difference("d hypot / d a, d hypot / d b", _is_nan_in_jax, "0 beside infinity"),
    Difference("d hypot / d a, d hypot / d b", lambda y, z, a, b: (a == 0) & (b == 0), "0 at the origin, as of norms"),
    Difference("d fmax / d a, d fmax / d b, d fmin / d a, d fmin / d b", _are_equal, "shared, as of maximum"),
    Difference(
        "d logaddexp / d a, d logaddexp / d b, d logaddexp2 / d a, d logaddexp2 / d b",
        lambda y, z, a, b: np.maximum(abs(a), abs(b)) >= 1e30,
        "shares that add up to 1",
    ),
    Difference("d power / d a", lambda y, z, a, b: b == 0, "0, of a constant"),
    Difference("d power / d b", lambda y, z, a, b: (a <= 0) & (y == 0), "0 where no logarithm is: as in TensorFlow"),
    Difference("d logsumexp / d rows, d std / d rows, d norm / d rows", _is_nan_in_jax, "0 of equal elements"),
    Difference("d norm_2 / d rows, d norm_3 / d rows", _is_nan_in_jax, "0 of zeros, as in PyTorch"),
    Difference("d norm_0.5 / d rows", _beside_zeros, "that of |x|, which is 0 at 0"),
    Difference("d normalize_3 / d rows", lambda y, z, x: (x == 0).all(-1, keepdims=True), "x / epsilon's, not NaN"),
]
# JAX has no gradient of nextafter, and no sparsemax.
WITHOUT = {"nextafter", "sparsemax"}
TABLES = [(points.UNARY, ("x",)), (points.BINARY, ("a", "b")), (points.OF_ROWS, ("rows",))]


class Compared(NamedTuple):
    """A result beside JAX': where they differ, and where on purpose by entry of `DIFFERENT`."""

    name: str
    inputs: list[np.ndarray]
    actual: np.ndarray
    expected: np.ndarray
    differs: np.ndarray
    on_purpose: dict[int, np.ndarray]


@functools.cache
def compared(name: str, functions: int) -> list[Compared]:
    """Return a function's results, the value and the gradients."""
    keys, function = TABLES[functions][1], of_jax(name)
    assert function is not None, f"JAX has no {name}"
    inputs = [points.operands("float64")[key] for key in keys]
    if keys == ("x",):
        inputs = [inputs[0][: len(points.POINTS)]]  # JAX takes denormal numbers for 0
    value, pull = jax.vjp(function, *map(jnp.asarray, inputs))
    theirs = {name: np.asarray(value)}
    if value.dtype.kind == "f":
        slopes = zip(keys, pull(jnp.ones_like(value)), strict=True)
        theirs |= {f"d {name} / d {key}": np.asarray(slope) for key, slope in slopes}
    return [_compared(key, name, inputs, expected, theirs[name]) for key, expected in theirs.items()]


def _compared(key: str, name: str, inputs: list[np.ndarray], expected: np.ndarray, value: np.ndarray) -> Compared:
    actual = points.eagerly("float64").get(key)
    actual = np.zeros_like(expected) if actual is None else actual[: len(expected)]  # it has no gradient
    differs = points.apart(actual, expected, 1e-9, 1e-13)
    if key != name:  # where a result is NaN, so may be its gradient
        is_nan = functools.reduce(np.logical_or, map(np.isnan, inputs))
        is_nan = is_nan.any(-1, keepdims=True) if is_nan.ndim > 1 else is_nan
        result_is_nan = np.isnan(value.astype(np.float64))
        if differs.ndim > 1:
            result_is_nan = result_is_nan.any(-1, keepdims=True) if value.ndim > 1 else result_is_nan[:, None]
        differs &= ~(is_nan | result_is_nan)
    masks = {
        n: np.broadcast_to(entry.where(actual, expected, *inputs), differs.shape) & differs
        for n, entry in enumerate(DIFFERENT)
        if key in entry.names.split(", ")
    }
    return Compared(key, inputs, actual, expected, differs, masks)


NAMES = [(name, n) for n, (table, _) in enumerate(TABLES) for name in table if name not in WITHOUT]


@pytest.mark.parametrize(("name", "functions"), sample(NAMES, 5))
def test_values_and_gradients_are_those_of_jax(name, functions):
    for result in compared(name, functions):
        wrong = result.differs & ~functools.reduce(np.logical_or, result.on_purpose.values(), result.differs & False)
        for at in map(tuple, np.argwhere(wrong)[:1]):
            inputs = [array[at[:1]] for array in result.inputs]
            pytest.fail(f"{result.name} at {inputs}: {result.actual[at]}, of JAX {result.expected[at]}")


def _second(x: Any) -> dict[str, Any]:
    """Return the second derivatives of the functions that have any."""
    results = {}
    for name, function in points.UNARY.items():
        output = function(x)
        slope = gradients(ops.sum(output), [x])[0] if output.dtype.kind == "f" else None
        curvature = None if slope is None else gradients(ops.sum(slope), [x])[0]
        if curvature is not None:
            results[name] = curvature
    return results


# Those that differ from JAX': selected, as above; infinite; at a corner; where JAX loses digits.
OTHER_SECOND = {"arctanh", "cbrt", "sinc", "softsign", "root_of_clip", "logarithm_of_clip", "inverse_of_maximum"}
OTHER_SECOND |= {"root_of_maximum", "root_of_minimum", "logarithm_of_maximum"}


@pytest.mark.long
def test_second_derivatives_are_those_of_jax():
    x = points.POINTS
    ours, _ = evaluate(trace(_second, {"x": (x.shape, "float64")}), {"x": x})
    different = set()
    for name, actual in ours.items():
        function: Any = of_jax(name)

        def slope(x: Any, function: Any = function) -> Any:
            value, pull = jax.vjp(function, x)
            return pull(jnp.ones_like(value))[0]

        expected = np.asarray(jax.vjp(slope, jnp.asarray(x))[1](jnp.ones_like(x))[0])
        is_nan = np.isnan(points.eagerly("float64")[name][: len(x)])
        if (points.apart(actual, expected, 1e-8, 1e-12) & ~is_nan).any():
            different.add(name)
    assert different == OTHER_SECOND


@pytest.mark.long
def test_no_difference_is_listed_that_is_none():
    results = [result for name, functions in NAMES for result in compared(name, functions)]
    seen = {n for result in results for n, mask in result.on_purpose.items() if mask.any()}
    assert [entry for n, entry in enumerate(DIFFERENT) if n not in seen] == []
