"""Functions of single elements that have no gradient: rounding, and tests for what is no number."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.ops.sharing import boolean, broadcast_shape, elementwise, floating_dtype
from dptrain.program.tensor import Array, Op, op


def _flat(name: str, function: Callable[..., Any], c: str, dtype: Any = floating_dtype) -> Op:
    """Return an op that is NumPy's function; its gradient is 0."""

    def compute(x: Array, *, out: Array) -> None:
        function(x, out=out)

    compute.__name__, compute.__doc__ = name, f"numpy.{function.__name__}."
    made = op(shape=broadcast_shape, sharing=elementwise, dtype=dtype, c=c)(compute)
    made.gradient(lambda y, dy, x: None)
    return made


ceil = _flat("ceil", np.ceil, "ceil({0})")
floor = _flat("floor", np.floor, "floor({0})")
rint = _flat("rint", np.rint, "rint({0})")
isfinite = _flat("isfinite", np.isfinite, "{0} - {0} == 0", boolean)
isinf = _flat("isinf", np.isinf, "{0} == {0} && {0} - {0} != 0", boolean)
isnan = _flat("isnan", np.isnan, "{0} != {0}", boolean)
