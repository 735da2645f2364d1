"""Turns raw data into a model's arrays: columns of a table, pictures, class names.

A `Preprocessing` is learned from the training data and saved with the model (`preprocessing.json` in a `.keras` file).
It holds names and sizes, never code; a `Normalization` layer standardises numbers.

x of a table is float32 (rows, features): number and one-hot columns in the table's order, then a column of codes for
each embedded category.
"""

import dataclasses
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dptrain.data.tabular import records
from dptrain.data.tabular.column_blocks import fill_numbers
from dptrain.data.tabular.dates import COMPACT, ISO, Part, days, parts_of
from dptrain.data.tabular.number_texts import Notation, Style
from dptrain.data.tabular.table_codes import BLANKS, DEFAULT_NA, leading_zero
from dptrain.data.tasks import Task
from dptrain.data.words import encode_texts, word_ids
from dptrain.errors import DataError
from dptrain.registry.names import suggestion
from dptrain.runtime.text import short

Array = npt.NDArray[Any]
# Returns the error about a row (from 0), a column's name and a reason.
Fault = Callable[[int, str, str], DataError]

# Treatment of categories not seen in training.
Unseen = Literal["error", "missing", "other"]

FORMAT = 5
# Limits of a file's declarations.
MAX_COLUMNS, MAX_VALUES, MAX_TEXT, MAX_LENGTH = 20_000, 1_000_000, 10_000, 100_000
_MAX_SIDE = 1 << 15
_MAX_FORMATS = 20
_TOO_LONG = re.compile(r"(String|Tuple) should have at most")  # in Pydantic's words

_STRICT = ConfigDict(extra="forbid", strict=True, defer_build=True)  # most trainings make none
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Texts = Annotated[tuple[Text, ...], Field(max_length=MAX_VALUES)]
Side = Annotated[int, Field(ge=1, le=_MAX_SIDE)]


def _forms(value: str) -> tuple[str, str]:
    return value.upper(), value.lower()


@dataclass(frozen=True, config=_STRICT)
class Column:
    """A column of a table.

    Attributes:
        name: in the table's header.
        role: "number"; "one-hot" or "embedding" for a category; "words" for a text.
        values: the categories by code, as text; of a text the vocabulary.
        text: read cells literally, so that "007" is not 7.
        mean: replaces missing numbers; None refuses them.
        missing: the category for missing values; None refuses them.
        other: the category for unseen values; None if there is none.
        date: the number is a date's, in days since 1970-01-01.
        length: words of a text that count; 0 for other columns.
        notation: how texts are numbers, such as "1.234,5"; None where texts are refused.
        sign: a currency or % that those texts may have.
        formats: of dates, tried in this order; empty for ISO's.
        parts: further features of a date.
        indicator: a last feature, 1 where the number is missing.
        literal: words such as NA are values, not missing ones.
        rare: values that count as `other`.
    """

    name: Text
    role: Literal["number", "one-hot", "embedding", "words"]
    values: Texts = ()
    text: bool = False
    mean: Annotated[float, Field(allow_inf_nan=False)] | None = None
    missing: Text | None = None
    date: bool = False
    other: Text | None = None
    length: Annotated[int, Field(ge=0, le=MAX_LENGTH)] = 0
    notation: Notation | None = None
    sign: Annotated[str, Field(max_length=3)] = ""
    formats: Annotated[tuple[Text, ...], Field(max_length=_MAX_FORMATS)] = ()
    parts: Annotated[tuple[Part, ...], Field(max_length=len(get_args(Part)))] = ()
    indicator: bool = False
    literal: bool = False
    rare: Texts = ()

    @property
    def width(self) -> int:
        """Number of columns of x."""
        if self.role == "number":
            return 1 + len(self.parts) + self.indicator
        return len(self.values) if self.role == "one-hot" else self.length or 1

    @functools.cached_property
    def codes(self) -> Mapping[str, int]:
        """The code of each category, also as it may be written, and of words for a missing one; the id of each word."""
        if self.role == "words":
            return word_ids(self.values)
        codes = {value: code for code, value in enumerate(self.values)}
        joined = {} if self.other is None else dict.fromkeys(self.rare, codes[self.other])
        absent = {} if self.missing is None or self.literal else dict.fromkeys(DEFAULT_NA, codes[self.missing])
        forms = {value.strip(BLANKS): code for value, code in codes.items()}
        if not self.text:  # TRUE in a file of text is a boolean, and a text elsewhere
            forms |= {form: codes[value] for value in ("False", "True") if value in codes for form in _forms(value)}
        return absent | forms | joined | codes

    @property
    def style(self) -> Style | None:
        """How texts are numbers; None where they are not."""
        return None if self.notation is None else Style(self.notation, self.sign)

    @property
    def standardized(self) -> tuple[bool, ...]:
        """(width,): which of its columns of x are numbers to standardise."""
        if self.role != "number":
            return (False,) * self.width
        return (True,) * (self.width - self.indicator) + (False,) * self.indicator


