"""Tables as they come from spreadsheets, shops and offices: each has what a newcomer stumbles over."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 120


@dataclass(frozen=True)
class Awkward:
    """A table's text, its target, and what the message about it says; empty where there is none."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    target: str
    message: Sequence[str] = ()
    separator: str = ","
    encoding: str = "utf-8"
    ending: str = "\n"

    def write(self, path: Path, rows: slice = slice(None)) -> Path:
        """Write some of the rows."""
        with path.open("w", encoding=self.encoding, newline="") as file:
            writer = csv.writer(file, delimiter=self.separator, lineterminator=self.ending)
            writer.writerows([self.header, *self.rows[rows]])
        return path


def _rows(seed: int, *columns: Any) -> list[list[Any]]:
    """Return rows of columns: functions of the row's number and a generator, or lists to choose from."""
    rng = np.random.default_rng(seed)
    return [
        [column(row, rng) if callable(column) else column[int(rng.integers(len(column)))] for column in columns]
        for row in range(ROWS)
    ]


def _date(form: str) -> Any:
    start = np.datetime64("2019-01-01")
    return lambda row, rng: (start + int(rng.integers(700))).item().strftime(form)


def _german(low: int, high: int, digits: int) -> Any:
    return lambda row, rng: (
        f"{rng.uniform(low, high):,.{digits}f}".replace(",", " ").replace(".", ",").replace(" ", ".")
    )


TABLES = {
    "a house price table": Awkward(
        ["Id", "LotFrontage", "Alley", "Street", "LotArea", "YrSold", "Sale Type", "Date Sold", "SalePrice"],
        _rows(
            1,
            *(lambda row, rng: row + 1, ["", 60, 70.5, 80], ["NA", "NA", "Grvl", "Pave"], ["Pave"]),
            *(lambda row, rng: int(rng.integers(2000, 90_000)), [2006, 2007, 2008]),
            *(
                lambda row, rng: ["New", "COD", "Con"][row % 3] if row < 9 else "WD",
                _date("%m/%d/%Y"),
                lambda row, rng: int(rng.integers(50, 500)) * 1000,
            ),
        ),
        "SalePrice",
        (
            "column 'Id': 120 distinct integers",
            "'Date Sold': holds dates",
            "2 columns miss values: LotFrontage",
            "--categorical Alley keeps words such as NA",
        ),
    ),
    "decimal commas and semicolons": Awkward(
        ["Kennung", "Fläche", "Grund", "Baujahr", "Verkauft am", "Preis"],
        _rows(
            2,
            *(
                lambda row, rng: f"A-{row:05}",
                _german(20, 90, 1),
                lambda row, rng: f"{rng.integers(1, 9)}.{row + 100:03}",
            ),
            *([1990, 2005], _date("%d.%m.%Y"), lambda row, rng: _german(100_000, 900_000, 2)(row, rng) + " €"),
        ),
        "Preis",
        ("120 distinct texts in 120 rows; leave it out (--drop Kennung)", "--decimal comma", "--dates 'Verkauft am'"),
        separator=";",
    ),
    "dates in several formats": Awkward(
        ["iso", "dots", "words", "compact", "mixed", "clock", "y"],
        _rows(
            3,
            *(_date("%Y-%m-%d"), _date("%d.%m.%Y"), _date("%b %d, %Y"), _date("%Y%m%d")),
            lambda row, rng: _date("%Y-%m-%d" if row % 2 else "%d.%m.%Y")(row, rng),
            lambda row, rng: _date("%d/%m/%Y")(row, rng) + f" {row % 24}:30",
            lambda row, rng: round(float(rng.normal()), 3),
        ),
        "y",
        ("--dates iso (days", "--dates dots (days", "--dates words", "integers that look like dates", "--dates clock"),
    ),
    "percentages and currency": Awkward(
        ["fee", "rate", "change", "y"],
        _rows(
            4,
            lambda row, rng: f"${rng.uniform(1000, 9000):,.2f}",
            lambda row, rng: f"{rng.uniform(0, 100):.1f}%",
            *(["(1,200)", "1,500", "2,300"], lambda row, rng: f"€{rng.uniform(1, 9):.2f}"),
        ),
        "y",
        ("a number with a comma or blanks; read them as thousands (--numbers change)",),
    ),
    "identifiers and free text": Awkward(
        ["customer_id", "uuid", "order no", "code", "area", "note", "y"],
        _rows(
            5,
            *(lambda row, rng: 100_000 + 7 * row, lambda row, rng: f"{rng.integers(2**62):016x}"),
            *(lambda row, rng: row, lambda row, rng: f"{rng.integers(40):03}", lambda row, rng: 1000 + 37 * row),
            lambda row, rng: " ".join(rng.choice(["good", "bad", "a", "house", "by", "sea"], 7)) + f" {row}",
            ["a", "b", "c"],
        ),
        "y",
        ("--drop customer_id", "--drop uuid", "--drop 'order no'", "--numbers area", "declare it a text (--text note)"),
    ),
    "words for nothing": Awkward(
        ["a", "b", "c", "country", "y"],
        _rows(6, [1, 2.5, 3, "N.A."], [4, 5, "-", "?"], ["x", "y", ""], ["NA", "DE", "FR"], ["", *np.arange(1.5, 40)]),
        "y",
        (
            "'N.A.', text among numbers",
            "take it for missing (--na 'default,-,?' --missing indicator)",
            "leave the row out, or use --missing drop, or --missing indicator",
            "--categorical country keeps words such as NA as values",
        ),
    ),
    "constant and empty columns": Awkward(
        ["k", "same", "two", "empty", "y"],
        _rows(7, [5], ["same"], [1, 2], [""], ["yes", "no"]),
        "y",
        ("column 'empty': no value in any row; --drop empty",),
    ),
    "rare categories and classes": Awkward(
        ["city", "age", "y"],
        _rows(
            8,
            lambda row, rng: f"c{row % 6}" if row < 80 else f"rare {row}",
            *([20, 30, 40], lambda row, rng: ("a", "b")[row % 2] if row else "once"),
        ),
        "y",
    ),
    "booleans, a BOM and blanks": Awkward(
        ["smoker", "active", "likes ", " Age ", "y"],
        _rows(9, ["yes", "no"], ["TRUE", "FALSE"], ["Y ", "N"], [30, 40, "50 "], ["yes ", "no"]),
        "y",
        encoding="utf-8-sig",
        ending="\r\n",
    ),
    "mixed types and a bad header": Awkward(
        ["", "rooms, all", "value", "value", "size", "y"],
        _rows(
            10,
            *(lambda row, rng: row, [1, 2, 3, "5+"], lambda row, rng: round(float(rng.normal()), 2), [3, 4, 5]),
            *(["12", "inf", 15, 20], lambda row, rng: round(float(rng.normal()), 2)),
        ),
        "y",
        (
            "2 columns are called 'value'; column 1 has no name; rename them, or --repair-header",
            "'5+', text among numbers",
            """--categorical '"rooms, all"'""",
            "inf is infinite",
        ),
    ),
}
