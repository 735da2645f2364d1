"""Loads a data set's rows: one copy a node, or 1/world of the rows a rank."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.comm.parts import cut
from dptrain.data.catalog import CATALOG, DEFAULT_MAX_BYTES, FetchedIdx, ensure_available, open_dataset
from dptrain.data.checks import check_finite, check_labels, check_labels_integer, is_zero_or_one
from dptrain.data.keras_sets import cached
from dptrain.data.readers.npz import KEYS
from dptrain.data.sources import ArraySource, DataSources
from dptrain.data.tasks import Task
from dptrain.registry.arguments import checked_arguments

if TYPE_CHECKING:  # with pydantic, which takes long to import
    from dptrain.data.preprocessing import Preprocessing

Array = npt.NDArray[Any]
_MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class Split:
    """The training or the test part of a data set on one rank; `Model.fit` and `evaluate` take it for x.

    Attributes:
        x: (rows, ...) features in their stored dtype; a `LazyArray` of pictures.
        y: (rows,) targets.
        rows: indices of the rows in use, in order (int64); None for all.
        total: rows over all ranks if each has its own; None if every rank has all.
    """

    x: Any
    y: Array
    rows: npt.NDArray[np.int64] | None = None
    total: int | None = None

    def __len__(self) -> int:
        if self.total is not None:
            return self.total
        return len(self.x) if self.rows is None else len(self.rows)

    def selected(self) -> "Split":
        """Return a split of only the rows in use."""
        return self if self.rows is None else Split(self.x[self.rows], self.y[self.rows])

    def first(self, rows: int) -> "Split":
        """Return the first rows, of all or of this rank."""
        return replace(self, x=self.x[:rows], y=self.y[:rows])


@dataclass(frozen=True)
class LoadedData:
    """A data set, in memory except for rows that are mapped or decoded on demand."""

    name: str
    train: Split
    test: Split
    num_classes: int  # highest label + 1; 0 for a regression
    task: Task = "multiclass"
    preprocessing: "Preprocessing | None" = None  # how raw data became x and y; None for arrays
    notes: tuple[str, ...] = ()  # decisions about the data, for people
    columns: int = 0  # columns of numbers in a stream's x, which a network standardizes; 0 for other data

    @property
    def outputs(self) -> int:
        """Number of a model's outputs a sample: one a class, one for two classes, one a target."""
        return {"multiclass": self.num_classes, "binary": 1, "regression": math.prod(self.train.y.shape[1:])}[self.task]


def load_dataset(
    name_or_path: str,
    comm: Communicator,
    *,
    data_dir: Path | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    sharding: str = "global",
    task: Task | None = None,
) -> LoadedData:
    """Load a data set on every rank. Collective.

    `sharding` "global" keeps one copy a node, "static" 1/world of the rows on each rank. By default integers are
    classes, other numbers regression targets, and numbers that are all 0 or 1 two classes.
    """
    comm.agree("data", lambda: ensure_available(name_or_path, data_dir=data_dir) if comm.local_rank == 0 else None)
    sources = comm.agree("data", lambda: open_dataset(name_or_path, data_dir=data_dir, max_bytes=max_bytes))
    headers = [[list(source.shape), str(source.dtype)] for source in _in_order(sources)]
    comm.require_same("the ranks see different data", dict(zip(KEYS, headers, strict=True)))
    return with_task(sources, [_read(source, comm, sharding) for source in _in_order(sources)], comm, sharding, task)


def with_task(
    sources: DataSources, arrays: list[Array], comm: Communicator, sharding: str, task: Task | None
) -> LoadedData:
    """Return a data set of arrays in memory after checking them for their task. Collective."""
    if task is None:
        task = _task_of(arrays, comm)
    highest = comm.agree("data", lambda: _check(sources, arrays, comm, sharding, task))
    # A label beyond that is damage (a bit of an int64), and a model with an output for each would not fit into memory.
    most_classes = max(_MOST_CLASSES, sources.y_train.shape[0])
    multiclass = min(1 + max(comm.allgather(highest)), most_classes)
    num_classes = {"multiclass": multiclass, "binary": 2, "regression": 0}[task]
    if num_classes:
        comm.agree("data", lambda: _check_label_range(sources, arrays, num_classes, comm, sharding))
    x_train, y_train, x_test, y_test = arrays
    if sharding == "global":
        train, test = Split(x_train, y_train), Split(x_test, y_test)
    else:
        train = Split(x_train, y_train, total=sources.x_train.shape[0])
        test = Split(x_test, y_test, total=sources.x_test.shape[0])
    note = f"{sources.y_train.where} are {y_train.dtype}: {task}; --task overrides it"
    notes = () if y_train.dtype.kind in "iu" else (note,)
    return LoadedData(sources.name, train, test, num_classes, task, notes=notes)


