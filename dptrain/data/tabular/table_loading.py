"""Loads tables: as a data set, or as input of a trained model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.holdout import require_classes, split_rows
from dptrain.data.loading import LoadedData, Split
from dptrain.data.preprocessing import Preprocessing, Unseen, within_limits
from dptrain.data.raw import RawSamples, cut_off, require_part, share
from dptrain.data.readers.text_folder import TextFiles, learn_text_folder, read_text_folder
from dptrain.data.sources import DEFAULT_MAX_BYTES, check_declared
from dptrain.data.tabular.table_columns import learn, used_columns, with_means, without_missing
from dptrain.data.tabular.table_options import FEW_ROWS, TableOptions, mended, options_of
from dptrain.data.tabular.tables import Reading, Table, read_table
from dptrain.data.tabular.undecided import Problem, UndecidedTableError
from dptrain.errors import DataError

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
    files = _TableFiles(path, options, max_bytes, preprocessing)
    comm.agree("data", lambda: files.preprocessing if comm.rank == 0 else None)
    known = Preprocessing.from_dict(comm.broadcast_fact(files.preprocessing.to_dict() if comm.rank == 0 else None))
    if comm.rank != 0:
        files = _TableFiles(path, options, max_bytes, known)
    x_train, y_train, x_test, y_test = share(comm, lambda: files.arrays)
    if preprocessing is None and known.class_names:
        comm.agree("data", lambda: require_classes(y_train, known.class_names, path))
    notes = comm.broadcast_fact(files.notes)
    train, test = (Split(x, y) for x, y in ((x_train, y_train), (x_test, y_test)))
    name, classes = Path(path).name.partition(".")[0], len(known.class_names)
    return LoadedData(name, train, test, classes, known.task, known, tuple(notes))


class _TableFiles:
    """Reads the training table and the optional test table on first use, and collects notes on each decision."""

    def __init__(
        self, path: str, options: TableOptions, max_bytes: int, preprocessing: Preprocessing | None = None
    ) -> None:
        self.notes: list[str] = []
        self._path, self._options, self._max_bytes, self._given = path, options, max_bytes, preprocessing

    @property
    def preprocessing(self) -> Preprocessing:
        """How the tables become arrays, as given or learned from the training part."""
        return self._trained[1]

    @cached_property
    def _trained(self) -> tuple[Table, Preprocessing]:
        """The training table, and how it becomes arrays."""
        is_folder = Path(self._path).is_dir()
        if self._given is not None:
            return self._read_again(self._given), self._given
        table, preprocessing, notes = self._learned_folder() if is_folder else self._decided()
        self.notes += notes
        if self._options.test is None:
            self.notes.append(require_part(len(table), self._options.test_split, "--test-data FILE names others"))
        return table, preprocessing

    def _read_again(self, preprocessing: Preprocessing) -> Table:
        """Return the rows that were learned from, as a model reads them."""
        options = self._options
        table = _read_for_model(self._path, preprocessing, self._max_bytes)
        if isinstance(table, TextFiles):
            return table
        preprocessing.require_columns(table.frame, table.where, _names(preprocessing))
        if options.auto:  # which columns decide whether a row is complete was decided then
            rows = self._decided()[0].frame.index
            return replace(table, frame=table.frame.loc[rows])
        return self._cleaned(table, [*used_columns(table, options), str(options.target)])

    def _learned_folder(self) -> tuple[Table, Preprocessing, list[str]]:
        table = read_text_folder(self._path, self._max_bytes)
        with within_limits(table.where):
            return table, *learn_text_folder(table, self._options)

    def _decided(self) -> tuple[Table, Preprocessing, list[str]]:
        """Learn from a table; settle what could be meant in two ways, or refuse all of it in one message.

        What settles a problem may show another: that a text among numbers stands for a missing value, that a value is
        missing. So all are looked for in any case.
        """
        problems: list[Problem] = []
        original = self._options
        while True:
            try:
                table, preprocessing, notes = self._attempted()
                break
            except UndecidedTableError as error:
                problems += [problem for problem in error.problems if not _is_known(problem, problems)]
                mends = [problem.error.mend for problem in error.problems]
                options = mended(self._options, [mend for mend in mends if mend is not None])
                if None in mends or options == self._options:
                    raise UndecidedTableError(self._path, problems, original) from None
                self._options = options
            except DataError:
                if problems and not original.auto:
                    raise UndecidedTableError(self._path, problems, original) from None
                raise
        if problems and not original.auto:
            raise UndecidedTableError(self._path, problems, original)
        if original.auto:
            applied = options_of([problem.error.mend or {} for problem in problems], original)
            notes = [f"--auto: {problem.note}" for problem in problems if problem.error.done] + notes
            notes.append(f"--auto: stands for {f'{applied} '.lstrip()}--rare {FEW_ROWS} --unseen other")
        return table, preprocessing, notes

    def _attempted(self) -> tuple[Table, Preprocessing, list[str]]:
        options = self._options
        self.notes.clear()
        table = read_table(self._path, options.reading(), max_bytes=self._max_bytes)
        table = self._cleaned(table, [*used_columns(table, options), str(options.target)])
        with within_limits(table.where):
            preprocessing, notes = learn(table, options)
        if options.missing in ("mean", "indicator"):
            preprocessing = with_means(preprocessing, table, self._trained_rows(table, preprocessing))
        return table, preprocessing, notes

    def _trained_rows(self, table: Table, preprocessing: Preprocessing) -> npt.NDArray[np.int64]:
        """Return the rows that the test part leaves."""
        if self._options.test is not None:
            return np.arange(len(table))
        rows, _ = split_rows(preprocessing.targets(table.frame, table.where, table.fault), self._options.test_split)
        return rows

    @cached_property
    def arrays(self) -> list[Array]:
        train, preprocessing = self._trained
        x, y = self._encoded(train)
        if self._options.test is None:
            return cut_off(x, y, self._options.test_split)
        table = _read_for_model(self._options.test, preprocessing, self._max_bytes)
        preprocessing.require_columns(table.frame, table.where, _names(preprocessing))
        return [x, y, *self._encoded(self._cleaned(table, _names(preprocessing)))]

    def _cleaned(self, table: Table, names: list[str]) -> Table:
        """Return a table without the rows that miss a value, or only without those that miss the target, the last."""
        missing = self._options.missing
        if missing == "stop" or isinstance(table, TextFiles):
            return table
        table, notes = without_missing(table, names if missing == "drop" else names[-1:])
        self.notes += notes
        return table

    def _encoded(self, table: Table) -> tuple[Array, Array]:
        check_declared(table.where, (len(table), *self.preprocessing.sample_shape), 4, self._max_bytes)
        advice = (
            "fill it in, --drop the column, or use --missing drop (leaves out such rows), --missing mean or --missing "
            "indicator"
        )
        x = self.preprocessing.encode(table.frame, table.where, table.fault, advice=advice)
        return x, self.preprocessing.targets(table.frame, table.where, table.fault)


def _is_known(problem: Problem, problems: Sequence[Problem]) -> bool:
    """Whether a column's problem is among others, seen in an earlier attempt."""
    return any(
        (problem.name, problem.error.mend, problem.missing > 0) == (other.name, other.error.mend, other.missing > 0)
        for other in problems
    )


def _names(preprocessing: Preprocessing) -> list[str]:
    """Return the columns of a table, the target last."""
    return [*(column.name for column in preprocessing.columns), str(preprocessing.target)]


def _read_for_model(path: str, preprocessing: Preprocessing, max_bytes: int) -> Table:
    """Read a table with the column types that a model's preprocessing expects, or a folder of texts."""
    if Path(path).is_dir():
        return read_text_folder(path, max_bytes)
    is_plain = preprocessing.task == "regression" and preprocessing.target_notation is None
    reading = Reading(
        text_columns=preprocessing.text_columns,
        number_columns=[*preprocessing.number_columns, *([str(preprocessing.target)] if is_plain else [])],
        literal_columns=preprocessing.literal_columns,
        na=preprocessing.na,
        default_na=preprocessing.default_na,
        repairs_header=preprocessing.repaired_header,
    )
    return read_table(path, reading, max_bytes=max_bytes)


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
        has_target = preprocessing.target in table.frame and not table.frame[preprocessing.target].isna().all()
        return [x, preprocessing.targets(table.frame, table.where, table.fault)] if has_target else [x]

    x, *rest = share(comm, make)
    return RawSamples(x, rest[0] if rest else None, comm.broadcast_fact(list(files)))
