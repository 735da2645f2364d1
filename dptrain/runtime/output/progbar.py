"""Keras' `Progbar`."""

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import numpy as np

from dptrain.errors import ConfigError
from dptrain.runtime.output.terminal import is_interactive


class Progbar:
    """A progress line: steps, time, and means of values.

    Args:
        target: number of steps; None if unknown.
        width: of the bar, in characters.
        verbose: 0 silent, 1 a live line, 2 a line at the end.
        interval: minimum seconds between updates.
        stateful_metrics: names of values shown as they are, not averaged.
        stateless_metrics: names of the only values to average.
        unit_name: what a step is called.

    Raises:
        ConfigError: both kinds of names are given.
    """

    def __init__(
        self,
        target: int | None,
        width: int = 20,
        verbose: int = 1,
        interval: float = 0.05,
        stateful_metrics: Sequence[str] | None = None,
        stateless_metrics: Sequence[str] | None = None,
        unit_name: str = "step",
    ) -> None:
        if stateful_metrics is not None and stateless_metrics is not None:
            raise ConfigError("Only one of `stateful_metrics` or `stateless_metrics` can be provided.")
        self.target, self.width, self.verbose = target, width, verbose
        self.interval, self.unit_name = interval, unit_name
        self.stateful_metrics = None if stateless_metrics is not None else set(stateful_metrics or ())
        self.stateless_metrics = None if stateless_metrics is None else set(stateless_metrics)
        self._current, self._shown = 0, -1.0
        self._begin = time.monotonic()
        self._totals: dict[str, tuple[float, float]] = {}

    def update(
        self, current: int, values: Iterable[tuple[str, Any]] | None = None, finalize: bool | None = None
    ) -> None:
        """Show that `current` steps are done.

        Args:
            current: steps done.
            values: pairs (name, value of the steps since the last update); of an array, its mean.
            finalize: whether this is the last update, whose values are shown as they are; by default once the target is
                reached.
        """
        if finalize is None:
            finalize = self.target is not None and current >= self.target
        for name, value in values or ():
            is_mean = (
                name in self.stateless_metrics
                if self.stateless_metrics is not None
                else name not in (self.stateful_metrics or ())
            )
            number = float(np.mean(value))
            if is_mean and not finalize:  # the last update has the means of all steps, as in Keras
                steps = max(current - self._current, 1)
                total, count = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = total + number * steps, count + steps
            else:
                self._totals[name] = number, 1.0
        self._current = current
        now = time.monotonic()
        is_live = self.verbose == 1 and is_interactive() and _is_terminal(sys.stdout)
        if self.verbose == 0 or not (finalize or (is_live and now - self._shown >= self.interval)):
            return
        self._shown = now
        line = self._line(current, now - self._begin)
        sys.stdout.write(f"\r\x1b[K{line}" if is_live else line)
        sys.stdout.write("\n" if finalize else "")
        sys.stdout.flush()

    def add(self, n: int, values: Iterable[tuple[str, Any]] | None = None) -> None:
        """Show that n more steps are done, as `update`."""
        self.update(self._current + n, values)

    def _line(self, current: int, seconds: float) -> str:
        parts = [f"{current}/{self.target or 'Unknown'}"]
        if self.target and self.verbose == 1:
            filled = min(int(self.width * current / self.target), self.width)
            parts.append("━" * filled + "─" * (self.width - filled))
        parts.append(f"{seconds:.0f}s {1000 * seconds / max(current, 1):.0f}ms/{self.unit_name}")
        means = [f"{name}: {_short(total / max(count, 1))}" for name, (total, count) in self._totals.items()]
        return " ".join(parts) + "".join(f" - {mean}" for mean in means)


def _short(mean: float) -> str:
    return f"{mean:.4f}" if abs(mean) > 1e-3 else f"{mean:.4e}"


def _is_terminal(stream: TextIO) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())
