"""What columns are for: numbers, categories, the target; and what is refused because it could be meant in two ways."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.data import preprocessing
from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.data.tabular import table_columns
from dptrain.data.tabular.column_blocks import plain_numbers
from dptrain.data.tabular.table_columns import (
    MOST_CLASSES,
    MOST_ONE_HOT,
    TableOptions,
    learn,
    used_columns,
    with_means,
    without_missing,
)
from dptrain.data.tabular.tables import Reading, Table, read_table
from dptrain.errors import ConfigError, DataError
from tests.sample import examples

ROWS = 120
N = np.arange(ROWS)


def learned(target=N / 7, options=None, **columns):
    table = Table("t.csv", pd.DataFrame({"x": N * 1.5} | columns | {"y": target}))
    return learn(table, TableOptions("y", **(options or {})))


def column(values, name="c", **options):
    preprocessing, _ = learned(options=options, **{name: values})
    return preprocessing.columns[1]


def test_types_say_what_is_a_number_and_what_a_category():
    assert column(N % 50) == Column("c", "number")
    assert column(N % 2 == 0) == Column("c", "one-hot", ("False", "True"))
    assert column(["b", "a", "c"] * 40) == Column("c", "one-hot", ("a", "b", "c"), text=True)


def test_numbers_may_be_categories():
    assert column(np.tile([10, 9], 60), categorical=["c"]) == Column("c", "one-hot", ("9", "10"), literal=True)


@pytest.mark.parametrize(("values", "role"), [(MOST_ONE_HOT, "one-hot"), (MOST_ONE_HOT + 1, "embedding")])
def test_large_categories_are_embedded(values, role):
    assert column([f"v{n % values}" for n in N]).role == role


def test_the_columns_are_those_asked_for_in_the_tables_order():
    table = Table("t.csv", pd.DataFrame(columns=["a", "b", "c", "y"]))
    assert used_columns(table, TableOptions("y")) == ["a", "b", "c"]
    assert used_columns(table, TableOptions("y", columns=["c", "a", "y"])) == ["a", "c"]
    assert used_columns(table, TableOptions("y", drop=["b"])) == ["a", "c"]


@pytest.mark.parametrize(
    ("target", "task", "classes"),
    [
        (N / 7, "regression", ()),
        (np.where(N % 3, "yes", "no"), "binary", ("no", "yes")),
        (N % 2 == 0, "binary", ("False", "True")),
        (1.0 * (N % 2), "binary", ("0", "1")),
        (N % 2 + 7, "binary", ("7", "8")),
        (np.array(["r", "g", "b"])[N % 3], "multiclass", ("b", "g", "r")),
        (N % MOST_CLASSES, "multiclass", tuple(map(str, range(MOST_CLASSES)))),
        (N % (MOST_CLASSES + 1), "regression", ()),
        (N, "regression", ()),
    ],
)
def test_the_target_says_the_task(target, task, classes):
    preprocessing, notes = learned(target)
    assert (preprocessing.task, preprocessing.class_names) == (task, classes)
    assert any(note.startswith("target 'y': ") for note in notes)


def test_few_whole_numbers_are_classes_where_each_has_five_rows():
    few = {"x": np.arange(50) * 1.5}
    assert learned(np.arange(50) % 10, **few)[0].task == "multiclass"
    assert learned(np.arange(50) % 11, **few)[0].task == "regression"


@pytest.mark.parametrize(
    ("target", "task", "classes"),
    [
        (N % 5, "regression", 0),
        (N % 50, "multiclass", 50),
        (N % 2, "multiclass", 2),
        (N % 2, "regression", 0),
    ],
)
def test_the_task_may_be_said(target, task, classes):
    preprocessing, _ = learned(target, {"task": task})
    assert (preprocessing.task, len(preprocessing.class_names)) == (task, classes)


def test_many_columns_at_a_time_are_what_each_is_alone(monkeypatch):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "float": rng.normal(size=ROWS),
            "whole": rng.integers(0, 9, ROWS),
            "constant": 1.5,
            "half": rng.normal(size=ROWS).astype(np.float16),
            "far": 1e9 + rng.normal(size=ROWS),
            "gaps": np.where(N % 7, N % 5 + 0.5, np.nan),
            "text": [f"t{n % 3}" for n in N],
            "true": N % 2 == 0,
            "two": np.sort(N % 2),
            "nullable": pd.array(N % 4, "Int64"),
            "y": N / 7,
        }
    )
    table = Table("t.csv", frame)
    options = TableOptions("y", missing="mean")

    def result():
        preprocessing, notes = learn(table, options)
        preprocessing = with_means(preprocessing, table, np.arange(100))
        return preprocessing, notes, preprocessing.encode(frame).tobytes()

    together = result()
    assert {"float", "whole", "half", "nullable"} <= plain_numbers(frame, list(frame))
    monkeypatch.setattr(table_columns, "plain_numbers", lambda frame, names: set())
    monkeypatch.setattr(table_columns, "blocks", lambda frame, names: [])
    monkeypatch.setattr(preprocessing, "fill_numbers", lambda *arguments: set())
    assert result() == together


def test_a_wide_table_takes_no_time_of_pandas_for_each_column(monkeypatch):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 3000)), columns=[f"c{n}" for n in range(3000)])
    frame["y"] = np.arange(20) / 7
    monkeypatch.setattr(table_columns, "_column", None)
    monkeypatch.setattr(preprocessing, "numbers", None)
    learned, _ = learn(Table("t.csv", frame), TableOptions("y", task="regression"))
    np.testing.assert_array_equal(learned.encode(frame), frame.to_numpy()[:, :-1].astype(np.float32))


def test_what_is_decided_is_told():
    _, notes = learned(N, c=["only"] * ROWS, d=["p", "q"] * 60)
    assert notes == [
        "2 columns; numbers: x; one-hot: d (2)",
        "column 'c' is left out: every row has 'only'",
        "target 'y': regression, 120 values from 0 to 119; --loss sparse_categorical_crossentropy for classes",
    ]


def test_numbers_that_float32_does_not_tell_apart_are_told():
    _, notes = learned(time=1.7e9 + N, options={"number_columns": ["time"]})
    assert "column 'time': near 1.7e+09 float32 has steps of 128" in notes[1]
    assert len(learned(time=1.7e9 + 1000 * N, options={"number_columns": ["time"]})[1]) == 2


def texts(**changes):
    values = [f"street {n % 9}" for n in N]
    for row, value in changes.items():
        values[int(row[1:])] = value
    return values


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"c": texts(r3="17")}, r"row 4, column 'c': '17', a number among texts \(1 in all\); correct it, or --categ"),
        ({"c": ["1"] * 119 + ["x"]}, "row 120, column 'c': 'x', text among numbers"),
        ({"c": ["1", "2"] * 60}, "column 'c': holds numbers as text; store them as numbers, or --numbers c, or --cat"),
        ({"c": texts(r5=None)}, r"row 6, column 'c': no value \(1 in all\); fill it in, or use --drop c, "),
        ({"c": [None] * ROWS}, "column 'c': no value in any row; --drop c"),
        ({"c": [f"name {n}" for n in N]}, "120 distinct texts in 120 rows; leave it out"),
        ({"c": pd.to_datetime(["2020-01-01", "2020-01-02"] * 60)}, "column 'c': holds dates .*datetime64"),
        ({"c": ["2020-01-01", "2020-01-02"] * 60}, "column 'c': holds dates, such as '2020-01-01'; .*--numbers c"),
        ({"c": ["31.12.2020", "1/2/20"] * 60}, "column 'c': holds dates, such as '31.12.2020'"),
        ({"target": ["2020-01-01", "2020-01-02"] * 60}, "column 'y': holds dates.*choose another --target"),
        ({"c": N}, "column 'c': distinct integers|distinct integers, from 0 to 119, .*--drop c"),
        ({"c": (N * 77) % ROWS * 1.0}, "column 'c': 120 distinct integers, .*--numbers c"),
        ({"c": N // 10}, "column 'c': integers in order, from 0 to 11, .*--categorical c"),
        ({"c": -(N // 10)}, "column 'c': integers in order"),
        ({"c": np.where(N == 4, np.nan, N), "options": {"missing": "mean"}}, "column 'c': 119 distinct integers"),
        ({"c": 20200101 + N * 7 % 31}, "column 'c': integers that look like dates, from 20200101 to 20200131"),
        ({"c": ["1,5", "2,5"] * 60}, r"row 1, column 'c': '1,5', a number with a comma \(120 in all\)"),
        ({"c": ["1", "2,5", "1.000,25"] * 40}, r"row 2, column 'c': '2,5', a number with a comma \(80 in all\)"),
        ({"target": ["1,5", "2,5"] * 60}, r"row 1, column 'y': '1,5', a number with a comma"),
        ({"c": [[1]] * ROWS}, r"column 'c': \[1\]; expected numbers or texts: --drop c"),
        ({"target": ["one"] * ROWS}, "column 'y': every row has 'one'; there is nothing to learn"),
        ({"target": [3] * ROWS, "options": {"task": "regression"}}, "every row has '3'; there is nothing"),
        ({"target": [f"name {n}" for n in N]}, "column 'y': 120 classes in 120 rows; is it the target"),
        ({"target": ["1"] * 119 + ["x"]}, "row 120, column 'y': 'x', text among numbers"),
        ({"target": np.where(N == 4, np.nan, N)}, r"row 5, column 'y': no value \(1 in all\); leave the row out"),
        ({"target": texts(), "options": {"task": "regression"}}, "expected numbers for a regression"),
        ({"target": texts(), "options": {"task": "binary"}}, "9 values, expected two for --task binary"),
        ({"options": {"drop": ["x"]}}, "no column is left to predict 'y' from"),
        (
            {"options": {"drop": ["xx"]}},
            r"no column 'xx' \(--drop\); did you mean|no column 'xx' \(--drop\); known: x, y",
        ),
        (
            {"c": ["x" * 20_000, "b", "c"] * 40},
            "column 'c': a text of 20,000 characters, at most 10,000 are a category",
        ),
        ({"target": ["x" * 20_000, "b", "c"] * 40}, "column 'y': a text of 20,000 characters"),
        ({"x" * 20_000: N % 7}, "a column's name has 20,000 characters, at most 10,000; rename it"),
        ({"options": {"columns": ["z"]}}, r"no column 'z' \(--columns\); known: x, y"),
    ],
)
def test_what_could_be_meant_in_two_ways_is_refused(columns, message):
    with pytest.raises(DataError, match=f"t.csv.*{message}"):
        learned(**columns)


CODES = [f"{n % 40 + 1:03}" for n in N]


def test_codes_that_begin_with_zeros_are_categories_and_a_note_says_so():
    preprocessing, notes = learned(c=CODES)
    assert preprocessing.columns[1] == Column("c", "embedding", tuple(sorted(set(CODES))), text=True)
    assert "column 'c': a category, because of codes such as '001'; --numbers c otherwise" in notes
    with pytest.raises(DataError, match=r"120 distinct texts in 120 rows.*--categorical c\) or numbers \(--numbers c"):
        learned(c=[f"{n:03}" for n in N])


def test_what_looks_like_identifiers_or_dates_may_be_numbers_or_categories():
    assert column(N, number_columns=["c"]) == Column("c", "number")
    assert column(N, categorical=["c"]).values == tuple(map(str, N))
    assert column(N % 2) == Column("c", "number")  # two values in any order are no identifiers
    with pytest.raises(ConfigError, match="--numbers c: --categorical names the column too"):
        column(N, number_columns=["c"], categorical=["c"])


DAYS = {
    "texts": ["1970-01-02", "1971-01-01 12:00"] * 60,
    "times": pd.to_datetime(["1970-01-02 00:00", "1971-01-01 12:00"] * 60),
    "zone": pd.to_datetime(["1970-01-02 01:00", "1971-01-01 13:00"] * 60).tz_localize("Etc/GMT-1"),
}


@pytest.mark.parametrize("kind", DAYS)
def test_dates_may_be_days(kind):
    preprocessing, notes = learned(c=DAYS[kind], options={"number_columns": ["c"]})
    assert preprocessing.columns[1] == Column("c", "number", date=True)
    assert "column 'c': dates, as days since 1970-01-01" in notes
    assert Preprocessing.from_dict(preprocessing.to_dict()) == preprocessing
    assert preprocessing.encode(pd.DataFrame({"x": [0, 0], "c": DAYS[kind][:2]}))[:, 1].tolist() == [1, 365.5]


@pytest.mark.parametrize("values", [["31.12.2020"], [3]])
def test_days_are_made_of_clear_dates(values):
    preprocessing, _ = learned(c=DAYS["texts"], options={"number_columns": ["c"]})
    with pytest.raises(DataError, match=r"row 0 .*column 'c': .*, expected a date such as 2020-12-31"):
        preprocessing.encode(pd.DataFrame({"x": [0], "c": values}))


def test_missing_dates_are_the_mean():
    frame = pd.DataFrame({"c": ["1970-01-02", None, "1970-01-04", "1970-01-02"], "y": [0.5, 2, 3, 4]})
    table = Table("t.csv", frame)
    preprocessing, _ = learn(table, TableOptions("y", number_columns=["c"], missing="mean"))
    assert with_means(preprocessing, table, np.array([0, 1, 2])).encode(frame)[:, 0].tolist() == [1, 2, 3, 1]


def learned_from_a_file(folder, ending, values, number_columns=()):
    frame = pd.DataFrame({"c": values, "y": N / 7})
    path = folder / f"t.{ending}"
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path)
    table = read_table(path, Reading(number_columns=number_columns))
    preprocessing, _ = learn(table, TableOptions("y", number_columns=number_columns))
    second_table = read_table(
        path, Reading(text_columns=preprocessing.text_columns, number_columns=preprocessing.number_columns)
    )
    return preprocessing.columns[0].role, preprocessing.encode(second_table.frame)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_one_rule_for_all_files(tmp_path, ending):
    role, x = learned_from_a_file(tmp_path, ending, CODES)
    assert (role, x[:3, 0].tolist()) == ("embedding", [0, 1, 2])
    role, x = learned_from_a_file(tmp_path, ending, CODES, ["c"])
    assert (role, x[:3, 0].tolist()) == ("number", [1, 2, 3])
    role, x = learned_from_a_file(tmp_path, ending, ["2020-01-01", "2020-01-02"] * 60, ["c"])
    assert (role, x[:2, 0].tolist()) == ("number", [18262, 18263])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["2020-01-01", "2020-01-02"] * 60, "holds dates"),
        (N, "distinct integers"),
        (["1,5", "2"] * 60, "a number with a comma"),
    ],
)
def test_one_refusal_for_all_files(tmp_path, ending, values, message):
    with pytest.raises(DataError, match=message):
        learned_from_a_file(tmp_path, ending, values)


def test_texts_may_be_half_of_the_rows_or_fifty():
    assert len(column([f"n {n % 60}" for n in N]).values) == 60
    with pytest.raises(DataError, match="61 distinct texts"):
        column([f"n {n % 61}" for n in N])
    assert len(column([f"n {n}" for n in N], categorical=["c"]).values) == ROWS


def test_the_target_is_named_and_is_no_column_to_drop():
    table = Table("t.csv", pd.DataFrame({"a": [1], "b": [2]}))
    with pytest.raises(ConfigError, match="which column is to be predicted\\? --target NAME, one of a, b"):
        used_columns(table, TableOptions())
    with pytest.raises(ConfigError, match="--drop a: the column is used"):
        used_columns(table, TableOptions("a", drop=["a"]))


def test_rows_that_miss_a_value_are_left_out_where_asked():
    table = Table("t.csv", pd.DataFrame({"a": [1, np.nan, 3], "b": [np.nan, 1, 2]}))
    cleaned, notes = without_missing(table, ["a"])
    assert cleaned.frame.index.tolist() == [0, 2]
    assert notes == ["t.csv: 1 of 3 rows miss a value and are left out"]
    with pytest.raises(DataError, match="every row misses a value"):
        without_missing(Table("t.csv", table.frame[:2]), ["a", "b"])


def test_a_category_for_what_is_not_seen_is_set_aside_where_asked():
    values = [f"v{n % 20:02}" for n in N]
    preprocessing, _ = learned(c=values, options={"unseen": "other"})
    known = (*sorted(set(values)), "(other)")
    assert preprocessing.columns[1] == Column("c", "embedding", known, text=True, other="(other)")
    assert preprocessing.unseen == "other"
    with pytest.raises(DataError, match=r"'\(other\)' is a value, but is reserved for unseen ones"):
        learned(c=["(other)", *values[1:]], options={"unseen": "other"})


def test_a_one_hot_category_sets_no_column_for_what_is_not_seen():
    preprocessing, _ = learned(c=["a", "b", "c"] * 40, options={"unseen": "other"})
    assert preprocessing.columns[1] == Column("c", "one-hot", ("a", "b", "c"), text=True)
    frame = pd.DataFrame({"x": [0, 0], "c": ["z", None]})
    assert preprocessing.encode(frame).tolist() == [[0, 0, 0, 0]] * 2


# Missing values that something stands for

GAPS = pd.DataFrame(
    {"n": [1.0, np.nan, 4.5, 100], "c": ["a", None, "b", "a"], "full": [1, 3, 2, 2], "y": [1.0, 2, 3, 4]}
)


def test_missing_categories_are_one_of_their_own_and_means_are_of_the_rows_trained_on():
    table = Table("t.csv", GAPS)
    preprocessing, notes = learn(table, TableOptions("y", missing="mean"))
    assert preprocessing.columns[1] == Column("c", "one-hot", ("a", "b", "(missing)"), text=True, missing="(missing)")
    assert "column 'n': 1 of 4 values are missing; replaced by the mean of the training part" in notes
    assert "column 'c': 1 of 4 values are missing; a separate category" in notes
    assert [column.mean for column in with_means(preprocessing, table, np.array([0, 1, 2])).columns] == [2.75, None, 2]


def test_no_mean_of_nothing():
    table = Table("t.csv", GAPS)
    preprocessing, _ = learn(table, TableOptions("y", missing="mean"))
    with pytest.raises(DataError, match=r"column 'n': no value in the training part; --drop n"):
        with_means(preprocessing, table, np.array([1]))
    with pytest.raises(DataError, match=r"'\(missing\)' is a value, but is reserved for missing ones"):
        learn(Table("t.csv", GAPS.assign(c=["(missing)", None, "b", "b"])), TableOptions("y", missing="mean"))
    with pytest.raises(DataError, match=r"column 'y': no value .*--missing drop"):
        learn(Table("t.csv", GAPS.assign(y=[1.0, np.nan, 2, 3])), TableOptions("y", missing="mean"))


def test_a_column_that_has_one_value_beside_missing_ones():
    frame = GAPS.assign(n=[1.0, np.nan, 1, 1], c=["a", None, "a", "a"])
    preprocessing, notes = learn(Table("t.csv", frame), TableOptions("y", missing="mean"))
    assert [column.name for column in preprocessing.columns] == ["c", "full"]
    assert "column 'n' is left out: every row has '1'" in notes


NUMBERS = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
KINDS = [
    NUMBERS,
    st.sampled_from(["red", "green", "blue"]),
    st.booleans(),
    st.none(),
    st.sampled_from(["1", "x", None]),
]


@settings(max_examples=examples(80), deadline=None)
@given(
    data=st.data(), kinds=st.lists(st.sampled_from(range(len(KINDS))), min_size=2, max_size=5), rows=st.integers(1, 30)
)
def test_any_table_of_a_file_is_refused_or_becomes_finite_numbers(tmp_path_factory, data, kinds, rows):
    columns = {f"c{n}": data.draw(st.lists(KINDS[kind], min_size=rows, max_size=rows)) for n, kind in enumerate(kinds)}
    path = tmp_path_factory.mktemp("table") / "t.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    try:
        table = read_table(path)
        preprocessing, _ = learn(table, TableOptions("c0"))
        x, y = (
            preprocessing.encode(table.frame, fault=table.fault),
            preprocessing.targets(table.frame, fault=table.fault),
        )
    except DataError as error:
        has_place = str(path) in str(error)
    else:
        has_place = True
        assert x.shape == (rows, *preprocessing.sample_shape)
        assert np.isfinite(x).all()
        assert y.shape == (rows,)
        assert preprocessing.task == "regression" or set(y) <= set(range(len(preprocessing.class_names)))
    assert has_place
