"""Packs: what several runs ask for is executed together, where it is the same program."""

import operator
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dptrain.backend.cuda.graphs import CudaGraph

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend
    from dptrain.backend.cuda.executable import CudaExecutable

# Where the rows of each step begin: (steps,) int64.
Starts = npt.NDArray[np.int64]
# What kernels read of a run: (fields,) of eight bytes each.
Words = npt.NDArray[np.uint64]


class Packs:
    """What has been asked for on a GPU and waits for other runs that ask for the same."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[tuple[CudaExecutable, Starts]]] = {}

    def add(self, executable: "CudaExecutable", starts: Starts) -> None:
        """Let steps wait until their backend is asked for something else, at the latest.

        Args:
            executable: what is executed; one with a pack key.
            starts: of each step.
        """
        executable.backend.launch_waiting()
        self._waiting.setdefault(executable.pack_key, []).append((executable, starts))
        executable.backend.postpone(lambda: self.launch(executable.pack_key))

    def launch(self, pack_key: Hashable) -> None:
        """Queue what waits and is alike, for all runs together."""
        # Those with the most steps come first: as runs end, those that go on are the table's first rows.
        pack = sorted(self._waiting.pop(pack_key, ()), key=lambda entry: -len(entry[1]))
        if pack:
            pack[0][0].execute(pack)


class RunTable:
    """The array of `Run`s that kernels read, and graphs of launches that are given its address.

    Executables of a backend that are alike share one: a model's second training finds the graphs of its first.

    Args:
        backend: the device.
        fields: of a `Run`.

    Attributes:
        rows: the array on the device.
        graphs: what was recorded, by which launches and how many runs and steps.
    """

    def __init__(self, backend: "CudaBackend", fields: int) -> None:
        self._backend = backend
        self.rows = backend.empty((1, fields), np.uint64, "tables")
        self.graphs: dict[tuple[int, int, int, int], CudaGraph] = {}
        self._written: list[Words] = []

    def fill(self, rows: Sequence[Words]) -> None:
        """Write the rows of a pack's runs; if that takes other memory, the graphs go."""
        if len(rows) <= len(self._written) and all(map(operator.is_, rows, self._written)):
            return
        if len(rows) > len(self.rows):
            while self.graphs:
                self.graphs.popitem()[1].close()
            self.rows = self._backend.empty((2 * len(rows), self.rows.shape[1]), np.uint64, "tables")
        self._backend.send(self.rows[: len(rows)], np.stack(rows))
        self._written = list(rows)