@dataclass(frozen=True, config=_STRICT)
class Preprocessing:
    """How raw data becomes a model's arrays.

    Attributes:
        task: what is learned.
        columns: of a table, in order; empty for pictures and arrays.
        target: the table's column to predict.
        class_names: by label; empty for numbers, and for labels that are numbers already.
        picture: (height, width, channels), 1 channel for grey, 3 for RGB.
        resize: resize pictures of another size.
        unseen: the default of `encode`.
        na: words that stand for a missing value, beside those that files of text have by default.
        default_na: these stand for one, too.
        repaired_header: columns without a name, or with another's, are named by their place.
        target_notation, target_sign: `notation` and `sign` of a target that is a number.
    """

    task: Task
    columns: Annotated[tuple[Column, ...], Field(max_length=MAX_COLUMNS)] = ()
    target: Text | None = None
    class_names: Texts = ()
    picture: tuple[Side, Side, Literal[1, 3]] | None = None
    resize: bool = False
    unseen: Unseen = "error"
    na: Texts = ()
    default_na: bool = True
    repaired_header: bool = False
    target_notation: Notation | None = None
    target_sign: Annotated[str, Field(max_length=3)] = ""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        roles = all(bool(column.values) == (column.role != "number") for column in self.columns)
        rules = {
            "columns have names of their own": not names or len({*names, self.target}) == len(names) + 1,
            "a table or pictures, not both": not (self.columns and self.picture),
            "a number has no categories, every other column has": roles,
            "a number has a mean, a category stands for missing values": all(
                column.missing is None
                if column.role == "number"
                else column.mean is None
                and column.missing in (None, *(("",) if column.role == "words" else column.values))
                for column in self.columns
            ),
            "unseen categories are one of the column's": all(
                column.other in (None, *column.values) for column in self.columns
            ),
            "a date is a number": all(column.role == "number" for column in self.columns if column.date),
            "only a number is written in a notation or has an indicator": all(
                column.role == "number"
                for column in self.columns
                if column.notation is not None or column.sign or column.indicator
            ),
            "only a date has formats and parts": all(
                column.date and len(set(column.parts)) == len(column.parts)
                for column in self.columns
                if column.formats or column.parts
            ),
            "rare categories count as another": all(
                column.other is not None and column.role != "words" for column in self.columns if column.rare
            ),
            "a text has a length": all((column.role == "words") == (column.length > 0) for column in self.columns),
            "no category twice": all(len(set(column.values)) == len(column.values) for column in self.columns),
            "no class twice": len(set(self.class_names)) == len(self.class_names),
            "as many classes as the task has": _fits(self.task, len(self.class_names)),
            f"at most {MAX_VALUES} categories": sum(len(column.values) for column in self.columns) <= MAX_VALUES,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"expected {rule}")

    @property
    def kind(self) -> Literal["table", "pictures", "arrays"]:
        """Kind of the raw data."""
        return "table" if self.columns else "pictures" if self.picture else "arrays"

    @property
    def plain_columns(self) -> tuple[Column, ...]:
        """Numbers and one-hot categories, the first columns of x."""
        return tuple(column for column in self.columns if column.role in ("number", "one-hot"))

    @property
    def embedded_columns(self) -> tuple[Column, ...]:
        """Embedded categories, which follow in x as codes."""
        return tuple(column for column in self.columns if column.role == "embedding")

    @property
    def word_columns(self) -> tuple[Column, ...]:
        """Texts, the last columns of x, as ids of words."""
        return tuple(column for column in self.columns if column.role == "words")

    @property
    def is_number(self) -> npt.NDArray[np.bool_]:
        """(plain features,): which columns of x, without codes, are numbers to standardise."""
        plain = self.plain_columns
        return np.array([flag for column in plain for flag in column.standardized], bool)

    @property
    def text_columns(self) -> list[str]:
        """Columns whose cells are read literally."""
        is_literal = self.target_notation is not None or leading_zero(self.class_names) is not None
        target = [self.target] if self.target is not None and is_literal else []
        return [
            column.name
            for column in self.columns
            if column.text or column.notation is not None or COMPACT in column.formats
        ] + target

    @property
    def literal_columns(self) -> list[str]:
        """Columns in which words such as NA are values."""
        return [column.name for column in self.columns if column.literal]

    @property
    def number_columns(self) -> list[str]:
        """Number columns, in which 007 is 7."""
        return [
            column.name
            for column in self.columns
            if column.role == "number" and not column.date and column.notation is None
        ]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample of x; () for arrays."""
        return (sum(column.width for column in self.columns),) if self.columns else self.picture or ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {"format": FORMAT, **_fields(self), "columns": [_fields(column) for column in self.columns]}

    @staticmethod
    def from_dict(tree: Any, where: str = "preprocessing") -> "Preprocessing":
        """Return the `Preprocessing` of a `to_dict` tree; DataError if it is malformed, or of a newer format."""
        version = tree.get("format") if isinstance(tree, Mapping) else None
        if type(version) is not int or not 1 <= version <= FORMAT:
            raise DataError(f"{where}: format {short(version)}, this build reads <= {FORMAT}")
        rest = {key: value for key, value in tree.items() if key != "format"}
        try:
            return TypeAdapter(Preprocessing).validate_json(json.dumps(rest))
        except ValidationError as error:
            raise _refusal(error, where) from None
        except (TypeError, ValueError, RecursionError):
            raise DataError(f"{where}: not what JSON can hold") from None

    def takes(self, x: Any) -> bool:
        """Whether `x` is for `encode`: a data frame, a record, a list of records, or a dict of columns."""
        if not self.columns or (isinstance(x, Mapping) and not any(column.name in x for column in self.columns)):
            return False
        return records.are_records(x) or (hasattr(x, "columns") and hasattr(x, "iloc"))

    def encode(
        self,
        frame: Any,
        where: str = "table",
        fault: Fault | None = None,
        *,
        advice: str = "fill it in",
        unseen: Unseen | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return x of a table's rows, float32 (rows, features).

        Args:
            frame: a pandas data frame, a dict of lists, a list of dicts (records), or one dict for one row; columns
                other than `columns` are ignored.
            where: begins messages.
            fault: creates an error from a row, a column and a reason; by default rows count from 0.
            advice: what to do about a missing value.
            unseen: for a category not seen in training: "error", "missing" or "other" (its other category, or all zeros
                in one-hot columns); by default as in training.

        Raises:
            DataError: a column is missing or double; a value is missing, infinite, of another type, or unseen.
        """
        fault = fault or _counted(where)
        rows = self._rows(frame, where, [column.name for column in self.columns])
        x = np.zeros((len(rows), *self.sample_shape), np.float32)
        ordered = (*self.plain_columns, *self.embedded_columns, *self.word_columns)
        starts = np.cumsum([0, *(column.width for column in ordered)]).tolist()
        numeric = [
            (start, column)
            for start, column in zip(starts, ordered, strict=False)
            if column.role == "number" and column.width == 1 and not column.date
        ]
        complete: set[str] = set()
        if not isinstance(rows, records.Records):
            filled = np.empty((len(rows), len(numeric)), np.float32)
            complete = fill_numbers(
                rows, [column.name for _, column in numeric], [column.mean for _, column in numeric], filled
            )
            x[:, [start for start, _ in numeric]] = filled
        for start, column in zip(starts, ordered, strict=False):
            if column.name not in complete:
                out = x[:, start : start + column.width]
                self._encode_column(rows, column, out, fault, advice, unseen or self.unseen)
        return x

    def has_target(self, x: Any) -> bool:
        """Whether a table for `encode` has the column of targets."""
        return self.target in (x[0] if isinstance(x, list | tuple) else getattr(x, "columns", x))

    def _rows(self, frame: Any, where: str, names: Sequence[str]) -> Any:
        """Return a data frame as it is, or `Records`, which have these columns once."""
        rows = records.Records(frame, names, where) if records.are_records(frame) else frame
        self.require_columns(rows, where, names)
        return rows

    def _encode_column(
        self, rows: Any, column: Column, out: npt.NDArray[np.float32], fault: Fault, advice: str, unseen: Unseen
    ) -> None:
        """Write a column's part of x, (rows, width), which holds zeros."""
        are_records = isinstance(rows, records.Records)
        series = None if are_records else rows[column.name]
        # As in a file, where a blank cell is a missing one, but for a blank text.
        missing = self.na if column.role == "words" or "" in column.values else ("", *self.na)
        if are_records or len(rows) <= records.FEW:
            cells = rows.cells(column.name) if series is None else series.tolist()
            if _encode_cells(records.without_words(cells, missing), column, out, unseen):
                return
        if series is None:
            series = rows.series(column.name, fault)
        series = without_words(series, missing)
        if column.role == "number":
            out[...] = column_features(series, column, fault, advice)
        elif column.role == "words":
            texts = series if column.missing is None else series.where(series.notna(), column.missing)
            out[...] = encode_texts(texts_of(texts, fault, advice), column.codes, column.length)
        else:
            code, otherwise = _code_of_unseen(column, unseen)
            codes = encode_categories(
                *(series, column.name, column.values, fault, advice),
                missing=_code_of_missing(column, unseen),
                unseen=code,
                otherwise=otherwise,
                code_of=column.codes,
            )
            one_hot = column.role == "one-hot"
            out[...] = codes[:, None] == np.arange(column.width) if one_hot else codes[:, None]

    def targets(self, frame: Any, where: str = "table", fault: Fault | None = None) -> Array:
        """Return y of a data frame (see `encode`), (rows,): float32, or int32 indices into `class_names`."""
        fault = fault or _counted(where)
        assert self.target is not None
        rows = self._rows(frame, where, [self.target])
        series = rows.series(self.target, fault) if isinstance(rows, records.Records) else rows[self.target]
        series = without_words(series, self.na)
        if self.task == "regression":
            style = None if self.target_notation is None else Style(self.target_notation, self.target_sign)
            return numbers(series, self.target, fault, "leave the row out", style=style).astype(np.float32)
        return encode_categories(
            series, self.target, self.class_names, fault, "leave the row out", kind="class"
        ).astype(np.int32)

    def require_columns(self, frame: Any, where: str, names: Sequence[str]) -> None:
        """Refuse a table that lacks one of these columns, or has it twice."""
        there = Counter(str(column) for column in frame.columns)
        for name in names:
            if there[name] != 1:
                what = "no" if not there[name] else f"{there[name]} times the"
                hint = suggestion(name, list(there)) or f"; found {', '.join(list(there)[:10])}"
                raise DataError(f"{where}: {what} column {name!r}{'; rename one' if there[name] else hint}")


