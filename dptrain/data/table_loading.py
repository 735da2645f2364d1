"""Tables as a data set: read once a node, encoded as the training table says, shared by the node's ranks."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.holdout import split_rows
from dptrain.data.loading import LoadedData, Split
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.sources import DEFAULT_MAX_BYTES, check_declared
from dptrain.data.table_columns import TableOptions, learn, require_rows, used_columns, without_missing
from dptrain.data.tables import Table, read_table
from dptrain.errors import DataError

Array = npt.NDArray[Any]


def load_table(
    path: str,
    comm: Communicator,
    asked: TableOptions,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    known: Preprocessing | None = None,
) -> LoadedData:
    """Bring a table into memory, one copy a node. Collective.

    Args:
        path: of the training table.
        comm: the ranks.
        asked: what the command line says about it.
        max_bytes: the largest that the content of a file, and each array, may be.
        known: what the columns are for; by default what the training table says.

    Raises:
        AgreedError: on every rank, whatever was wrong on any: files, contents, or tables that differ between nodes.
    """
    files = _Files(path, asked, max_bytes)
    if known is not None:
        files.known = known
    comm.agree("data", lambda: files.known if comm.rank == 0 else None)
    files.known = Preprocessing.from_dict(comm.broadcast_fact(files.known.to_dict() if comm.rank == 0 else None))
    x_train, y_train, x_test, y_test = share(comm, lambda: files.arrays)
    notes = comm.broadcast_fact(files.notes)
    train, test = (Split.whole(x, y, comm.rank, comm.size) for x, y in ((x_train, y_train), (x_test, y_test)))
    name = Path(path).name.partition(".")[0]
    classes = len(files.known.class_names)
    return LoadedData(name, train, test, classes, files.known.task, files.known, tuple(notes))


def share(comm: Communicator, make: Callable[[], list[Array]]) -> list[Array]:
    """Return arrays that one rank of a node makes, in memory that its ranks share. Collective.

    Args:
        comm: the ranks.
        make: returns them; called on the first rank of each node, and on others where no memory can be shared.

    Raises:
        AgreedError: on every rank, whatever `make` raised on any; or nodes whose arrays differ in shape.
    """
    made = comm.agree("data", lambda: make() if comm.local_rank == 0 else None)
    headers = comm.broadcast_fact(None if made is None else [[list(one.shape), str(one.dtype)] for one in made])

    def fill(arrays: list[tuple[Array, bool]]) -> None:
        if not any(is_mine for _, is_mine in arrays):
            return
        for (array, is_mine), one in zip(arrays, make() if made is None else made, strict=True):
            if array.shape != one.shape:
                raise DataError(f"arrays of {one.shape} here and {array.shape} on rank 0; is the path shared?")
            if is_mine:
                array[...] = one

    shared = [comm.shared_array(tuple(shape), dtype) for shape, dtype in headers]
    comm.agree("data", lambda: fill(shared))
    comm.node_barrier()
    return [array for array, _ in shared]


class _Files:
    """The training table and, where there is one, the test table.

    Attributes:
        notes: what was decided, a line each.
    """

    def __init__(self, path: str, asked: TableOptions, max_bytes: int) -> None:
        self._path, self._asked, self._max_bytes = path, asked, max_bytes
        self.notes: list[str] = []

    @cached_property
    def _train(self) -> Table:
        table = read_table(self._path, text_columns=self._asked.categorical, max_bytes=self._max_bytes)
        return self._cleaned(table, [*used_columns(table, self._asked), str(self._asked.target)])

    @cached_property
    def known(self) -> Preprocessing:
        """What the columns are for, learned from the training table."""
        train = self._train
        found, notes = learn(train, self._asked)
        self.notes += notes
        if self._asked.test is None:
            require_rows(train, self._asked.test_split)
            held = round(len(train) * self._asked.test_split)
            self.notes.append(
                f"{held:,} of {len(train):,} rows are held out as the test part; --test-data FILE names another"
            )
        return found

    @cached_property
    def arrays(self) -> list[Array]:
        """x and y of the training part, x and y of the test part."""
        train = self._encoded(self._train)
        if self._asked.test is None:
            rows, held = split_rows(train[1], self._asked.test_split)
            return [train[0][rows], train[1][rows], train[0][held], train[1][held]]
        texts = [one.name for one in self.known.columns if one.text]
        table = read_table(self._asked.test, text_columns=texts, max_bytes=self._max_bytes)
        names = [*(one.name for one in self.known.columns), str(self.known.target)]
        self.known.require_columns(table.frame, table.where, names)
        return [*train, *self._encoded(self._cleaned(table, names))]

    def _cleaned(self, table: Table, names: list[str]) -> Table:
        if self._asked.missing != "drop":
            return table
        table, notes = without_missing(table, names)
        self.notes += notes
        return table

    def _encoded(self, table: Table) -> tuple[Array, Array]:
        check_declared(table.where, (len(table), *self.known.sample_shape), 4, self._max_bytes)
        advice = "fill it in, --drop the column, or leave such rows out with --missing drop"
        x = self.known.encode(table.frame, table.where, table.fault, advice=advice)
        return x, self.known.targets(table.frame, table.where, table.fault)


def encode_file(
    path: str, known: Preprocessing, comm: Communicator, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[Array, Array | None]:
    """Return x of a table for a model that is there already, and y where the table has the target. Collective.

    Args:
        path: of the table.
        known: the model's.
        comm: the ranks.
        max_bytes: the largest that the file's content, and x, may be.

    Returns:
        (rows, features) and (rows,); one copy a node.

    Raises:
        AgreedError: on every rank, whatever was wrong on any.
    """

    def make() -> list[Array]:
        texts = [one.name for one in known.columns if one.text]
        table = read_table(path, text_columns=texts, max_bytes=max_bytes)
        check_declared(table.where, (len(table), *known.sample_shape), 4, max_bytes)
        x = known.encode(table.frame, table.where, table.fault)
        has_target = known.target in table.frame.columns
        return [x, known.targets(table.frame, table.where, table.fault)] if has_target else [x]

    x, *rest = share(comm, make)
    return np.asarray(x), rest[0] if rest else None
