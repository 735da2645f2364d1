"""An optimizer's state as Keras' list of variables.

Keras numbers them: 0 the iterations (integer), 1 the learning rate (absent where a schedule gives it), then the
slots. Slots that Keras makes together alternate parameter by parameter (Adam: momentum and velocity of the first
parameter, of the second, ...); slots that it makes one after another follow each other whole (RMSprop: all
velocities, then all momentums). An optimizer that has made no update has only the first two.

Source: `build` of the optimizers in keras/src/optimizers, Keras 3.15.
"""

from collections.abc import Sequence

import numpy as np

from dptrain.errors import DataError
from dptrain.optimizers import Optimizer
from dptrain.params import ParamLayout
from dptrain.saving.reading import Array
from dptrain.saving.snapshot import OptimizerState

# Slots that Keras makes by a call of their own, for any optimizer; the first two before an optimizer's own slots.
_FIRST = ("average", "gradient_accumulator")
_ALONE = ("velocity_hat",)
# Optimizers that make every slot by a call of its own.
_ONE_BY_ONE = ("RMSprop",)


def slot_groups(optimizer: Optimizer) -> list[tuple[str, ...]]:
    """Return the optimizer's slots in Keras' order; those of one tuple alternate."""
    slots = optimizer.all_slots
    if type(optimizer).__name__ in _ONE_BY_ONE:
        return [(slot,) for slot in slots]
    first = [(slot,) for slot in _FIRST if slot in slots]
    last = [(slot,) for slot in _ALONE if slot in slots]
    together = tuple(slot for slot in slots if (slot,) not in (*first, *last))
    return [group for group in (*first, together, *last) if group]


def shapes(optimizer: Optimizer, layout: ParamLayout) -> list[tuple[int, ...]]:
    """Return the shapes of Keras' variables of an optimizer that has made an update."""
    scalars: list[tuple[int, ...]] = [()] * (1 if optimizer.follows_schedule else 2)
    return scalars + [
        entry.shape for group in slot_groups(optimizer) for entry in layout.trained for _ in range(len(group))
    ]


def variables(optimizer: Optimizer, layout: ParamLayout, state: OptimizerState, dtype: str) -> list[Array]:
    """Return the state as Keras' variables: the slots where there are any, in `dtype`."""
    result = [np.array(state.iterations, np.int32 if state.iterations < 2**31 else np.int64)]
    if not optimizer.follows_schedule:
        result.append(np.array(optimizer.learning_rate, dtype))
    if state.iterations:
        result += [
            entry.view(state.slots[slot]).astype(dtype)
            for group in slot_groups(optimizer)
            for entry in layout.trained
            for slot in group
        ]
    return result


def state_of(where: str, optimizer: Optimizer, layout: ParamLayout, arrays: Sequence[Array]) -> OptimizerState:
    """Return the state that Keras' variables say.

    Args:
        where: the file, for messages.
        optimizer: whose they are.
        layout: of the model.
        arrays: of the shapes that `shapes` says.

    Raises:
        DataError: iterations or learning rate are out of range.
    """
    scalars = 1 if optimizer.follows_schedule else 2
    count = arrays[0]
    if count.dtype.kind not in "iu" or not 0 <= int(count) < 2**62:
        raise DataError(f"{where}: the optimizer's iterations are {count!s}, expected a whole number from 0")
    state = OptimizerState(int(count))
    if scalars == 2:
        state.learning_rate = _rate(where, optimizer.learning_rate, arrays[1])
    rest = iter(arrays[scalars:])
    state.slots = {slot: np.zeros(layout.size) for slot in optimizer.all_slots}
    for group in slot_groups(optimizer):
        for entry in layout.trained:
            for slot in group:
                entry.view(state.slots[slot])[...] = next(rest)
    return state


def _rate(where: str, configured: float, stored: Array) -> float:
    """Return the stored learning rate; where it is the configured one rounded to the variable's dtype, that one."""
    rate = float(stored)
    if not 0 < rate < np.inf:
        raise DataError(f"{where}: the optimizer's learning rate is {rate:g}, expected a number above 0")
    return configured if stored.dtype.type(configured) == stored else rate
