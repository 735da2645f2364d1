"""What has been measured of a training's steps, as a table and as a trace."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.program.explain import cut, table
from dptrain.program.schedule.clock import Clock, Span
from dptrain.program.schedule.description import KernelDescription

# The most kernels in the table, and the characters of one's ops and of its layers.
_SHOWN, _LABEL, _LAYERS = 25, 36, 22


@dataclass(frozen=True, eq=False)
class KernelTime:
    """A kernel's seconds in a step, on average, and how often a step executes it."""

    kernel: KernelDescription
    seconds: float
    times: float


@dataclass(frozen=True, eq=False)
class Profile:
    """Where the time of a rank's steps went.

    Attributes:
        seconds: of each step, from its begin to the end of its last kernel.
        kernels: those executed, the slowest first.
        layers: seconds a step by layer, the slowest first: a kernel's are divided by the operations of its layers.
        between: seconds a step in which no kernel, message or copy was executed.
    """

    seconds: Sequence[float]
    kernels: Sequence[KernelTime]
    layers: Mapping[str, float]
    between: float

    @property
    def mean(self) -> float:
        """Seconds of a step."""
        return statistics.fmean(self.seconds)

    def lines(self) -> list[str]:
        """Return the tables by kernel and by layer."""
        low, high = min(self.seconds) * 1e3, max(self.seconds) * 1e3
        lines = [f"{len(self.seconds)} steps of {self.mean * 1e3:.3f} ms ({low:.3f} to {high:.3f})", ""]
        rows: list[Sequence[str]] = [("kernel", "layers", "us", "share", "times", "GB/s", "Gop/s")]
        shown, others = self.kernels[:_SHOWN], self.kernels[_SHOWN:]
        for each in shown:
            kernel, seconds = each.kernel, each.seconds
            nbytes, operations = (each.times * n for n in (kernel.read + kernel.written, kernel.operations))
            rates = [f"{n / seconds / 1e9:.1f}" if n and seconds else "" for n in (nbytes, operations)]
            label = _label(kernel, _LABEL)
            rows.append((label, cut(", ".join(kernel.layers), _LAYERS), *self._of(seconds), f"{each.times:g}", *rates))
        if others:
            seconds, times = sum(each.seconds for each in others), sum(each.times for each in others)
            rows.append((f"{len(others)} others", "", *self._of(seconds), f"{times:g}", "", ""))
        rows.append(("between these", "", *self._of(self.between), "", "", ""))
        lines += [*table(rows), ""]
        return lines + table([("layer", "us", "share"), *((name, *self._of(s)) for name, s in self.layers.items())])

    def _of(self, seconds: float) -> tuple[str, str]:
        return f"{seconds * 1e6:.1f}", f"{100 * seconds / self.mean:.1f} %" if self.mean else ""


def profile_of(clock: Clock) -> Profile:
    """Return the averages of the steps that a clock has measured, at least one."""
    steps = clock.measured
    nanoseconds, times, walls, busy = Counter[int](), Counter[int](), list[float](), 0
    for step in steps:
        begin = min((span.begin for span in step), default=0)
        walls.append((max((span.end for span in step), default=0) - begin) / 1e9)
        busy += _covered(step)
        for span in step:
            nanoseconds[span.kernel] += span.end - span.begin
            times[span.kernel] += 1
    scale = 1e-9 / len(steps)
    kernels = [
        KernelTime(clock.kernels[number], total * scale, times[number] / len(steps))
        for number, total in nanoseconds.most_common()
    ]
    layers: dict[str, float] = {}
    for each in kernels:
        weights = each.kernel.layers
        operations = sum(weights.values())
        for name, weight in weights.items():
            layers[name] = layers.get(name, 0.0) + each.seconds * (
                weight / operations if operations else 1 / len(weights)
            )
    return Profile(
        walls,
        kernels,
        dict(sorted(layers.items(), key=lambda pair: -pair[1])),
        max(sum(walls) / len(steps) - busy * scale, 0.0),
    )


def _label(kernel: KernelDescription, width: int) -> str:
    """Return what a kernel is and begins with."""
    text = f"{kernel.kind} {kernel.label}"
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _covered(spans: Sequence[Span]) -> int:
    """Return the time in which at least one of some executions ran."""
    total = end = 0
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(span.end - max(span.begin, end), 0)
        end = max(end, span.end)
    return total


def events_of(clock: Clock, rank: int, host: str, offset: int = 0) -> list[dict[str, Any]]:
    """Return a rank's measured steps as trace events; `offset`: ns by which its clock is ahead of rank 0's.

    Source: "Trace Event Format" of Chromium, which Perfetto reads.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} on {host}"}},
        *(
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}
            for number, name in enumerate(("kernels", "messages"))
        ),
    ]
    for number, step in enumerate(clock.measured, 1):
        for span in step:
            kernel = clock.kernels[span.kernel]
            events.append(
                {
                    "name": _label(kernel, 2 * _LABEL),
                    "cat": kernel.kind,
                    "ph": "X",
                    "ts": (span.begin - offset) / 1e3,
                    "dur": (span.end - span.begin) / 1e3,
                    "pid": rank,
                    "tid": int(kernel.kind == "message"),
                    "args": {
                        "step": number,
                        "layers": ", ".join(kernel.layers),
                        "ops": ", ".join(tensor.op.name for tensor in kernel.tensors if tensor.op is not None),
                        "bytes read": kernel.read,
                        "bytes written": kernel.written,
                        "operations": kernel.operations,
                    },
                }
            )
    return events
