"""Rows given as records and as dicts of columns are encoded like data frames, with and without pandas."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.data.tabular import records
from dptrain.errors import DataError

TABLE = Preprocessing(
    task="regression",
    columns=(
        Column("rooms", "number", mean=2.5),
        Column("area", "number"),
        Column("built", "number", date=True),
        Column("street", "embedding", ("1", "b", "True", "(missing)"), missing="(missing)"),
        Column("heating", "one-hot", ("gas", "oil")),
        Column("text", "words", ("warm", "house"), text=True, length=3),
    ),
    target="price",
)
ROW = {
    "rooms": 3,
    "area": 70.5,
    "built": "2020-12-31",
    "street": "b",
    "heating": "oil",
    "text": "A warm house",
    "price": 9,
}
X = [[3, 70.5, 18627, 0, 1, 1, 1, 2, 3]]


@pytest.mark.parametrize(
    "rows",
    [ROW, [ROW], (ROW,), {name: [value] for name, value in ROW.items()}, pd.DataFrame([ROW])],
    ids=["record", "list", "tuple", "columns", "frame"],
)
def test_each_form_of_a_row_is_the_same_row(rows):
    assert TABLE.takes(rows)
    assert TABLE.encode(rows).tolist() == X
    assert TABLE.has_target(rows)
    assert TABLE.targets(rows).tolist() == [9]


CELLS = {
    "rooms": [None, math.nan, 0, -0.0, 1e38, 1e39, math.inf, True, "3", "three", 10**400, [1], np.float32(2), 2**70],
    "area": [None, math.nan, 5],
    "built": ["2020-1-5", "1969-12-31", "2020-02-30", "0001-01-01", "x", None, 7, "2020-12-31T10:00"],
    "street": [1, 1.0, True, "True", "c", 2.5, math.nan, [1], np.int64(1), ""],
    "heating": ["gas", "coal", None, 1, {"a": 1}],
    "text": ["", "WARM, warm! cold house", None, 3, "x" * 50],
}


def outcome(encode, *arguments, **options):
    """Return what is encoded, or why not."""
    try:
        return encode(*arguments, **options).tolist()
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("unseen", ["error", "missing", "other"])
@pytest.mark.parametrize(("name", "cell"), [(name, cell) for name, cells in CELLS.items() for cell in cells], ids=str)
def test_a_cell_is_what_it_is_in_a_frame(monkeypatch, name, cell, unseen):
    """Or it is refused for the same reason; only records say of what is no scalar that it is none."""
    row = ROW | {name: cell}
    seen = outcome(TABLE.encode, [row], unseen=unseen)
    if isinstance(cell, list | dict):
        assert "expected a number, a text or null" in seen
        return
    frame = pd.DataFrame([row])
    assert outcome(TABLE.encode, frame, unseen=unseen) == seen
    monkeypatch.setattr(records, "FEW", 0)
    assert outcome(TABLE.encode, frame, unseen=unseen) == seen


# Every option of a column, several together.
WITH_OPTIONS = Preprocessing(
    task="regression",
    columns=(
        Column("weight", "number", mean=1.5, indicator=True),
        Column("paid", "number", mean=2.0, notation="comma", sign="€", indicator=True),
        Column("sold", "number", mean=18000.5, date=True, parts=("month", "weekday", "hour"), indicator=True),
        Column("made", "number", date=True, formats=("ISO8601", "%d.%m.%Y"), parts=("day",)),
        Column("brand", "embedding", ("a", "b", "(other)"), text=True, other="(other)", rare=("z", "y")),
        Column(
            "size", "one-hot", ("1", "2", "(missing)", "(other)"), missing="(missing)", other="(other)", rare=("9",)
        ),
        Column("code", "one-hot", ("NA", "x"), text=True, literal=True),
        Column("note", "words", ("warm", "house"), text=True, length=3, missing=""),
    ),
    target="price",
    na=("none at all",),
)
ROW_WITH_OPTIONS = {
    "weight": 3,
    "paid": "1.234,5",
    "sold": "2020-12-31",
    "made": "31.12.2020",
    "brand": "b",
    "size": 2,
    "code": "x",
    "note": "A warm house",
}
NOTHING = [None, math.nan, "", " ", "NA", "none at all"]
CELLS_WITH_OPTIONS = {
    "weight": [*NOTHING, 0, "3", math.inf],
    "paid": [*NOTHING, "1.234,5 €", "€ 7", "$ 7", 7, 7.5, "x"],
    "sold": [*NOTHING, "2020-12-31 18:30", "2020-02-30", 7, "31.12.2020"],
    "made": [*NOTHING, "2020-12-31", "12/31/2020", 7],
    "brand": [*NOTHING, "z", "y", "never seen", 7],
    "size": [*NOTHING, 9, "9", 1.0, "never seen"],
    "code": [*NOTHING, "y", 7],
    "note": [*NOTHING, "cold", 7],
}


def test_every_option_of_a_column_is_tried():
    plain = {field.name: field.default for field in dataclasses.fields(Column)}
    tried = {
        name for column in WITH_OPTIONS.columns for name, default in plain.items() if getattr(column, name) != default
    }
    assert tried == plain.keys()


@pytest.mark.parametrize("unseen", ["error", "missing", "other"])
@pytest.mark.parametrize(
    ("name", "cell"),
    [(name, cell) for name, cells in CELLS_WITH_OPTIONS.items() for cell in cells],
    ids=str,
)
def test_a_cell_of_a_column_with_options_is_what_it_is_in_a_frame(monkeypatch, name, cell, unseen):
    """Alone and beside another row."""
    rows = [ROW_WITH_OPTIONS | {name: cell}, ROW_WITH_OPTIONS]
    for some in (rows[:1], rows):
        frame = pd.DataFrame(some, dtype=object)
        seen = outcome(WITH_OPTIONS.encode, some, unseen=unseen)
        assert outcome(WITH_OPTIONS.encode, frame, unseen=unseen) == seen
        with monkeypatch.context() as patch:
            patch.setattr(records, "FEW", 0)
            assert outcome(WITH_OPTIONS.encode, frame, unseen=unseen) == seen


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW, {**ROW, "area": None}], r"row 1 .*column 'area': no value"),
        ([ROW, {name: value for name, value in ROW.items() if name != "area"}], r"row 1 .*no column 'area'.*null"),
        (
            [{"romms" if name == "rooms" else name: ROW[name] for name in ROW}],
            "no column 'rooms'; did you mean 'romms'",
        ),
        ([ROW, 7], r"row 1 .*7; expected a record"),
        ({**ROW, "area": [1, 2]}, "column 'rooms': one value, other columns have 2"),
        ({name: [value] for name, value in ROW.items()} | {"area": [1, 2]}, "1 values, other columns have 2"),
        ({name: value for name, value in ROW.items() if name != "area"}, "no column 'area'"),
    ],
    ids=str,
)
def test_rows_that_are_no_table(rows, message):
    with pytest.raises(DataError, match=message):
        TABLE.encode(rows)


def test_a_model_of_a_table_predicts_records():
    model = dp.Sequential([layers.Input((3,)), layers.Dense(1)])
    model.preprocessing = Preprocessing(
        "regression", (Column("rooms", "number"), Column("heating", "one-hot", ("gas", "oil"))), "price"
    )
    record = {"rooms": 2, "heating": "gas", "price": "not looked at"}
    alone = model.predict(np.float32([[2, 1, 0]]), verbose=0)
    for rows in (record, [record], {name: [value] for name, value in record.items()}, pd.DataFrame([record])):
        np.testing.assert_array_equal(model.predict(rows, verbose=0), alone)


def test_a_model_of_arrays_says_why_it_does_not_take_records():
    model = dp.Sequential([layers.Input((3,)), layers.Dense(1)])
    with pytest.raises(DataError, match="trained on a table, and this one was not: pass an array"):
        model.predict([{"rooms": 2}], verbose=0)