def load(name_or_path: str, *, data_dir: str | Path | None = None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return `(x_train, y_train), (x_test, y_test)` of a data set, as `keras.datasets.*.load_data`.

    Under mpirun it is collective, and the ranks of a node share one read-only copy of the arrays.

    Args:
        name_or_path: "strokes" (built in), "mnist", "fashion-mnist", a folder of the four IDX files, or an .npz file
            with x_train, y_train, x_test, y_test.
        data_dir: folder of a named set's files, if not in the cache.

    Returns:
        Features in their stored dtype (images: uint8, (rows, 28, 28)) and integer labels (rows,).

    Raises:
        AgreedError: the data set is missing or malformed on any rank.
    """
    from dptrain.comm import current

    data = load_dataset(name_or_path, current(), data_dir=None if data_dir is None else Path(data_dir))
    for array in (data.train.x, data.train.y, data.test.x, data.test.y):
        array.flags.writeable = False
    return (data.train.x, data.train.y), (data.test.x, data.test.y)


def load_data_of(name: str) -> Callable[..., tuple[tuple[Array, Array], tuple[Array, Array]]]:
    """Return `load_data` of one of Keras' image data sets."""

    @checked_arguments
    def load_data(path: str | Path | None = None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Return `(x_train, y_train), (x_test, y_test)`: images (60000, 28, 28) and (10000, 28, 28), labels, all uint8.

        Read from dptrain's cache or Keras' (`~/.keras/datasets`), else downloaded and kept; collective under mpirun,
        with one copy a node.

        Args:
            path: a local folder with the four IDX files, or for MNIST Keras' .npz file; a mere file name is looked up
                in Keras' cache.

        Raises:
            AgreedError: it cannot be downloaded or read, or Keras' file has another SHA-256.
        """
        from dptrain.comm import current

        entry = CATALOG[name]
        pinned = entry.keras_sha256 if isinstance(entry, FetchedIdx) else None
        if path is None or str(path) == f"{name}.npz":  # Keras' default
            return load(name)
        if pinned is None or Path(path).suffix != ".npz":
            return load(name, data_dir=path)
        return load(str(current().agree("data", lambda: cached(path, f"{name}.npz", pinned))))

    return load_data


def _in_order(sources: DataSources) -> tuple[ArraySource, ArraySource, ArraySource, ArraySource]:
    return sources.x_train, sources.y_train, sources.x_test, sources.y_test


def _read(source: ArraySource, comm: Communicator, sharding: str) -> Array:
    if sharding == "static":
        start, stop = cut(0, source.shape[0], comm.replicas)[comm.replica]
        rows = np.empty((stop - start, *source.shape[1:]), source.dtype)
        comm.agree("data", lambda: source.read_into(rows, start))
        return rows
    return read_shared(source, comm)


def read_shared(source: ArraySource, comm: Communicator) -> Array:
    """Return all rows, one copy a node. Collective."""
    array, fill = comm.shared_array(source.shape, source.dtype)
    comm.agree("data", lambda: source.read_into(array) if fill else None)
    comm.node_barrier()
    return array


def _first_rows(sources: DataSources, comm: Communicator, sharding: str) -> tuple[int, int]:
    """Return the global indices of this rank's first training and test row."""
    if sharding == "global":
        return 0, 0
    return (
        cut(0, sources.x_train.shape[0], comm.replicas)[comm.replica][0],
        cut(0, sources.x_test.shape[0], comm.replicas)[comm.replica][0],
    )


def _task_of(arrays: list[Array], comm: Communicator) -> Task:
    _, y_train, _, y_test = arrays
    if y_train.dtype.kind in "iu":
        return "multiclass"
    two = all(math.prod(y.shape[1:]) == 1 and is_zero_or_one(y) for y in (y_train, y_test))
    return "binary" if all(comm.allgather(two)) else "regression"


def _check(sources: DataSources, arrays: list[Array], comm: Communicator, sharding: str, task: Task) -> int:
    """Check this rank's share of the numbers, and return its highest label (or 0)."""
    x_train, y_train, x_test, y_test = arrays
    if task == "multiclass":
        check_labels_integer(y_train, sources.y_train.where)
        check_labels_integer(y_test, sources.y_test.where)
    if sharding == "global" and comm.local_rank != 0:
        return 0
    first_train, first_test = _first_rows(sources, comm, sharding)
    check_finite(x_train, sources.x_train.where, first_train)
    check_finite(x_test, sources.x_test.where, first_test)
    check_finite(y_train, sources.y_train.where, first_train)
    check_finite(y_test, sources.y_test.where, first_test)
    return int(y_train.max(initial=0)) if task == "multiclass" else 0


def _check_label_range(
    sources: DataSources, arrays: list[Array], num_classes: int, comm: Communicator, sharding: str
) -> None:
    if sharding == "global" and comm.local_rank != 0:
        return
    first_train, first_test = _first_rows(sources, comm, sharding)
    check_labels(arrays[1], num_classes, sources.y_train.where, first_train)
    check_labels(arrays[3], num_classes, sources.y_test.where, first_test)
