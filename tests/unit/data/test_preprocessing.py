"""What a model remembers of its raw data: columns, categories, classes; and what a file may claim of them."""

import contextlib
import copy

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.errors import DataError
from tests.sample import examples

HOUSES = Preprocessing(
    task="regression",
    columns=(
        Column("rooms", "number"),
        Column("street", "embedding", ("a", "b", "c")),
        Column("heating", "one-hot", ("gas", "oil")),
    ),
    target="price",
)
FRAME = pd.DataFrame(
    {"heating": ["oil", "gas"], "price": [10, 20], "rooms": [3, 4], "street": ["c", "a"], "id": [7, 8]}
)


def test_numbers_and_one_hot_come_first_then_codes():
    assert HOUSES.encode(FRAME).tolist() == [[3, 0, 1, 2], [4, 1, 0, 0]]
    assert HOUSES.encode(FRAME).dtype == np.float32
    assert HOUSES.is_number.tolist() == [True, False, False]
    assert HOUSES.sample_shape == (4,)


def test_targets_are_numbers_or_places_of_classes():
    assert HOUSES.targets(FRAME).tolist() == [10, 20]
    classes = Preprocessing("binary", (Column("rooms", "number"),), "heating", ("gas", "oil"))
    assert classes.targets(FRAME).tolist() == [1, 0]


def test_whole_numbers_are_one_category_however_they_are_stored():
    preprocessing = Preprocessing("regression", (Column("zip", "one-hot", ("1", "20")),))
    for column in (["1", "20"], [1, 20], [1.0, 20.0]):
        assert preprocessing.encode(pd.DataFrame({"zip": column})).tolist() == [[1, 0], [0, 1]]


def test_categories_that_training_has_not_seen_are_what_is_asked_for():
    unseen = FRAME.assign(heating=["coal", "gas"])
    with pytest.raises(DataError, match=r"category 'coal', which training has not seen.*see --unseen"):
        HOUSES.encode(unseen)
    assert HOUSES.encode(unseen, unseen="other")[0].tolist() == [3, 0, 0, 2]
    with pytest.raises(DataError, match=r"'coal'.*it has no replacement \(--unseen missing\)"):
        HOUSES.encode(unseen, unseen="missing")
    assert HOUSES.encode(FRAME, unseen="missing").tolist() == HOUSES.encode(FRAME).tolist()
    street = FRAME.assign(street=["z", "a"])
    with pytest.raises(DataError, match=r"'z'.*unless the training has --unseen other"):
        HOUSES.encode(street, unseen="other")
    other = Column("street", "embedding", ("a", "(other)"), other="(other)")
    trained = Preprocessing("regression", (other,), unseen="other")
    assert trained.encode(street)[:, 0].tolist() == [1, 0]
    assert Preprocessing.from_dict(trained.to_dict()) == trained
    with pytest.raises(DataError, match="which training has not seen"):
        trained.encode(street, unseen="error")
    gaps = Preprocessing("regression", (Column("c", "one-hot", ("a", "(missing)"), missing="(missing)"),))
    assert gaps.encode(pd.DataFrame({"c": ["z", "a"]}), unseen="missing").tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rooms": None}, r"no column 'rooms'; known: heating, id, price, street"),
        ({"rooms": None, "roms": [1, 2]}, r"no column 'rooms'; did you mean 'roms'"),
        ({"rooms": [1, np.nan]}, r"row 1 \(counted from 0\), column 'rooms': no value \(1 in all\); fill it in"),
        ({"rooms": [np.inf, 1]}, "row 0 .*column 'rooms': inf is infinite"),
        ({"rooms": [1, 1e39]}, "row 1 .*too large for float32"),
        ({"rooms": ["3", "x"]}, "row 1 .*'x' among numbers"),
        ({"rooms": ["3", "4"]}, "row 0 .*'3', a number as text; store numbers"),
        ({"heating": ["oil", "goil"]}, "row 1 .*category 'goil', which training has not seen; did you mean 'oil'"),
        ({"heating": ["oil", None]}, "row 1 .*column 'heating': no value"),
    ],
)
def test_raw_data_of_another_kind_is_refused(change, message):
    frame = FRAME.assign(**{name: value for name, value in change.items() if value is not None})
    frame = frame.drop(columns=[name for name, value in change.items() if value is None])
    with pytest.raises(DataError, match=message):
        HOUSES.encode(frame, "houses")


GAPS = Preprocessing(
    "regression",
    (
        Column("rooms", "number", mean=2.5),
        Column("street", "embedding", ("a", "?"), missing="?"),
        Column("heating", "one-hot", ("gas", "oil", "?"), missing="?"),
    ),
    "price",
)


