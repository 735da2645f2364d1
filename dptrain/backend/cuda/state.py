"""The values of variables in a GPU's memory."""

from collections.abc import Callable, Iterable

import numpy as np

from dptrain.backend.cuda.compose import ALIGNMENT
from dptrain.backend.cuda.memory import DeviceArray, DeviceMemory, Heap
from dptrain.backend.transfers import HostArray
from dptrain.program.tensor import Variable


class DeviceState:
    """The memory of variables, which executables read and write in place; a `Storage`."""

    def __init__(
        self, heap: Heap, download: Callable[[DeviceArray], HostArray], write: Callable[[DeviceArray, HostArray], None]
    ) -> None:
        self._heap, self._download, self._write = heap, download, write
        self._arrays: dict[Variable, DeviceArray] = {}

    def adopt(self, variables: Iterable[Variable]) -> None:
        """Move variables here, new ones into one allocation; the others stay."""
        new = [variable for variable in dict.fromkeys(variables) if variable.storage is not self]
        if not new:
            return
        values = [np.asarray(variable.numpy(), order="C") for variable in new]
        ends = np.cumsum([-(-max(variable.nbytes, 1) // ALIGNMENT) * ALIGNMENT for variable in values]).tolist()
        memory = DeviceMemory(self._heap, ends[-1], "variables")
        flat = np.zeros(ends[-1], np.uint8)
        for variable, value, start in zip(new, values, [0, *ends[:-1]], strict=True):
            flat[start : start + value.nbytes] = value.reshape(-1).view(np.uint8)
            self._arrays[variable] = DeviceArray(memory, memory.pointer + start, value.shape, value.dtype)
        self._write(DeviceArray(memory, memory.pointer, flat.shape, flat.dtype), flat)
        for variable in new:
            variable._move(self)

    def release(self, variables: Iterable[Variable]) -> None:
        """Forget variables; an allocation is freed with the last variable in it."""
        for variable in variables:
            self._arrays.pop(variable, None)

    def array(self, variable: Variable) -> DeviceArray:
        """Return a variable's memory."""
        return self._arrays[variable]

    def read(self, variable: Variable) -> HostArray:
        """Return a copy of a variable's value."""
        return self._download(self._arrays[variable])

    def write(self, variable: Variable, value: HostArray) -> None:
        """Replace a variable's value."""
        self._write(self._arrays[variable], value)
