"""An optimizer's state as Keras' list of variables.

Keras numbers them: 0 the iterations (integer), 1 the learning rate (absent where a schedule gives it), then the slots
in the order in which they were made, which is `Optimizer.variables`. An optimizer that has made no update is written
with the first two alone. A `MultiOptimizer` has both, and then the variables of each of its optimizers.

Source: `build` of the optimizers in keras/src/optimizers, Keras 3.15.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import DataError
from dptrain.optimizers import LossScaleOptimizer, MultiOptimizer, Optimizer
from dptrain.program.tensor import Variable
from dptrain.registry.names import snake_case
from dptrain.saving.reading import Array, Stored


def arrays(optimizer: Optimizer, own: Sequence[Variable], dtype: str) -> list[Array]:
    """Return the state, the variables `own` of an optimizer, as Keras' variables, the learning rate in a dtype."""
    if isinstance(optimizer, LossScaleOptimizer):
        count, rate, *scale = [one.numpy() for one in optimizer._own_variables]
        inner = arrays(optimizer.inner_optimizer, own[len(optimizer._own_variables) :], dtype)
        return [count.astype(np.int32), rate.astype(dtype), *scale, *inner]
    return _arrays(optimizer, own, dtype, used=int(own[0]) > 0)


def _arrays(optimizer: Optimizer, own: Sequence[Variable], dtype: str, *, used: bool) -> list[Array]:
    count = own[0].numpy()
    result = [count.astype(np.int32 if count < 2**31 else np.int64)]
    if isinstance(optimizer, MultiOptimizer):
        inner = [_arrays(each, part, dtype, used=used) for each, part in _parts(optimizer, own)]
        return [*result, own[1].numpy().astype(dtype), *(array for each in inner for array in each)]
    rest = [one.numpy() for one in own[1:]] if used else [one.numpy() for one in own[1 : _scalars(optimizer)]]
    if not optimizer._follows_schedule:
        rest[0] = rest[0].astype(dtype)
    return result + rest


def _parts(optimizer: MultiOptimizer, own: Sequence[Variable]) -> list[tuple[Optimizer, list[Variable]]]:
    """Return the optimizers within another one, and which of its variables are theirs."""
    ids = [{id(one) for one in each.variables} for each in optimizer.optimizers]
    return [
        (each, [one for one in own if id(one) in known]) for each, known in zip(optimizer.optimizers, ids, strict=True)
    ]


def _scalars(optimizer: Optimizer) -> int:
    """Return how many variables an optimizer has before its first update."""
    if isinstance(optimizer, MultiOptimizer):
        return len(optimizer._own_variables) + sum(map(_scalars, optimizer.optimizers))
    return 1 if optimizer._follows_schedule else 2


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
        first = len(optimizer._own_variables)
        found, reason = read(where, optimizer.inner_optimizer, own[first:], stored[first:])
        scale = [one.read() for one in stored[2:first]]
        if reason or [np.shape(one) for one in scale] != [(), ()] or not 0 < float(scale[1]) < np.inf:
            return {}, reason or "Skipping variable loading for optimizer 'loss_scale_optimizer', which has no scale."
        return {
            **found,
            **{one: np.asarray(new).astype(one.dtype) for one, new in zip(own[2:first], scale, strict=True)},
        }, ""
    shapes, wanted = [one.shape for one in stored], [one.shape for one in own]
    if shapes == [()] * _scalars(optimizer) != wanted and int(stored[0].read()) == 0:
        return {}, ""  # it was never used, as it is here
    if shapes != wanted:
        if len(shapes) != len(wanted):
            reason = f"it has {len(wanted)} variables whereas the saved optimizer has {len(shapes)} variables."
        else:
            number = next(n for n, pair in enumerate(zip(shapes, wanted, strict=True)) if pair[0] != pair[1])
            reason = f"its variable {number} has shape {wanted[number]}, the saved optimizer's {shapes[number]}."
        name = snake_case(type(optimizer).__name__)
        return {}, f"Skipping variable loading for optimizer '{name}', because {reason}"
    if isinstance(optimizer, MultiOptimizer):
        at, count = dict(zip(own, stored, strict=True)), optimizer._own_variables[0]
        loaded = {count: _iterations(where, at[count].read()).astype(count.dtype)}
        for each, part in _parts(optimizer, own):
            loaded |= read(where, each, part, [at[one] for one in part])[0]
        return loaded, ""
    values: list[Any] = [one.read() for one in stored]
    if any(one.dtype.kind not in "iuf" for one in values):
        raise DataError(f"{where}: the optimizer's variables are no real numbers")
    _iterations(where, values[0])
    if not optimizer._follows_schedule:
        values[1] = np.float64(_rate(where, float(own[1]), values[1]))
    return {one: np.asarray(value).astype(one.dtype) for one, value in zip(own, values, strict=True)}, ""


def _iterations(where: str, stored: Array) -> Array:
    if stored.dtype.kind not in "iu" or not 0 <= int(stored) < 2**62:
        raise DataError(f"{where}: the optimizer's iterations are {stored!s}, expected a whole number from 0")
    return stored


def _rate(where: str, configured: float, stored: Array) -> float:
    """Return the stored learning rate; where it is the configured one rounded to the variable's dtype, that one."""
    rate = float(stored)
    if not 0 <= rate < np.inf:
        raise DataError(f"{where}: the optimizer's learning rate is {rate:g}, expected a number from 0")
    return configured if stored.dtype.type(configured) == stored else rate
