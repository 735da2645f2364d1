"""Parquet of strangers: read by a process of its own, in no more memory than it declares."""

import json

import numpy as np
import pandas as pd
import pytest

from dptrain.data.tabular import parquet
from dptrain.data.tabular.table_columns import TableOptions, learn
from dptrain.data.tabular.tables import read_table
from dptrain.errors import DataError

arrow = pytest.importorskip("pyarrow")
arrow_parquet = pytest.importorskip("pyarrow.parquet")

NAMED = {"field_name": "a", "name": "a", "pandas_type": "wat", "numpy_type": "wat", "metadata": None}
METADATA = {
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "a number": b"3",
    "without columns": b"{}",
    "an index that is not there": json.dumps({"index_columns": ["zz"], "columns": [NAMED]}).encode(),
    "unknown types": json.dumps({"index_columns": ["a"], "columns": [NAMED, {"field_name": "y"}]}).encode(),
}


@pytest.mark.parametrize("kind", METADATA)
def test_what_pandas_is_made_to_say_does_not_matter(tmp_path, kind):
    table = arrow.table({"y": [1.5, 2, 3], "a": [3, 1, 3]}).replace_schema_metadata({b"pandas": METADATA[kind]})
    arrow_parquet.write_table(table, tmp_path / "t.parquet")
    frame = read_table(tmp_path / "t.parquet").frame
    assert list(frame.columns) == (["a", "y"] if kind == "unknown types" else ["y", "a"])
    assert frame["a"].tolist() == [3, 1, 3]


@pytest.mark.parametrize(
    "values",
    [arrow.array([b"x" * 1000] * 3), arrow.array([1, 2, 3], arrow.duration("s")), arrow.array([[1], [2], [3]])],
    ids=lambda values: str(values.type),
)
def test_other_types_are_refused_before_they_are_read(tmp_path, values):
    arrow_parquet.write_table(arrow.table({"b": values, "y": [1, 2, 3]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"column 'b': holds .*; expected numbers, texts and booleans"):
        read_table(tmp_path / "t.parquet")


def test_a_text_that_is_stored_once_takes_its_place_once(tmp_path):
    """5 GB, if each row had a text of its own."""
    dictionary = arrow.DictionaryArray.from_arrays(
        arrow.array([0] * 5000, arrow.int32()), arrow.array(["x" * 1_000_000])
    )
    other = {"y": np.arange(5000) % 7 / 2, "z": np.arange(5000) % 3}
    arrow_parquet.write_table(arrow.table({"s": dictionary, **other}), tmp_path / "t.parquet", compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 50_000
    preprocessing, _ = learn(read_table(tmp_path / "t.parquet", max_bytes=10_000_000), TableOptions("y"))
    assert [column.name for column in preprocessing.columns] == ["z"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", r"t\.parquet: not a Parquet file, or damaged \(its reader died of SIGABRT\)"),
        ("raise SystemError('x')", r"damaged \(its reader failed: SystemError: x\)"),
        ("import time; time.sleep(60)", r"damaged \(not read within 2 s\)"),
        ("bytearray(1 << 40)", r"its reader failed: MemoryError"),
    ],
)
def test_a_reader_that_aborts_takes_nobody_with_it(tmp_path, monkeypatch, code, message):
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "t.parquet")
    (tmp_path / "child.py").write_text(code)
    monkeypatch.setattr(parquet, "CHILD", tmp_path / "child.py")
    if "sleep" in code:  # else the others have less time than a busy machine takes to start Python
        monkeypatch.setattr(parquet, "_PATIENCE", 2.0)
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / "t.parquet", max_bytes=1000)


@pytest.mark.long
def test_a_wide_table_of_one_row_is_read(tmp_path):
    """What reads 20,000 columns takes more memory than what is in them."""
    arrow_parquet.write_table(arrow.table({str(number): [0.5] for number in range(20_000)}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").frame.shape == (1, 20_000)


def test_memory_is_bounded_by_what_is_declared(tmp_path, monkeypatch):
    from dptrain.data.tabular import parquet_child

    script = tmp_path / "child.py"
    source = (parquet.Path(parquet_child.__file__)).read_text()
    script.write_text(
        source.replace("            texts = [", "            bytearray(1 << 29)\n            texts = [", 1)
    )
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "t.parquet")
    monkeypatch.setattr(parquet, "CHILD", script)
    with pytest.raises(DataError, match="takes more memory than it declares"):
        read_table(tmp_path / "t.parquet")


def test_modules_of_the_folder_at_hand_are_not_what_the_reader_imports(tmp_path, monkeypatch):
    (tmp_path / "pyarrow.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "t.parquet")
    monkeypatch.chdir(tmp_path)
    assert len(read_table("t.parquet")) == 1
    assert not (tmp_path / "ran").exists()