def _refusal(error: ValidationError, where: str) -> DataError:
    problem = error.errors()[0]
    names = [part for part in problem["loc"] if problem["loc"][0] not in range(9)]  # no places of arguments
    field = f"{'.'.join(map(str, names))} = " if names else ""
    value = f"{field}{short(problem['input'])}: " if problem["loc"] else ""
    text = problem["msg"].removeprefix("Value error, ")
    return DataError(f"{where}: {value}{_TOO_LONG.sub('expected at most', text)}")


@contextmanager
def within_limits(where: str) -> Iterator[None]:
    """Refuse data of which a `Preprocessing` would exceed its limits."""
    try:
        yield
    except ValidationError as error:
        raise _refusal(error, where) from None


def require_utf8(folder: Path) -> None:
    """Refuse a folder whose name cannot be that of a class, which models keep as text."""
    try:
        folder.name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{folder}: the name of a class folder is not UTF-8; rename it") from None


def _code_of_unseen(column: Column, unseen: Unseen) -> tuple[int | None, str]:
    """Return the code for unseen categories (-1: all zeros, None: an error) and the advice for that error."""
    if unseen == "error":
        return None, "; correct it, or see --unseen"
    stands = column.missing if unseen == "missing" else column.other
    if stands is not None:
        return column.values.index(stands), ""
    if unseen == "other" and column.role == "one-hot":
        return -1, ""
    how = "--missing mean on a table in which it misses values" if unseen == "missing" else "--unseen other"
    return None, f"; it has no replacement (--unseen {unseen}) unless the training has {how}"


