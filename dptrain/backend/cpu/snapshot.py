"""The state of a training in host memory: its digests and a copy."""
# ruff: noqa: D102 - each method is documented once, in backend/base.py

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.cpu.digest import Digests

Array = npt.NDArray[Any]


class HostSnapshot:
    """A `Snapshot` of arrays in host memory; `native` as for `Digests`."""

    def __init__(self, arrays: Sequence[Array], native: bool) -> None:
        self._arrays, self._digests = list(arrays), Digests(arrays, native)
        self._copies: list[Array] = []

    def digests(self) -> npt.NDArray[np.uint64]:
        return self._digests()

    def take(self) -> bool:
        if not self._copies:
            self._copies = [np.empty_like(array) for array in self._arrays]
        for copy, array in zip(self._copies, self._arrays, strict=True):
            np.copyto(copy, array)
        return True

    def restore(self) -> None:
        for copy, array in zip(self._copies, self._arrays, strict=True):
            np.copyto(array, copy)
