"""Packs: steps of several runs of the same program, executed together."""

import operator
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dptrain.backend.cuda.graphs import CudaGraph

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend
    from dptrain.backend.cuda.executable import CudaExecutable

# Start of each step's rows: (steps,) int64.
Starts = npt.NDArray[np.int64]
# A run's fields for kernels: (fields,) of eight bytes each.
Words = npt.NDArray[np.uint64]


class Packs:
    """Steps that wait on a GPU for other runs of the same program."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[tuple[CudaExecutable, Starts]]] = {}

    def add(self, executable: "CudaExecutable", starts: Starts) -> None:
        """Let steps of an executable with a pack key wait, at most until their backend gets another request."""
        executable.backend.launch_waiting()
        self._waiting.setdefault(executable.pack_key, []).append((executable, starts))
        executable.backend.postpone(lambda: self.launch(executable.pack_key))

    def launch(self, pack_key: Hashable) -> None:
        """Queue the waiting steps with this key, for all runs together."""
        # Those with the most steps come first: as runs end, those that go on are the table's first rows.
        pack = sorted(self._waiting.pop(pack_key, ()), key=lambda entry: -len(entry[1]))
        if pack:
            pack[0][0].execute(pack)


class RunTable:
    """The array of `Run`s that kernels read, and graphs that read it, shared by executables with equal keys."""

    def __init__(self, backend: "CudaBackend", fields: int) -> None:
        self._backend = backend
        self.rows = backend.empty((1, fields), np.uint64, "tables")
        self.graphs: dict[tuple[int, int, int, int], CudaGraph] = {}
        self._written: list[Words] = []

    def fill(self, rows: Sequence[Words]) -> None:
        """Write the rows of a pack's runs; if that takes new memory, drop the graphs."""
        if len(rows) <= len(self._written) and all(map(operator.is_, rows, self._written)):
            return
        if len(rows) > len(self.rows):
            while self.graphs:
                self.graphs.popitem()[1].close()
            self.rows = self._backend.empty((2 * len(rows), self.rows.shape[1]), np.uint64, "tables")
        self._backend.send(self.rows[: len(rows)], np.stack(rows))
        self._written = list(rows)