def _code_of_missing(column: Column, unseen: Unseen) -> int | None:
    """Return the code for missing categories (-1: all zeros, None: an error)."""
    if column.missing is not None:
        return column.values.index(column.missing)
    return _code_of_unseen(column, unseen)[0] if unseen == "other" else None


def without_words(series: Any, words: Sequence[str]) -> Any:
    """Return a column of texts without those that stand for a missing value."""
    if not words or series.dtype.kind in "iufbmM":
        return series
    is_word = [isinstance(value, str) and value.strip(BLANKS) in words for value in series]
    return series.mask(is_word, None) if any(is_word) else series


def _encode_cells(cells: Sequence[Any], column: Column, out: npt.NDArray[np.float32], unseen: Unseen) -> bool:
    """Write plain cells of a column, as a few rows have them, into its part of x; False if one is not plain."""
    values: Sequence[float] | None
    if column.role == "number":
        return _encode_number_cells(cells, column, out)
    if column.role == "words":
        cells = [column.missing if cell is None else cell for cell in cells]
        if not all(type(cell) is str for cell in cells):
            return False
        out[...] = encode_texts(cells, column.codes, column.length)
        return True
    unseen_code, _ = _code_of_unseen(column, unseen)
    values = records.plain_codes(cells, column.codes, _code_of_missing(column, unseen), unseen_code, canonical)
    if values is None:
        return False
    if column.role == "one-hot":
        for row, code in enumerate(values):
            if code >= 0:
                out[row, int(code)] = 1
    else:
        out[:, 0] = values
    return True


