"""Profiler: measures where the time of the first training steps goes."""

import json
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.ranks import on_rank_0, ranks_of, say
from dptrain.errors import ConfigError
from dptrain.program.schedule.clock import Clock
from dptrain.program.schedule.profile import events_of, profile_of
from dptrain.runtime.storage.files import output_error

_ADVICE = "choose another `path` of Profiler"
# Exchanges by which ranks on several nodes compare their clocks.
_ROUNDS = 9


class Profiler(Callback):
    """Measures each kernel of some steps: its ops, layers, time, bytes and operations, on every rank.

    Rank 0 prints a table, of its own kernels, the slowest first, and of layers; all ranks' executions are written as
    trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show. The first two steps are left out where the
    epoch has more. On a CPU the compiled program reads the clock behind each kernel; on a GPU steps run outside CUDA
    graphs, with events around each launch. Numbers that are computed are the same to the bit.

    Args:
        steps: so many, of the first epoch; fewer where it has fewer.
        path: of the trace, such as "run/trace.json"; None for none.

    Attributes:
        profile: what rank 0 has measured, once the steps have ended.

    Raises:
        ConfigError: `steps` is less than 1, or the model is compiled with `run_eagerly`, stages, or a fixed number of
            shards.
        OutputError: the trace cannot be written.
    """

    _same_on_all_ranks = ("steps",)

    def __init__(self, steps: int = 20, path: Any = "trace.json") -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"Profiler: steps = {steps!r}: expected an integer >= 1")
        self.steps, self.path = steps, None if path is None else Path(path)
        self.profile: Any = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin to measure. Collective."""
        self._clock: Clock | None = Clock(self.steps)
        self._trainer.programs.clock = self._clock

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Print and write what has been measured in the first epoch. Collective."""
        clock, self._clock, self._trainer.programs.clock = self._clock, None, None
        if clock is None or not clock.steps:  # an epoch of no steps
            return
        comm, host = ranks_of(self), socket.gethostname()
        offset = self._ahead() if comm.size > 1 and len(set(comm.allgather(host))) > 1 else 0
        mine = events_of(clock, comm.rank, host, offset)
        events = [mine] if comm.size == 1 else comm.allgather(mine)
        self.profile = profile_of(clock)
        of_rank = f"profile, rank 0 of {comm.size}: " if comm.size > 1 else "profile: "
        say(self, "\n" + of_rank + "\n".join(self.profile.lines()) + "\n")
        on_rank_0(self, "Profiler", lambda: self._write([event for of_rank in events for event in of_rank]))

    def _release(self) -> None:
        """Measure no later training, where this one has ended before its first epoch has."""
        if "_trainer" in vars(self):
            self._clock = self._trainer.programs.clock = None

    def _ahead(self) -> int:
        """Return by how many ns this rank's clock is ahead of rank 0's. Collective."""
        comm, differences = ranks_of(self), list[int]()
        for _ in range(_ROUNDS):
            comm.barrier()
            clocks = comm.allgather(time.monotonic_ns())
            differences.append(clocks[comm.rank] - clocks[0])
        return int(statistics.median(differences))

    def _write(self, events: list[dict[str, Any]]) -> None:
        if self.path is None:
            return
        try:
            self.path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise output_error(self.path, error, advice=_ADVICE) from error
        say(self, f"trace of {len(events):,} events: {self.path}")