@pytest.mark.parametrize("absent", [None, np.nan, pd.NA])
@pytest.mark.parametrize("dtype", [object, "Int64", "float64"])
def test_something_stands_for_missing_values(absent, dtype):
    if dtype == "float64" and absent is pd.NA:
        absent = np.nan
    rooms = pd.Series([absent, 3], dtype=dtype)
    frame = pd.DataFrame({"rooms": rooms, "street": [absent, "a"], "heating": ["oil", absent]})
    assert GAPS.encode(frame).tolist() == [[2.5, 0, 1, 0, 1], [3, 0, 0, 1, 0]]


def test_what_never_was_missing_still_must_not_be():
    with pytest.raises(DataError, match=r"row 0 .*column 'heating': no value"):
        HOUSES.encode(FRAME.assign(heating=[None, "gas"]))
    with pytest.raises(DataError, match=r"row 0 .*'x' among numbers"):
        GAPS.encode(FRAME.assign(rooms=["x", None]))


def test_a_file_of_an_earlier_build_has_nothing_for_missing_values():
    tree = HOUSES.to_dict() | {"format": 1}
    for column in tree["columns"]:
        del column["mean"], column["missing"]
    assert Preprocessing.from_dict(tree) == HOUSES


def test_a_column_twice_is_refused():
    with pytest.raises(DataError, match="houses: 2 times the column 'rooms'; rename one"):
        HOUSES.encode(pd.concat([FRAME, FRAME[["rooms"]]], axis=1), "houses")


PICTURES = Preprocessing("multiclass", class_names=("cat", "dog", "eel"), picture=(32, 24, 3))


@pytest.mark.parametrize(
    "one", [HOUSES, GAPS, PICTURES, Preprocessing("regression")], ids=["table", "gaps", "pictures", "arrays"]
)
def test_it_comes_back_from_json(one):
    assert Preprocessing.from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 6}, "format 6, this build reads <= 5"),
        ({"format": True}, "format True"),
        ({"task": "rm -rf"}, "task"),
        ({"code": "import os"}, "code"),
        ({"picture": [1 << 20, 3, 3]}, r"picture\.0"),
        ({"picture": [4, 4, 2]}, r"picture\.2"),
        ({"picture": [4, 4, 3]}, "a table or pictures"),
        ({"class_names": ["a", "b"]}, "as many classes"),
        ({"target": "rooms"}, "names of their own"),
        ({"target": 7}, "target"),
        ({"columns": [{"name": "x" * 20_000, "role": "number"}]}, "name"),
        ({"columns": [{"name": "x", "role": "number", "values": ["a"]}]}, "a number has no categories"),
        ({"columns": [{"name": "x", "role": "one-hot"}]}, "every other column has"),
        ({"columns": [{"name": "x", "role": "one-hot", "values": ["a", "a"]}]}, "no category twice"),
        ({"columns": [{"name": "x", "role": "number", "missing": "a"}]}, "a number has a mean"),
        ({"columns": [{"name": "x", "role": "one-hot", "values": ["a"], "mean": 1.0}]}, "a number has a mean"),
        ({"columns": [{"name": "x", "role": "one-hot", "values": ["a"], "missing": "b"}]}, "a number has a mean"),
        ({"columns": [{"name": "x", "role": "number", "mean": float("inf")}]}, "mean"),
        ({"columns": "rooms"}, "columns"),
    ],
)
def test_a_file_that_lies_is_refused(change, message):
    with pytest.raises(DataError, match=f"file: .*{message}"):
        Preprocessing.from_dict(HOUSES.to_dict() | change, "file")


@pytest.mark.parametrize("tree", [None, [], "x", {}, {"format": 1}, {"format": 1, "task": float("nan")}])
def test_what_is_no_description_is_refused(tree):
    with pytest.raises(DataError):
        Preprocessing.from_dict(tree)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(60), deadline=None)
@given(key=st.sampled_from(sorted(HOUSES.to_dict())), inner=st.sampled_from(["name", "role", "values", ""]), value=JSON)
def test_any_damage_is_refused_as_such_or_does_no_harm(key, inner, value):
    tree = copy.deepcopy(HOUSES.to_dict())
    if inner:
        tree["columns"] = [{**tree["columns"][0], inner: value}]
    else:
        tree[key] = value
    with contextlib.suppress(DataError):  # anything else is a fault
        Preprocessing.from_dict(tree)


def test_numbers_stored_as_objects_are_numbers():
    frame = FRAME.assign(rooms=pd.Series([3, np.float32(4)], dtype=object))
    assert HOUSES.encode(frame)[:, 0].tolist() == [3, 4]