def _encode_number_cells(cells: Sequence[Any], column: Column, out: npt.NDArray[np.float32]) -> bool:
    if column.date:
        days_of_cells = None if column.formats not in ((), (ISO,)) else records.plain_days(cells)
        if days_of_cells is None:
            return False
        values = np.array(days_of_cells)
        out[:, 1 : 1 + len(column.parts)] = parts_of(values, column.parts)
        out[:, 0] = values
        return True
    numbers_of_cells = records.plain_numbers(cells, column.mean, column.style)
    if numbers_of_cells is None:
        return False
    out[:, 0] = numbers_of_cells
    if column.indicator:
        out[:, -1] = [cell is None or cell != cell for cell in cells]
    return True


def _fits(task: Task, classes: int) -> bool:
    return classes == 0 or (task == "binary" and classes == 2) or (task == "multiclass" and classes >= 2)


def texts_of(series: Any, fault: Fault, advice: str) -> list[str]:
    """Return a column's texts, or raise where one is missing or of another type."""
    for row, value in enumerate(series):
        if _is_missing(value):
            raise _missing(series, str(series.name), row, fault, advice)
        if not isinstance(value, str):
            raise fault(row, str(series.name), f"{short(value)}; expected a text")
    return list(series)


def _fields(record: Any) -> dict[str, Any]:
    """Return a record's fields; `dataclasses.asdict` copies them, which takes longer than reading a wide table."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _counted(where: str) -> Fault:
    return lambda row, column, what: DataError(f"{where}, row {row} (counted from 0), column {column!r}: {what}")


def canonical(value: Any) -> str:
    """Return a category as text, whole numbers without decimals: 3, 3.0 and "3" are one category."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, float | np.floating) and math.isfinite(value) and float(value).is_integer():
        return str(int(value))
    return str(value)


def column_numbers(series: Any, column: Column, fault: Fault, advice: str) -> npt.NDArray[np.float64]:
    """Return a column of numbers, or of dates as days since 1970-01-01; see `numbers`."""
    if column.date:
        import pandas

        series = pandas.Series(days(series, column.name, fault, column.formats))
    return numbers(series, column.name, fault, advice, mean=column.mean, style=column.style)


