"""Traces of a model's steps, invalidated by changes of plain attributes that they read."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from dptrain.program.tensor import is_tracing
from dptrain.registry.reads import Reads, noting
from dptrain.runtime.failure import warn
from dptrain.runtime.text import short

# Traces kept for a step, and changes of an attribute before a warning about their cost.
_KEPT, _COSTLY = 8, 3


class Traces:
    """Numbers the traces of a step by the values of the attributes that it read."""

    def __init__(self) -> None:
        self._of_step: dict[str, list[tuple[int, Reads]]] = {}
        self._count = 0
        self._changes: Counter[tuple[int, str]] = Counter()

    def of(self, step: str) -> tuple[int, Reads]:
        """Return the number of the valid trace and its reads, or those of a new trace to be made."""
        traces = self._of_step.setdefault(step, [])
        change = None
        for number, reads in reversed(traces):
            changed = reads.changed()
            if changed is None:
                return number, reads
            change = change or changed
        if change is not None:
            self._say(*change)
        self._count += 1
        traces.append((self._count, Reads()))
        del traces[:-_KEPT]
        return traces[-1]

    def _say(self, owner: Any, name: str, before: Any, now: Any) -> None:
        self._changes[id(owner), name] += 1
        if self._changes[id(owner), name] == _COSTLY:
            label = getattr(owner, "_display_name", None) or getattr(owner, "name", None)
            whose = type(owner).__name__ + (f" {label!r}" if label else "")
            warn(
                f"{name!r} of {whose} has changed {_COSTLY} times, last from {short(before)} to {short(now)}, and "
                "each time the steps that read it are traced and compiled again. A variable changes at no cost: make "
                "it a "
                "`dptrain.Variable(..., trainable=False)`, or a weight of `add_weight(trainable=False)`, and `assign` "
                "to it"
            )


def noted(function: Callable[..., Any], reads: Reads) -> Callable[..., Any]:
    """Return a function that records its reads while it is traced."""

    def noting_reads(*arguments: Any) -> Any:
        if not is_tracing():
            return function(*arguments)
        with noting(reads):
            return function(*arguments)

    return noting_reads
