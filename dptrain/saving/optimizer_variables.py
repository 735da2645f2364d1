"""An optimizer's state as Keras' list of variables.

Keras numbers them: 0 the iterations (integer), 1 the learning rate (absent with a schedule), then the slots in the
order of their creation, `Optimizer.variables`. Before its first update an optimizer has only the first two. A
`MultiOptimizer` has both, and then the variables of each of its optimizers. Source: `build` of the optimizers in
keras/src/optimizers, Keras 3.15.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import DataError
from dptrain.optimizers import LossScaleOptimizer, MultiOptimizer, Optimizer
from dptrain.program.tensor import Variable
from dptrain.registry.names import snake_case
from dptrain.saving.reading import Array, Stored


def arrays(optimizer: Optimizer, variables: Sequence[Variable], dtype: str) -> list[Array]:
    """Return an optimizer's variables as Keras', with the learning rate in `dtype`."""
    if isinstance(optimizer, LossScaleOptimizer):
        count, rate, *scale = [variable.numpy() for variable in optimizer._own_variables]
        inner = arrays(optimizer.inner_optimizer, variables[len(optimizer._own_variables) :], dtype)
        return [count.astype(np.int32), rate.astype(dtype), *scale, *inner]
    return _arrays(optimizer, variables, dtype, used=int(variables[0]) > 0)


def _arrays(optimizer: Optimizer, variables: Sequence[Variable], dtype: str, *, used: bool) -> list[Array]:
    count = variables[0].numpy()
    result = [count.astype(np.int32 if count < 2**31 else np.int64)]
    if isinstance(optimizer, MultiOptimizer):
        inner = [_arrays(each, part, dtype, used=used) for each, part in _parts(optimizer, variables)]
        return [*result, variables[1].numpy().astype(dtype), *(array for each in inner for array in each)]
    rest = (
        [variable.numpy() for variable in variables[1:]]
        if used
        else [variable.numpy() for variable in variables[1 : _scalars(optimizer)]]
    )
    if not optimizer._follows_schedule:
        rest[0] = rest[0].astype(dtype)
    return result + rest


def _parts(optimizer: MultiOptimizer, variables: Sequence[Variable]) -> list[tuple[Optimizer, list[Variable]]]:
    ids = [{id(variable) for variable in each.variables} for each in optimizer.optimizers]
    return [
        (each, [variable for variable in variables if id(variable) in members])
        for each, members in zip(optimizer.optimizers, ids, strict=True)
    ]


def _scalars(optimizer: Optimizer) -> int:
    if isinstance(optimizer, MultiOptimizer):
        return len(optimizer._own_variables) + sum(map(_scalars, optimizer.optimizers))
    return 1 if optimizer._follows_schedule else 2


def read(
    where: str, optimizer: Optimizer, variables: Sequence[Variable], stored: Sequence[Stored]
) -> tuple[dict[Variable, Array], str]:
    """Return new values of a built optimizer's variables from Keras', and a reason where they do not fit."""
    if isinstance(optimizer, LossScaleOptimizer):
        first = len(optimizer._own_variables)
        inner, reason = read(where, optimizer.inner_optimizer, variables[first:], stored[first:])
        scale = [array.read() for array in stored[2:first]]
        if reason or [np.shape(array) for array in scale] != [(), ()] or not 0 < float(scale[1]) < np.inf:
            return {}, reason or "Skipping variable loading for optimizer 'loss_scale_optimizer', which has no scale."
        return {
            **inner,
            **{
                variable: np.asarray(new).astype(variable.dtype)
                for variable, new in zip(variables[2:first], scale, strict=True)
            },
        }, ""
    shapes, expected = [array.shape for array in stored], [variable.shape for variable in variables]
    if shapes == [()] * _scalars(optimizer) != expected and int(stored[0].read()) == 0:
        return {}, ""  # it was never used, as it is here
    if shapes != expected:
        if len(shapes) != len(expected):
            reason = f"it has {len(expected)} variables whereas the saved optimizer has {len(shapes)} variables."
        else:
            number = next(n for n, pair in enumerate(zip(shapes, expected, strict=True)) if pair[0] != pair[1])
            reason = f"its variable {number} has shape {expected[number]}, the saved optimizer's {shapes[number]}."
        name = snake_case(type(optimizer).__name__)
        return {}, f"Skipping variable loading for optimizer '{name}', because {reason}"
    if isinstance(optimizer, MultiOptimizer):
        at, count = dict(zip(variables, stored, strict=True)), optimizer._own_variables[0]
        loaded = {count: _iterations(where, at[count].read()).astype(count.dtype)}
        for each, part in _parts(optimizer, variables):
            loaded |= read(where, each, part, [at[variable] for variable in part])[0]
        return loaded, ""
    values: list[Any] = [array.read() for array in stored]
    if any(value.dtype.kind not in "iuf" for value in values):
        raise DataError(f"{where}: the optimizer's variables are not real numbers")
    _iterations(where, values[0])
    if not optimizer._follows_schedule:
        values[1] = np.float64(_rate(where, float(variables[1]), values[1]))
    return {
        variable: np.asarray(value).astype(variable.dtype) for variable, value in zip(variables, values, strict=True)
    }, ""


def _iterations(where: str, stored: Array) -> Array:
    if stored.dtype.kind not in "iu" or not 0 <= int(stored) < 2**62:
        raise DataError(f"{where}: the optimizer's iterations are {stored!s}, expected an integer >= 0")
    return stored


def _rate(where: str, configured: float, stored: Array) -> float:
    rate = float(stored)
    if not 0 <= rate < np.inf:
        raise DataError(f"{where}: the optimizer's learning rate is {rate:g}, expected a finite number >= 0")
    return configured if stored.dtype.type(configured) == stored else rate
