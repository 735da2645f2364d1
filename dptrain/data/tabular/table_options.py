"""What the command line says of a table, and options as it writes them."""

import csv
import dataclasses
import io
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dptrain.data.preprocessing import Unseen
from dptrain.data.tabular.table_codes import BLANKS
from dptrain.data.tabular.tables import Reading
from dptrain.data.tasks import Task

DEFAULT_WORDS = "default"
"""Of `--na`: the words that stand for a missing value by default."""

FEW_ROWS = 5
"""Rows of a category below which `auto` joins it with the other rare ones."""


@dataclass(frozen=True)
class TableOptions:
    """The command line's options for a table."""

    target: str | None = None  # the column to predict
    columns: Sequence[str] = ()  # used ones; empty for all
    drop: Sequence[str] = ()
    categorical: Sequence[str] = ()  # categories, whatever they look like
    number_columns: Sequence[str] = ()  # numbers, and dates as days, whatever they look like
    texts: Sequence[str] = ()  # columns whose words count
    words: int = 10_000  # of a text's vocabulary at most
    text_length: int = 200  # words of a text that count, at most
    unseen: Unseen | None = None  # as `Preprocessing.encode`
    # "stop" at a missing value, "drop" the row, or fill in the "mean" and a category for missing values, with an
    # "indicator" beside each number
    missing: str = "stop"
    test: str | None = None  # a file of the test part; None splits the table
    test_split: float = 0.2
    task: Task | None = None  # None for what the target looks like
    dates: Sequence[str] = ()  # columns of dates, also with their format: "sold=%d.%m.%Y"
    na: Sequence[str] = (DEFAULT_WORDS,)  # words that stand for a missing value
    decimal: Literal["auto", "point", "comma"] = "auto"  # mark of numbers in texts
    rare: int | None = None  # a category of fewer rows counts as another; None for none, with `auto` FEW_ROWS
    repair_header: bool = False
    auto: bool = False  # decide what could be meant in two ways

    @property
    def na_words(self) -> list[str]:
        """The words of `na` that are not the default's."""
        return [word.strip(BLANKS) for word in self.na if word != DEFAULT_WORDS]

    @property
    def literal_columns(self) -> list[str]:
        """Columns in which words such as NA are values."""
        return [*self.categorical, *self.texts]

    @property
    def date_formats(self) -> dict[str, str | None]:
        """The columns of `dates` with their formats, as written; a name may contain "=", too."""
        formats: dict[str, str | None] = {}
        for entry in self.dates:
            name, _, form = entry.rpartition("=")
            has_format = "%" in form and bool(name)
            formats[name if has_format else entry] = form if has_format else None
        return formats

    def reading(self) -> Reading:
        """Return how the table's file is read; a header that needs repairs is learned of later."""
        return Reading(
            text_columns=[*self.categorical, *self.texts],
            number_columns=self.number_columns,
            literal_columns=self.literal_columns,
            na=self.na_words,
            default_na=DEFAULT_WORDS in self.na,
            decimal_comma=self.decimal == "comma",
            repairs_header=True,
        )


# The fields behind options that list several values, and behind others.
_LISTS = {
    **{"drop": "drop", "categorical": "categorical", "numbers": "number_columns", "text": "texts"},
    **{"dates": "dates", "na": "na"},
}
_VALUES = {"missing": "missing", "decimal": "decimal", "repair-header": "repair_header"}

Mend = Mapping[str, Sequence[str]]
"""Options that settle something, each with its values."""


def option(name: str, values: str | Sequence[str] = ()) -> str:
    """Return an option as it is typed in a shell: `--drop 'Sale Price,id'`."""
    values = [values] if isinstance(values, str) else values
    if not values:
        return f"--{name}"
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return f"--{name} {shlex.quote(text.getvalue())}"


def options_of(mends: Iterable[Mend], options: TableOptions) -> str:
    """Return together, as they are typed, the options that settle everything."""
    gathered: dict[str, dict[str, None]] = {}
    for mend in mends:
        for name, values in mend.items():
            before = getattr(options, _LISTS[name]) if name in _LISTS else ()
            gathered.setdefault(name, dict.fromkeys(before)).update(dict.fromkeys(values))
    return " ".join(option(name, [*values]) for name, values in gathered.items())


def mended(options: TableOptions, mends: Iterable[Mend]) -> TableOptions:
    """Return options with those that settle something."""
    for mend in mends:
        for name, values in mend.items():
            changes: dict[str, object]
            if name in _LISTS:
                changes = {_LISTS[name]: tuple(dict.fromkeys([*getattr(options, _LISTS[name]), *values]))}
            else:
                changes = {_VALUES[name]: values[0] if values else True}
            options = dataclasses.replace(options, **changes)  # type: ignore[arg-type]
    texts = [name for name in options.texts if name not in options.drop]  # what is left out is no text any more
    return options if len(texts) == len(options.texts) else dataclasses.replace(options, texts=texts)
