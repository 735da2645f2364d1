"""Functions that NumPy has: its values for all options together, of corners, outside a step and in a traced one."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.execute import evaluate
from dptrain.program.program import trace

RNG = np.random.default_rng(0)
# Zeros, ties, both signs, and a row of zeros alone.
X = np.where(RNG.random((2, 3, 4)) < 0.3, 0.0, RNG.integers(-3, 4, (2, 3, 4)) / 2)
X[1, 1] = 0
WITH_NAN = np.where(RNG.random(X.shape) < 0.3, np.nan, X)
WITH_NAN[0, 0, 0] = 1
AXES = (0, 1, 2, -1, -2, -3)
SOME_AXES = (*AXES, None, (0, 2), (-1, 0))
# The lengths of an axis that index types just hold, with both signs.
LENGTHS = {"int8": 200, "uint8": 200, "int16": 40_000, "uint16": 40_000, "int32": 5, "int64": 5}


@dataclass(frozen=True)
class Function:
    """A function of NumPy's name.

    Attributes:
        arrays: its arguments, unknown in a step.
        options: values of each further argument.
        numpy: NumPy's, by default of this name; without `where`, no warning is an error.
        allowed: whether options go together.
    """

    arrays: Sequence[Any] = (X,)
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    numpy: Callable[..., Any] | None = None
    allowed: Callable[..., bool] = lambda **_: True

    def together(self) -> list[dict[str, Any]]:
        """Return all combinations of the options."""
        drawn = (dict(zip(self.options, each, strict=True)) for each in itertools.product(*self.options.values()))
        return [options for options in drawn if self.allowed(**options)]


def places(dtype: str) -> np.ndarray:
    """Return the least and greatest indices that a type holds of an axis, and some between."""
    length, kind = LENGTHS[dtype], np.iinfo(dtype)
    ends = [0, 1, min(kind.max, length - 1), *([-1, -2, max(kind.min, -length)] if kind.min else [])]
    return np.array(ends, dtype)


def indexing(dtype: str) -> dict[str, Function]:
    table = RNG.normal(size=(2, LENGTHS[dtype]))
    indices = places(dtype)
    return {
        f"take by {dtype}": Function((table, indices), {"axis": (1, -1)}),
        f"take by {dtype} along the first": Function((table.T.copy(), indices), {"axis": (0, -2)}),
        f"take_along_axis by {dtype}": Function((table, np.stack([indices, indices[::-1]])), {"axis": (1, -1)}),
    }


def _keeping(name: str, arrays: Sequence[Any] = (X,), **options: Sequence[Any]) -> dict[str, Function]:
    return {name: Function(arrays, {"axis": SOME_AXES, "keepdims": (False, True), **options})}


REDUCED = ("sum", "prod", "mean", "var", "std", "max", "min", "any", "all", "ptp")
FUNCTIONS: dict[str, Function] = {
    "norm": Function(
        options={
            "ord": (None, 0, 0.5, 1, 2, 3, 2.5, -0.5, -1, -2, np.inf, -np.inf),
            "axis": AXES,
            "keepdims": (False, True),
        },
        numpy=np.linalg.norm,
    ),
    "linspace": Function(
        (X[0], X[1]),
        {"num": (1, 2, 5), "endpoint": (True, False), "axis": AXES},
        partial(np.linspace, dtype=np.float64),
    ),
    "logspace": Function((X[0], X[1]), {"num": (1, 4), "endpoint": (True, False), "base": (2.0, 10.0), "axis": AXES}),
    **{key: value for name in REDUCED if hasattr(ops, name) for key, value in _keeping(name).items()},
    **{
        name: function
        for name in ("nansum", "nanprod", "nanmean", "nanvar", "nanstd", "nanmax", "nanmin")
        for name, function in _keeping(name, (WITH_NAN,)).items()
    },
    **_keeping("median"),
    **{name: Function(options={"axis": (None, *AXES), "keepdims": (False, True)}) for name in ("argmax", "argmin")},
    **{name: Function(options={"axis": (None, *AXES)}) for name in ("cumsum", "cumprod", "flip")},
    **{
        name: Function((WITH_NAN,), {"axis": (None, *AXES)})
        for name in ("nancumsum", "nancumprod")
        if hasattr(ops, name)
    },
    "sort": Function(options={"axis": AXES}),
    "argsort": Function(options={"axis": AXES}, numpy=partial(np.argsort, kind="stable")),
    "diff": Function(options={"n": (1, 2), "axis": (1, 2, -1, -2)}),
    "roll": Function(options={"shift": (-5, -1, 0, 2, 4), "axis": (None, *AXES)}),
    "repeat": Function(options={"repeats": (0, 1, 3), "axis": (None, *AXES)}),
    "diagonal": Function(options={"offset": (-2, -1, 0, 1, 2), "axis1": (0, 1, -3), "axis2": (2, -1)}),
    "trace": Function(options={"offset": (-2, -1, 0, 1, 2), "axis1": (0, 1, -3), "axis2": (2, -1)}),
    **{name: Function(options={"k": (-3, -1, 0, 1, 4)}) for name in ("tril", "triu")},
    "rot90": Function(
        options={"k": (-3, 0, 1, 2, 5), "axes": ((0, 1), (2, 0), (-1, -2))},
    ),
    "moveaxis": Function(options={"source": AXES, "destination": AXES}),
    "swapaxes": Function(options={"axis1": AXES, "axis2": AXES}),
    "expand_dims": Function(options={"axis": (0, 2, 3, -1, -4, (0, 2))}),
    "quantile": Function(
        options={
            "q": (0.0, 0.3, 1.0, (0.2, 0.9)),
            "axis": (None, *AXES),
            "method": ("linear", "lower", "higher", "nearest", "midpoint"),
            "keepdims": (False, True),
        },
    ),
    "tensordot": Function((X, X[:, :, :]), {"axes": (0, 3, ((0, 1), (0, 1)), ((2,), (-1,)))}),
    **{key: value for dtype in LENGTHS for key, value in indexing(dtype).items()},
}


def compared(actual: Any, expected: Any, options: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, options
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-12, err_msg=str(options))


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:Mean of empty", "ignore:Degrees")
@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_of_all_options_together(name):
    function, word = FUNCTIONS[name], name.partition(" ")[0]
    call, reference = getattr(ops, word), function.numpy or getattr(np, word)
    cases = function.together()
    expected = [reference(*function.arrays, **options) for options in cases]
    with np.errstate(all="ignore"):
        for options, value in zip(cases, expected, strict=True):
            compared(call(*function.arrays, **options), value, options)
        program = trace(
            lambda *arrays: {str(number): call(*arrays, **options) for number, options in enumerate(cases)},
            {f"input {number}": (array.shape, array.dtype) for number, array in enumerate(function.arrays)},
        )
        outputs, _ = evaluate(program, {f"input {n}": array for n, array in enumerate(function.arrays)})
    for number, (options, value) in enumerate(zip(cases, expected, strict=True)):
        compared(outputs[str(number)], value, options)
