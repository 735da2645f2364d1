"""An optimizer's state as Keras' list of variables.

Keras numbers them: 0 the iterations (integer), 1 the learning rate (absent where a schedule gives it), then the slots
in the order in which they were made, which is `Optimizer.variables`. An optimizer that has made no update is written
with the first two alone.

Source: `build` of the optimizers in keras/src/optimizers, Keras 3.15.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import DataError
from dptrain.optimizers import LossScaleOptimizer, Optimizer
from dptrain.program.tensor import Variable
from dptrain.registry.names import snake_case
from dptrain.saving.reading import Array, Stored


def arrays(optimizer: Optimizer, own: Sequence[Variable], dtype: str) -> list[Array]:
    """Return the state, the variables `own` of an optimizer, as Keras' variables, the learning rate in a dtype."""
    if isinstance(optimizer, LossScaleOptimizer):
        count, rate, *scale = [one.numpy() for one in optimizer.own_variables]
        inner = arrays(optimizer.inner_optimizer, own[len(optimizer.own_variables) :], dtype)
        return [count.astype(np.int32), rate.astype(dtype), *scale, *inner]
    count, *rest = [one.numpy() for one in own]
    result = [count.astype(np.int32 if count < 2**31 else np.int64)]
    if not optimizer.follows_schedule:
        result.append(rest.pop(0).astype(dtype))
    return result + rest if count else result


def read(
    where: str, optimizer: Optimizer, own: Sequence[Variable], stored: Sequence[Stored]
) -> tuple[dict[Variable, Array], str]:
    """Return new values of an optimizer that is built, and why there are none, if there should be.

    Args:
        where: the file, for messages.
        optimizer: whose they may be.
        own: its variables in Keras' order.
        stored: Keras' variables.

    Raises:
        DataError: iterations or learning rate are out of range.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        first = len(optimizer.own_variables)
        found, reason = read(where, optimizer.inner_optimizer, own[first:], stored[first:])
        scale = [one.read() for one in stored[2:first]]
        if reason or [np.shape(one) for one in scale] != [(), ()] or not 0 < float(scale[1]) < np.inf:
            return {}, reason or "Skipping variable loading for optimizer 'loss_scale_optimizer', which has no scale."
        return {
            **found,
            **{one: np.asarray(new).astype(one.dtype) for one, new in zip(own[2:first], scale, strict=True)},
        }, ""
    scalars = 1 if optimizer.follows_schedule else 2
    shapes, wanted = [one.shape for one in stored], [one.shape for one in own]
    if shapes == wanted[:scalars] != wanted and int(stored[0].read()) == 0:
        return {}, ""  # it was never used, as it is here
    if shapes != wanted:
        if len(shapes) != len(wanted):
            reason = f"it has {len(wanted)} variables whereas the saved optimizer has {len(shapes)} variables."
        else:
            number = next(n for n, pair in enumerate(zip(shapes, wanted, strict=True)) if pair[0] != pair[1])
            reason = f"its variable {number} has shape {wanted[number]}, the saved optimizer's {shapes[number]}."
        name = snake_case(type(optimizer).__name__)
        return {}, f"Skipping variable loading for optimizer '{name}', because {reason}"
    values: list[Any] = [one.read() for one in stored]
    if any(one.dtype.kind not in "iuf" for one in values):
        raise DataError(f"{where}: the optimizer's variables are no real numbers")
    if values[0].dtype.kind not in "iu" or not 0 <= int(values[0]) < 2**62:
        raise DataError(f"{where}: the optimizer's iterations are {values[0]!s}, expected a whole number from 0")
    if scalars == 2:
        values[1] = np.float64(_rate(where, float(own[1]), values[1]))
    return {one: np.asarray(value).astype(one.dtype) for one, value in zip(own, values, strict=True)}, ""


def _rate(where: str, configured: float, stored: Array) -> float:
    """Return the stored learning rate; where it is the configured one rounded to the variable's dtype, that one."""
    rate = float(stored)
    if not 0 < rate < np.inf:
        raise DataError(f"{where}: the optimizer's learning rate is {rate:g}, expected a number above 0")
    return configured if stored.dtype.type(configured) == stored else rate
