"""Measures how long the kernels of a step take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dptrain.program.schedule.description import KernelDescription

# Steps that are left out at first: they touch memory for the first time.
_WARM_UP = 2


class Span(NamedTuple):
    """An execution of a kernel, by its index, in ns of the host's monotonic clock."""

    kernel: int
    begin: int
    end: int


@dataclass(eq=False)
class Clock:
    """The executions of kernels in the first steps of a training.

    Attributes:
        wanted: so many steps, behind two of warm-up where there are enough.
        kernels: what is executed, in order; see `Span`.
        steps: the executions of each step.
    """

    wanted: int
    kernels: list[KernelDescription] = field(default_factory=list)
    steps: list[list[Span]] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether all steps that are wanted have been measured."""
        return len(self.steps) >= self.wanted + _WARM_UP

    def measures(self, kernels: Iterable[KernelDescription]) -> int:
        """Add the kernels of another executable; return the index of the first."""
        first = len(self.kernels)
        self.kernels += kernels
        return first

    def add(self, marks: Iterable[tuple[int, int]], first: int = 0) -> None:
        """Add steps from (kernel, time of its end); kernel -1 is the begin of a step. `first` as of `measures`."""
        time = 0
        for kernel, end in marks:
            if kernel < 0:
                self.steps.append([])
            else:
                self.steps[-1].append(Span(first + kernel, time, end))
            time = end

    def add_step(self, spans: Iterable[Span], first: int = 0) -> None:
        """Add a step whose executions may overlap."""
        self.steps.append([Span(first + span.kernel, span.begin, span.end) for span in spans])

    @property
    def measured(self) -> Sequence[Sequence[Span]]:
        """The steps that count."""
        enough = len(self.steps) > self.wanted
        return self.steps[min(_WARM_UP, len(self.steps) - self.wanted) if enough else 0 :][: self.wanted]
