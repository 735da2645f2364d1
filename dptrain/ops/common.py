"""Sharding rules, shapes and types shared by several families of ops."""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dptrain.program.operand import METHODS
from dptrain.program.shapes import Shape, broadcast, is_one
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import OPS, DType, Tensor
from dptrain.program.types import promoted_as_keras
from dptrain.runtime.floatx import floatx
from dptrain.runtime.types import is_floating


def elementwise(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """Sharding rule of broadcast operands: `ab,1b,b->ab`; without operands `->ab`."""
    result = names(len(out))
    operands = []
    for shape in shapes:
        extra = len(out) - len(shape)
        repeated = [is_one(n) and not is_one(out[extra + axis]) for axis, n in enumerate(shape)]
        operands.append(
            "".join("1" if is_repeated else result[extra + axis] for axis, is_repeated in enumerate(repeated))
        )
    return f"{','.join(operands)}->{result}"


def limits(dtype: DType) -> Any:
    """Return the limits (`eps`, `max`, `min`) of a floating-point type, bfloat16 included."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def broadcast_shape(*shapes: Shape, **attributes: Any) -> Shape:
    """The broadcast shape of the inputs."""
    return broadcast(*shapes)


def common_dtype(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """The promoted type of the inputs; integers adopt a floating-point type as it is, as in Keras."""
    return dtypes[0] if len(dtypes) == 1 else promoted_as_keras(*dtypes)


def floating_dtype(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """Like `common_dtype`, but integers become float32, as in Keras."""
    common = dtypes[0] if len(dtypes) == 1 else promoted_as_keras(*dtypes)
    return common if is_floating(common) else floatx()


def numeric_dtype(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """Like `common_dtype`, but booleans become int32, as in Keras."""
    common = promoted_as_keras(*dtypes)
    return np.int32 if common.kind == "b" else common


def boolean(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """Booleans."""
    return np.bool_


def first_dtype(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """The first input's type."""
    return dtypes[0]


def unbroadcast(dy: Tensor, x: Tensor) -> Tensor:
    """Sum the gradient of a broadcast input over the broadcast axes."""
    extra = len(dy.shape) - len(x.shape)
    spread = [
        axis + extra for axis, length in enumerate(x.shape) if is_one(length) and not is_one(dy.shape[axis + extra])
    ]
    axes = (*range(extra), *spread)
    if axes:
        dy = OPS["reduce_sum"](dy, axes=axes, keepdims=False)
        if spread:
            dy = OPS["reshape_to"](dy, shape=x.shape)
    return dy if dy.dtype == x.dtype else METHODS["cast"](dy, x.dtype)
