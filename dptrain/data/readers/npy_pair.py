"""A pair of `.npy` files as a data set: x mapped from the disk, so that it may exceed memory, and y."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.loading import LoadedData, with_task
from dptrain.data.raw import require_part
from dptrain.data.readers.npz import map_npy
from dptrain.data.sources import DEFAULT_MAX_BYTES, ArraySource, DataSources, check_declared
from dptrain.data.tasks import Task
from dptrain.errors import DataError
from dptrain.program.tensor import native

Array = npt.NDArray[Any]


class _MappedSource(ArraySource):
    def __init__(self, where: str, array: Array) -> None:
        super().__init__(where, array.shape, array.dtype)
        self._array = array

    def _read_rows(self, out: Array, start: int) -> None:
        out[...] = self._array[start : start + len(out)]


def read_targets(y_path: str, x_path: str, rows: int, max_bytes: int = DEFAULT_MAX_BYTES) -> Array:
    """Return the targets of an `.npy` file; integer labels (rows, 1) become (rows,)."""
    y = map_npy(Path(y_path))
    check_declared(y_path, y.shape, y.itemsize, max_bytes)
    if rows != len(y):
        raise DataError(f"{x_path} has {rows} rows, {y_path} {len(y)}; expected as many targets as samples")
    return native(np.array(y[:, 0] if y.shape[1:] == (1,) and y.dtype.kind in "iu" else y))


def load_pair(
    x_path: str,
    y_path: str,
    comm: Communicator,
    *,
    task: Task | None = None,
    test_split: float = 0.2,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> LoadedData:
    """Return a data set whose x stays on the disk; the last rows are the test part. Collective."""

    def opened() -> tuple[DataSources, list[Array], str]:
        x = map_npy(Path(x_path))
        y = read_targets(y_path, x_path, len(x), max_bytes)
        note = require_part(len(x), test_split, "an .npz file with x_train, y_train, x_test and y_test names others")
        at = len(x) - round(len(x) * test_split)
        if y.dtype.kind in "iu" and task in (None, "multiclass") and not np.isin(y[at:], y[:at]).all():
            raise DataError(
                f"{y_path}: the last {len(y) - at} rows have classes that no row before has; shuffle the rows"
            )
        arrays = [x[:at], y[:at], x[at:], y[at:]]
        sources = [_MappedSource(where, array) for where, array in zip((x_path, y_path) * 2, arrays, strict=True)]
        return DataSources(Path(x_path).stem, *sources), arrays, note.replace("samples", "samples, the last,", 1)

    sources, arrays, note = comm.agree("data", opened)
    comm.require_same(
        "the ranks see different data", {"arrays": [[list(array.shape), str(array.dtype)] for array in arrays]}
    )
    data = with_task(sources, arrays, comm, "global", task)
    return LoadedData(data.name, data.train, data.test, data.num_classes, data.task, notes=(*data.notes, note))
