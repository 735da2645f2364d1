"""Tables as a data set, and for a model that is there already."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.holdout import split_rows
from dptrain.data.loading import LoadedData, Split
from dptrain.data.preprocessing import Preprocessing, Unseen
from dptrain.data.raw import RawSamples, cut_off, require_part, share
from dptrain.data.sources import DEFAULT_MAX_BYTES, check_declared
from dptrain.data.table_columns import TableOptions, learn, used_columns, with_means, without_missing
from dptrain.data.tables import Table, read_table

Array = npt.NDArray[Any]


def load_table(
    path: str,
    asked: TableOptions,
    comm: Communicator,
    known: Preprocessing | None = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> LoadedData:
    """Bring a table into memory, one copy a node. Collective.

    Args:
        path: of the training table.
        asked: what the command line says about it.
        comm: the ranks.
        known: how it becomes arrays; by default what the training part says.
        max_bytes: the largest that the content of a file, and each array, may be.

    Raises:
        AgreedError: on every rank, whatever was wrong on any: files, contents, or data that differs between nodes.
    """
    files = _TableFiles(path, asked, max_bytes)
    if known is not None:
        files.known = known
    comm.agree("data", lambda: files.known if comm.rank == 0 else None)
    files.known = Preprocessing.from_dict(comm.broadcast_fact(files.known.to_dict() if comm.rank == 0 else None))
    x_train, y_train, x_test, y_test = share(comm, lambda: files.arrays)
    notes = comm.broadcast_fact(files.notes)
    train, test = (Split(x, y) for x, y in ((x_train, y_train), (x_test, y_test)))
    name, classes = Path(path).name.partition(".")[0], len(files.known.class_names)
    return LoadedData(name, train, test, classes, files.known.task, files.known, tuple(notes))


class _TableFiles:
    """The training table and, where there is one, the test table, read when they are first asked for.

    Args:
        path: of the training table.
        asked: what the command line says about it.
        max_bytes: the largest that the content of a file, and each array, may be.

    Attributes:
        notes: what was decided, a line each; grows as the files are read.
    """

    def __init__(self, path: str, asked: TableOptions, max_bytes: int) -> None:
        self.notes: list[str] = []
        self._path, self._asked, self._max_bytes = path, asked, max_bytes

    @cached_property
    def _train(self) -> Table:
        asked = self._asked
        table = read_table(
            self._path,
            text_columns=asked.categorical,
            number_columns=asked.number_columns,
            max_bytes=self._max_bytes,
        )
        return self._cleaned(table, [*used_columns(table, self._asked), str(self._asked.target)])

    @cached_property
    def known(self) -> Preprocessing:
        """How the tables become arrays, learned from the training part unless it was set."""
        train = self._train
        found, notes = learn(train, self._asked)
        self.notes += notes
        if self._asked.missing == "mean":
            found = with_means(found, train, self._trained_rows(found))
        if self._asked.test is None:
            self.notes.append(require_part(len(train), self._asked.test_split, "--test-data FILE names others"))
        return found

    def _trained_rows(self, found: Preprocessing) -> npt.NDArray[np.int64]:
        """Return the rows of the training part: those that the test part leaves."""
        train = self._train
        if self._asked.test is not None:
            return np.arange(len(train))
        rows, _ = split_rows(found.targets(train.frame, train.where, train.fault), self._asked.test_split)
        return rows

    @cached_property
    def arrays(self) -> list[Array]:
        """x and y of the training part, x and y of the test part."""
        x, y = self._encoded(self._train)
        if self._asked.test is None:
            return cut_off(x, y, self._asked.test_split)
        table = _read_known(self._asked.test, self.known, self._max_bytes)
        names = [*(one.name for one in self.known.columns), str(self.known.target)]
        self.known.require_columns(table.frame, table.where, names)
        return [x, y, *self._encoded(self._cleaned(table, names))]

    def _cleaned(self, table: Table, names: list[str]) -> Table:
        if self._asked.missing != "drop":
            return table
        table, notes = without_missing(table, names)
        self.notes += notes
        return table

    def _encoded(self, table: Table) -> tuple[Array, Array]:
        check_declared(table.where, (len(table), *self.known.sample_shape), 4, self._max_bytes)
        advice = "fill it in, --drop the column, leave such rows out with --missing drop, or see --missing mean"
        x = self.known.encode(table.frame, table.where, table.fault, advice=advice)
        return x, self.known.targets(table.frame, table.where, table.fault)


def _read_known(path: str, known: Preprocessing, max_bytes: int) -> Table:
    """Read a table whose columns are known."""
    numbers = known.number_columns + ([str(known.target)] if known.task == "regression" else [])
    return read_table(path, text_columns=known.text_columns, number_columns=numbers, max_bytes=max_bytes)


def encode_file(
    path: str,
    known: Preprocessing,
    comm: Communicator,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    unseen: Unseen | None = None,
) -> RawSamples:
    """Return x of a table for a model that is there already, and y where the table has the target. Collective.

    Args:
        path: of the table.
        known: the model's.
        comm: the ranks.
        max_bytes: the largest that the file's content, and x, may be.
        unseen: as `Preprocessing.encode`.

    Returns:
        One copy a node.

    Raises:
        AgreedError: on every rank, whatever was wrong on any.
    """

    def make() -> list[Array]:
        table = _read_known(path, known, max_bytes)
        check_declared(table.where, (len(table), *known.sample_shape), 4, max_bytes)
        x = known.encode(table.frame, table.where, table.fault, unseen=unseen)
        has_target = known.target in table.frame.columns
        return [x, known.targets(table.frame, table.where, table.fault)] if has_target else [x]

    x, *rest = share(comm, make)
    return RawSamples(x, rest[0] if rest else None)
