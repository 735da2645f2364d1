"""MonitorCallback: base of callbacks that watch a log."""

import operator
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from dptrain.callbacks.base import Callback, method_of
from dptrain.callbacks.models import metrics_of
from dptrain.callbacks.ranks import on_all, ranks_of
from dptrain.errors import ConfigError, DataError
from dptrain.metrics import Metric
from dptrain.runtime.failure import warn
from dptrain.runtime.text import short


class MonitorCallback(Callback):
    """Decides whether a value of the logs is better than another; an abstract class.

    Logs are global, so that all ranks decide alike; logs of the user's own are compared.

    Args:
        monitor: the log's key.
        mode: "min" or "max" for what is better, or "auto" to derive it from the metric.
        baseline: the best value before the first; None lets the first be the best.
        min_delta: smaller differences are no improvement.
    """

    def __init__(
        self, monitor: str = "val_loss", mode: str = "auto", baseline: float | None = None, min_delta: float = 0
    ) -> None:
        super().__init__()
        if mode not in ("auto", "min", "max"):
            warn(f"{type(self).__name__} mode '{mode}' is unknown, fallback to auto mode.")
            mode = "auto"
        self.monitor = monitor
        self.mode = mode
        self.best = baseline
        self.min_delta = abs(min_delta)
        self.monitor_op: Callable[[Any, Any], bool] | None = None

    def _find_direction(self) -> None:
        """Determine, once, whether less or more is better, or raise. Collective if all ranks have the callback."""
        if self.monitor_op is not None:
            return
        everywhere = self._same_on_all_ranks is not None
        direction = on_all(self, type(self).__name__, self._direction) if everywhere else self._direction()
        self.monitor_op = operator.gt if direction == "up" else operator.lt
        if direction == "down":
            self.min_delta *= -1

    def _is_improvement(self, value: float, reference: float | None) -> bool:
        """Return whether a value is better than another by at least `min_delta`; anything is better than None."""
        if reference is None:
            return True
        assert self.monitor_op is not None
        return self.monitor_op(value - self.min_delta, reference)

    def _agreed(self, value: Any) -> Any:
        """Return the monitored log if it is the same on all ranks, which must decide alike. Collective."""
        if self._same_on_all_ranks is not None and (comm := ranks_of(self)).size > 1:
            what = f"{type(self).__name__}(monitor={self.monitor!r})"
            # NaN is not equal to itself.
            shown = repr(value) if isinstance(value, Real) and value != value else value
            advice = "make it a metric, which covers all ranks, or compute it from the same data on each"
            comm.require_same("the ranks have different logs", {what: shown}, {what: advice})
        return value

    def _direction(self) -> str:
        """Return "up" or "down", or raise if unknown."""
        direction = {"min": "down", "max": "up"}.get(self.mode) or direction_of(self.monitor, self._metrics())
        if direction is None:
            raise ConfigError(
                f"{type(self).__name__} callback received monitor={self.monitor}, but Keras isn't able to "
                "automatically determine whether that metric should be maximized or minimized. Pass `mode='max'` in "
                "order to monitor based on the highest metric value, or pass `mode='min'` in order to use the lowest "
                "value."
            )
        return direction

    def _metrics(self) -> Mapping[str, Metric]:
        return metrics_of(self.model) if "_trainer" in vars(self) else {}


def take_numbers(callback: Callback, state: Mapping[str, Any]) -> None:
    """Restore the attributes of a callback's `state_dict`, and no others, from a checkpoint."""
    for name in method_of(callback, "state_dict")().keys() & state.keys():
        value = state[name]
        arrays = isinstance(value, list) and all(isinstance(element, np.ndarray) for element in value)
        if not (value is None or isinstance(value, Real) or arrays):
            raise DataError(f"{name} of {type(callback).__name__} is {short(value)}, expected a number")
        setattr(callback, name, value)


def direction_of(monitor: str, metrics: Mapping[str, Metric]) -> str | None:
    """Return whether better values of a log are "up" or "down"; None if unknown."""
    name = monitor.removeprefix("val_")
    by_name = "down" if name == "loss" or name.endswith("_loss") else None
    return metrics[name]._direction or by_name if name in metrics else by_name
