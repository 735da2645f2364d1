"""Rows of x read back as the table's rows."""

import numpy as np
import pandas as pd

from dptrain.cli.reporting.columns import columns_of, row_of
from dptrain.data.preprocessing import Column, Preprocessing

COLUMNS = (
    Column("note", "words", ("big", "old"), length=4),
    Column("city", "one-hot", ("Berlin", "<b>Paris")),
    Column("area", "number"),
    Column("street", "embedding", ("a", "b", "c")),
    Column("built", "number", date=True),
)
TABLE = Preprocessing("regression", COLUMNS, "price")


def test_a_row_is_what_the_table_had():
    frame = pd.DataFrame(
        {
            "area": [0.1, 1200.0],
            "built": ["1971-05-16", "2020-12-31T06:30:00"],
            "city": ["<b>Paris", "Berlin"],
            "note": ["Big, new", ""],
            "street": ["c", "a"],
        }
    )
    x = TABLE.encode(frame)
    assert row_of(TABLE, x[0]) == {
        "note": "big …",
        "city": "<b>Paris",
        "area": "0.1",
        "street": "c",
        "built": "1971-05-16",
    }
    assert list(row_of(TABLE, x[0])) == ["note", "city", "area", "street", "built"], "in the table's order"
    assert row_of(TABLE, x[1]) | {} == {
        "note": "…",
        "city": "Berlin",
        "area": "1200",
        "street": "a",
        "built": "2020-12-31 06:30",
    }


def test_what_training_has_not_seen_and_dates_beyond_the_calendar():
    x = np.zeros(9, np.float32)
    parts = {column.name: part for column, part in columns_of(TABLE)}
    x[parts["street"]], x[parts["built"]] = 7, 1e12
    row = row_of(TABLE, x)
    assert (row["city"], row["street"], row["built"]) == ("(unseen)", "(unseen)", "1e+12 days since 1970")


def test_columns_cover_x():
    assert [(column.name, part.start, part.stop) for column, part in columns_of(TABLE)] == [
        ("city", 0, 2),
        ("area", 2, 3),
        ("built", 3, 4),
        ("street", 4, 5),
        ("note", 5, 9),
    ]


def test_dates_with_parts_numbers_with_signs_and_missing_ones():
    columns = (
        Column(
            "sold", "number", date=True, formats=("%d.%m.%Y",), parts=("month", "weekday"), mean=1.0, indicator=True
        ),
        Column("price", "number", notation="comma", sign="€", mean=5.5, indicator=True),
    )
    table = Preprocessing("regression", columns, "y", na=("?",))
    x = table.encode([{"sold": "31.12.2020", "price": "1.200,5 €"}, {"sold": None, "price": "?"}])
    assert x.tolist() == [[18627, 12, 3, 0, 1200.5, 0], [1, 6.5, 3, 1, 5.5, 1]]
    assert table.is_number.tolist() == [True, True, True, False, True, False]
    assert row_of(table, x[0]) == {"sold": "2020-12-31", "price": "1200.5"}
    assert row_of(table, x[1]) == {"sold": "(missing)", "price": "(missing)"}
    assert Preprocessing.from_dict(table.to_dict()) == table