def column_features(series: Any, column: Column, fault: Fault, advice: str) -> npt.NDArray[np.float64]:
    """Return the columns of x of a column of numbers or dates, (rows, width)."""
    features = np.zeros((len(series), column.width))
    features[:, 0] = column_numbers(series, column, fault, advice)
    absent = series.isna().to_numpy() if column.parts or column.indicator else np.zeros(len(series), bool)
    if column.parts:
        values = np.where(absent, np.nan, features[:, 0])
        features[:, 1 : 1 + len(column.parts)] = parts_of(values, column.parts)
    if column.indicator:
        features[:, -1] = absent
    return features


def numbers(
    series: Any, name: str, fault: Fault, advice: str, *, mean: float | None = None, style: Style | None = None
) -> npt.NDArray[np.float64]:
    """Return a column as float64 (rows,), finite also in float32.

    `mean` replaces missing values, None refuses them; `style` reads texts, None refuses them.
    """
    values: npt.NDArray[np.float64]
    if series.dtype.kind not in "iufb":
        values = _object_numbers(series, name, fault, advice, mean, style)
    else:
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    absent = np.isnan(values)
    if absent.any():
        if mean is None:
            raise _missing(series, name, int(absent.argmax()), fault, advice)
        values = np.where(absent, mean, values)
    large = np.abs(values) > np.finfo(np.float32).max
    if large.any():
        row = int(large.argmax())
        what = "infinite" if np.isinf(values[row]) else "too large for float32"
        raise fault(row, name, f"{values[row]:g} is {what} ({int(large.sum())} in all); correct it")
    return values


def _object_numbers(
    series: Any, name: str, fault: Fault, advice: str, mean: float | None, style: Style | None
) -> npt.NDArray[np.float64]:
    values = np.full(len(series), np.nan)
    texts: list[int] = []
    for row, value in enumerate(series):
        if _is_missing(value):
            if mean is None:
                raise _missing(series, name, row, fault, advice)
        elif isinstance(value, str) and style is not None:
            read = style.read(value)
            if read is None:
                raise fault(row, name, f"{short(value)} among numbers{_as_learned(style)}; correct it")
            values[row] = read
        elif not _is_number(value):
            raise fault(row, name, f"{short(value)} among numbers; correct it")
        else:
            texts += [row] if isinstance(value, str) else []
            values[row] = float(value)
    if texts:
        raise fault(texts[0], name, f"{short(series.iloc[texts[0]])}, a number as text; store numbers")
    return values


def _as_learned(style: Style) -> str:
    sign = f" and the sign {style.sign}" if style.sign else ""
    return f" with a decimal {style.notation}{sign}"


def encode_categories(
    series: Any,
    name: str,
    values: Sequence[str],
    fault: Fault,
    advice: str,
    kind: str = "category",
    missing: int | None = None,
    unseen: int | None = None,
    otherwise: str = "",
    code_of: Mapping[str, int] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the codes of a column of categories, (rows,).

    `missing` and `unseen` are the codes (-1 too) for missing and unknown values; None refuses such values. `code_of`
    has the codes, by default the places in `values`.
    """
    places, distinct = series.factorize()
    if len(places) and places.min() < 0 and missing is None:
        raise _missing(series, name, int((places < 0).argmax()), fault, advice)
    if code_of is None:
        code_of = {value: code for code, value in enumerate(values)}
    is_absent = places < 0
    codes: npt.NDArray[np.int64] = np.array([*(_code(code_of, value) for value in distinct), -1], np.int64)
    codes = np.where(is_absent, -1 if missing is None else missing, codes[places])
    if unseen is not None:
        return np.where((codes < 0) & ~is_absent, unseen, codes)
    if ((codes < 0) & ~is_absent).any():
        row = int(((codes < 0) & ~is_absent).argmax())
        value = canonical(series.iloc[row])
        hint = suggestion(value, values) or f"; it has seen {len(values)} others"
        raise fault(row, name, f"{kind} {short(value)}, which training has not seen{hint}{otherwise}")
    return codes


def _code(code_of: Mapping[str, int], value: Any) -> int:
    text = canonical(value)
    code = code_of.get(text)
    return code_of.get(text.strip(BLANKS), -1) if code is None else code


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value


def _missing(series: Any, name: str, row: int, fault: Fault, advice: str) -> DataError:
    return fault(row, name, f"no value ({int(series.isna().sum())} in all); {advice}")
