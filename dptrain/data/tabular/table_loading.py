"""Loads tables: as a data set, or as input of a trained model."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.holdout import split_rows
from dptrain.data.loading import LoadedData, Split
from dptrain.data.preprocessing import Preprocessing, Unseen, within_limits
from dptrain.data.raw import RawSamples, cut_off, require_part, share
from dptrain.data.readers.text_folder import TextFiles, learn_text_folder, read_text_folder
from dptrain.data.sources import DEFAULT_MAX_BYTES, check_declared
from dptrain.data.tabular.table_columns import TableOptions, learn, used_columns, with_means, without_missing
from dptrain.data.tabular.tables import Table, read_table

Array = npt.NDArray[Any]


def load_table(
    path: str,
    options: TableOptions,
    comm: Communicator,
    preprocessing: Preprocessing | None = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> LoadedData:
    """Load a table, one copy a node; `preprocessing` is learned from the training part unless given. Collective."""
    files = _TableFiles(path, options, max_bytes)
    if preprocessing is not None:
        files.preprocessing = preprocessing
    comm.agree("data", lambda: files.preprocessing if comm.rank == 0 else None)
    files.preprocessing = Preprocessing.from_dict(
        comm.broadcast_fact(files.preprocessing.to_dict() if comm.rank == 0 else None)
    )
    x_train, y_train, x_test, y_test = share(comm, lambda: files.arrays)
    notes = comm.broadcast_fact(files.notes)
    train, test = (Split(x, y) for x, y in ((x_train, y_train), (x_test, y_test)))
    name, classes = Path(path).name.partition(".")[0], len(files.preprocessing.class_names)
    return LoadedData(name, train, test, classes, files.preprocessing.task, files.preprocessing, tuple(notes))


class _TableFiles:
    """Reads the training table and the optional test table on first use, and collects notes on each decision."""

    def __init__(self, path: str, options: TableOptions, max_bytes: int) -> None:
        self.notes: list[str] = []
        self._path, self._options, self._max_bytes = path, options, max_bytes

    @cached_property
    def _train(self) -> Table:
        options = self._options
        if Path(self._path).is_dir():
            return read_text_folder(self._path, self._max_bytes)
        table = read_table(
            self._path,
            text_columns=[*options.categorical, *options.texts],
            number_columns=options.number_columns,
            max_bytes=self._max_bytes,
        )
        return self._cleaned(table, [*used_columns(table, self._options), str(self._options.target)])

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """How the tables become arrays, learned from the training part unless it was set."""
        train = self._train
        from_folder = isinstance(train, TextFiles)
        with within_limits(train.where):
            preprocessing, notes = (learn_text_folder if from_folder else learn)(train, self._options)
        self.notes += notes
        if self._options.missing == "mean":
            preprocessing = with_means(preprocessing, train, self._trained_rows(preprocessing))
        if self._options.test is None:
            self.notes.append(require_part(len(train), self._options.test_split, "--test-data FILE names others"))
        return preprocessing

    def _trained_rows(self, preprocessing: Preprocessing) -> npt.NDArray[np.int64]:
        """Return the rows that the test part leaves."""
        train = self._train
        if self._options.test is not None:
            return np.arange(len(train))
        rows, _ = split_rows(preprocessing.targets(train.frame, train.where, train.fault), self._options.test_split)
        return rows

    @cached_property
    def arrays(self) -> list[Array]:
        x, y = self._encoded(self._train)
        if self._options.test is None:
            return cut_off(x, y, self._options.test_split)
        table = _read_for_model(self._options.test, self.preprocessing, self._max_bytes)
        names = [*(column.name for column in self.preprocessing.columns), str(self.preprocessing.target)]
        self.preprocessing.require_columns(table.frame, table.where, names)
        return [x, y, *self._encoded(self._cleaned(table, names))]

    def _cleaned(self, table: Table, names: list[str]) -> Table:
        if self._options.missing != "drop":
            return table
        table, notes = without_missing(table, names)
        self.notes += notes
        return table

    def _encoded(self, table: Table) -> tuple[Array, Array]:
        check_declared(table.where, (len(table), *self.preprocessing.sample_shape), 4, self._max_bytes)
        advice = "fill it in, --drop the column, or use --missing drop (leaves out such rows) or --missing mean"
        x = self.preprocessing.encode(table.frame, table.where, table.fault, advice=advice)
        return x, self.preprocessing.targets(table.frame, table.where, table.fault)


def _read_for_model(path: str, preprocessing: Preprocessing, max_bytes: int) -> Table:
    """Read a table with the column types that a model's preprocessing expects, or a folder of texts."""
    if Path(path).is_dir():
        return read_text_folder(path, max_bytes)
    numbers = preprocessing.number_columns + ([str(preprocessing.target)] if preprocessing.task == "regression" else [])
    return read_table(path, text_columns=preprocessing.text_columns, number_columns=numbers, max_bytes=max_bytes)


def encode_file(
    path: str,
    preprocessing: Preprocessing,
    comm: Communicator,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    unseen: Unseen | None = None,
) -> RawSamples:
    """Return x of a table for a trained model, and y where the table has the target; one copy a node. Collective."""

    files: Sequence[str] = ()

    def make() -> list[Array]:
        nonlocal files
        table = _read_for_model(path, preprocessing, max_bytes)
        check_declared(table.where, (len(table), *preprocessing.sample_shape), 4, max_bytes)
        x = preprocessing.encode(table.frame, table.where, table.fault, unseen=unseen)
        files = table.files if isinstance(table, TextFiles) else ()
        has_target = preprocessing.target in table.frame.columns
        return [x, preprocessing.targets(table.frame, table.where, table.fault)] if has_target else [x]

    x, *rest = share(comm, make)
    return RawSamples(x, rest[0] if rest else None, comm.broadcast_fact(list(files)))
