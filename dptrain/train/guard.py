"""Skips steps whose gradients are not finite, or far larger than before.

The step's program decides by the gradients summed over all ranks, so all ranks decide alike. A skipped step changes
nothing: weights, slots, statistics, metrics and counts of random draws stay as they were.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.tensor import Tensor, Variable, applied_gradients, is_tracing, update_if

# Steps before norms are judged, and the memory of their mean and variance: after so many steps a third remains.
_FIRST, _MEMORY = 20, 100


class StepGuard:
    """Wraps a training step so that it can be skipped.

    With `outliers`, a step is also skipped if the gradients' norm exceeds its running mean by so many standard
    deviations. Such a norm counts in the mean as the limit, so that gradients which stay larger are followed.
    """

    def __init__(self, outliers: float | None = None) -> None:
        self._outliers = outliers
        self.skipped = _variable("skipped", np.int64(0))
        self._count = _variable("count", np.int64(0))
        self._mean, self._variance = _variable("mean", np.float64(0)), _variable("variance", np.float64(0))

    @property
    def variables(self) -> list[Variable]:
        """The guard's state."""
        return [self.skipped, *([] if self._outliers is None else [self._count, self._mean, self._variance])]

    def reset(self) -> None:
        """Reset the state."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def wrap(self, function: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], Mapping[str, Any]]:
        """Return a step that changes nothing if its gradients fail the check."""

        def guarded(data: Any) -> Mapping[str, Any]:
            if not is_tracing():
                raise ConfigError("not supported: skipping steps with run_eagerly, which stops at the first NaN")
            logs = function(data)
            gradients = applied_gradients()
            if not gradients:
                raise ConfigError("not supported: skipping steps of a train_step that never calls an optimizer's apply")
            squares = [ops.sum(ops.square(ops.cast(grad, "float64"))) for grad in gradients]
            norm = ops.sqrt(sum(squares[1:], squares[0]))
            good, follow = self._judge(norm)
            update_if(good)
            self.skipped.assign_add(ops.cast(ops.logical_not(good), "int64"))
            follow()
            return logs

        return guarded

    def _judge(self, norm: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return whether a step counts, and the function that records its norm."""
        finite = ops.isfinite(norm)
        if self._outliers is None:
            return finite, lambda: None
        count, mean, variance = (variable.value for variable in (self._count, self._mean, self._variance))
        limit = ops.where(count < _FIRST, np.float64(np.inf), mean + self._outliers * ops.sqrt(variance))
        counted = ops.where(finite, ops.minimum(norm, limit), mean)
        share = 1.0 / ops.cast(ops.minimum(count + 1, _MEMORY), "float64")
        away = counted - mean

        def follow() -> None:
            self._count.assign(ops.where(finite, count + 1, count))
            self._mean.assign(ops.where(finite, mean + share * away, mean))
            self._variance.assign(ops.where(finite, (1 - share) * (variance + share * away * away), variance))

        return ops.logical_and(finite, norm <= limit), follow


def _variable(name: str, value: Any) -> Variable:
    variable = Variable(value, name, trainable=False)
    variable._path = f"step_guard/{name}"
    return variable
