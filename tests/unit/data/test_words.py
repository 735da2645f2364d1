"""Texts of tables and folders: words, ids, vocabularies; and what is refused."""

import os

import numpy as np
import pandas as pd
import pytest

from dptrain.data import preprocessing as preprocessing_module
from dptrain.data.preprocessing import Column, Preprocessing, within_limits
from dptrain.data.readers import text_folder
from dptrain.data.readers.text_folder import folder_options, is_text_folder, learn_text_folder, read_text_folder
from dptrain.data.tabular.table_columns import TableOptions, learn
from dptrain.data.tabular.tables import Table
from dptrain.data.words import encode_texts, learn_vocabulary, split_words, word_ids
from dptrain.errors import ConfigError, DataError
from dptrain.layers import TextVectorization

TEXTS = ["The cat, the dog!", "A dog's day", "...", "cat  sat\nthe\tmat"]
FRAME = pd.DataFrame({"review": TEXTS * 5, "stars": np.arange(20) * 1.5, "y": ["a", "b"] * 10})


def learned(frame=FRAME, **options):
    return learn(Table("t.csv", frame), TableOptions("y", texts=("review",), **options))


def test_words_are_those_of_the_layer():
    layer = TextVectorization(vocabulary=list(learn_vocabulary(TEXTS, 100)), output_sequence_length=4)
    expected = np.asarray(layer(TEXTS))
    expected[2, 0] = 1  # a text without words is one that nobody knows
    np.testing.assert_array_equal(encode_texts(TEXTS, word_ids(learn_vocabulary(TEXTS, 100)), 4), expected)
    assert split_words("It's, ÄÖ") == ["its", "äö"]


def test_the_most_frequent_words_are_known():
    assert learn_vocabulary(TEXTS, 2) == ("the", "cat")
    np.testing.assert_array_equal(encode_texts(["the dog cat", ""], word_ids(["the", "cat"]), 2), [[2, 1], [1, 0]])


def test_a_text_stands_behind_the_other_columns():
    preprocessing, notes = learned(text_length=3)
    assert [column.role for column in preprocessing.columns] == ["words", "number"]
    assert preprocessing.sample_shape == (4,)
    x = preprocessing.encode(FRAME)
    np.testing.assert_array_equal(x[:, 0], FRAME.stars.astype(np.float32))
    np.testing.assert_array_equal(x[:, 1:], encode_texts(FRAME.review, word_ids(preprocessing.columns[0].values), 3))
    assert preprocessing.is_number.tolist() == [True]
    assert Preprocessing.from_dict(preprocessing.to_dict()) == preprocessing
    assert "column 'review': texts of up to 4 words, of which the first 3 are used; the vocabulary has 8 words" in notes
    assert preprocessing.text_columns == ["review"]


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["..."] * 20, {}, "column 'review': no words in any row; --drop review"),
        ([None, "a"] * 10, {}, r"row 1, column 'review': no value \(10 in all\)"),
        ([3, "a"] * 10, {}, "row 1, column 'review': 3; expected a text"),
        (
            ["a b", "a " + "w" * 10_001, *["a"] * 18],
            {},
            "t.csv.*row 2, column 'review': a word of 10,001 characters, at most 10,000 are read; shorten it",
        ),
        (TEXTS * 5, {"drop": ["review"]}, "--text review: the column is not used"),
        (TEXTS * 5, {"categorical": ["review"]}, "--text review: --categorical names the column too"),
    ],
)
def test_columns_that_are_no_texts(values, options, message):
    with pytest.raises((ConfigError, DataError), match=message):
        learned(FRAME.assign(review=values), **options)


def test_no_such_column():
    with pytest.raises(DataError, match=r"t.csv: no column 'reviews' \(--text\); did you mean 'review'"):
        learn(Table("t.csv", FRAME), TableOptions("y", texts=("reviews",)))


@pytest.mark.parametrize(
    "change", [{"length": 0}, {"length": -1}, {"length": 10**9}, {"values": []}, {"role": "number"}]
)
def test_descriptions_of_files_are_checked(change):
    preprocessing, _ = learned()
    tree = preprocessing.to_dict()
    tree["columns"] = [tree["columns"][0] | change, *tree["columns"][1:]]
    with pytest.raises(DataError, match="preprocessing"):
        Preprocessing.from_dict(tree)


@pytest.fixture
def folder(tmp_path):
    for part in ("train", "test"):
        for name, words in (("good", "a fine day"), ("bad", "a dull day")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(3):
                (tmp_path / part / name / f"{number}.txt").write_text(f"{words} {number}")
    return tmp_path


def test_a_folder_is_a_table(folder):
    assert is_text_folder(str(folder))
    path, options = folder_options(str(folder), TableOptions(words=4))
    assert (path, options.test) == (str(folder / "train"), str(folder / "test"))
    table = read_text_folder(path, 1000)
    assert list(table.frame["class"]) == ["bad"] * 3 + ["good"] * 3
    preprocessing, notes = learn_text_folder(table, options)
    assert (preprocessing.task, preprocessing.class_names, preprocessing.columns[0].values) == (
        "multiclass",
        ("bad", "good"),
        ("a", "day", "dull", "fine"),
    )
    assert notes[0] == "6 texts; 2 classes: bad, good"
    np.testing.assert_array_equal(preprocessing.targets(table.frame), [0, 0, 0, 1, 1, 1])


def test_what_tells_of_the_texts_is_no_class_and_no_fault(folder):
    train = folder / "train"
    before = read_text_folder(str(train), 1 << 20).files
    for name in ("README.txt", "labels.csv", "good/README.txt"):
        (train / name).write_text("about the texts")
    assert read_text_folder(str(train), 1 << 20).files == before


def test_a_folder_without_classes_is_predicted(folder):
    table = read_text_folder(str(folder / "test" / "good"), 1000)
    assert list(table.frame.columns) == ["text"]
    assert table.files[1].endswith("1.txt")


def spoil_bytes(folder):
    (folder / "good" / "1.txt").write_bytes(b"caf\xe9")


def spoil_link(folder):
    (folder / "good" / "9.txt").symlink_to("/etc/hostname")


def spoil_kind(folder):
    (folder / "good" / "picture.png").write_bytes(b"\x89PNG")


def spoil_empty(folder):
    for file in (folder / "good").iterdir():
        file.unlink()


def spoil_beside(folder):
    (folder / "notes.txt").write_text("a text")


def spoil_name(folder):
    (folder / "good").rename(folder / os.fsdecode(b"caf\xe9"))


def spoil_nested(folder):
    (folder / "good" / "more").mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_bytes, r"1\.txt: byte e9 at 3 is not UTF-8"),
        (spoil_link, r"9\.txt: a link that leads out of"),
        (spoil_kind, r"picture\.png: expected a text"),
        (spoil_empty, "good: no texts; remove the folder, or fill it"),
        (spoil_beside, r"notes\.txt: a file next to the class folders"),
        (spoil_nested, "more: expected a text"),
        (spoil_name, r"caf\\udce9: the name of a class folder is not UTF-8; rename it"),
    ],
)
def test_folders_that_are_damaged(folder, spoil, message):
    spoil(folder / "train")
    with pytest.raises(DataError, match=message):
        read_text_folder(str(folder / "train"), 1000)


def test_more_texts_than_memory_may_hold(folder):
    with pytest.raises(DataError, match="more texts than max_bytes"):
        read_text_folder(str(folder / "train"), 30)


def test_limits_count_bytes(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("\N{SNOWMAN}" * 10)
    assert len(read_text_folder(str(tmp_path), 60)) == 2
    with pytest.raises(DataError, match=r"1\.txt: more texts than max_bytes = 59 bytes"):
        read_text_folder(str(tmp_path), 59)


def test_a_long_word_in_a_folder_names_its_file(folder):
    (folder / "train" / "good" / "1.txt").write_text("w" * 10_001)
    with pytest.raises(DataError, match=r"good/1\.txt: a word of 10,001 characters, at most 10,000 are read; shorten"):
        learn_text_folder(read_text_folder(str(folder / "train"), 100_000), TableOptions("class", texts=("text",)))


def test_other_limits_of_a_models_file_are_refused_in_one_line(monkeypatch):
    table = Table("t.csv", pd.DataFrame({"c": [f"street {number}" for number in range(9)] * 2, "y": [0, 1] * 9}))
    with pytest.raises(DataError, match=r"t\.csv: 'yyy.*: expected at most 10000 characters$"), within_limits("t.csv"):
        Preprocessing("regression", (Column("x", "number"),), "y" * 10_001)
    monkeypatch.setattr(preprocessing_module, "MAX_VALUES", 5)
    with pytest.raises(DataError, match=r"^t\.csv: expected at most 5 categories$"), within_limits("t.csv"):
        learn(table, TableOptions("y"))


@pytest.mark.parametrize(("texts", "others", "is_text"), [(2, 1, True), (1, 1, False), (1, 2, False), (0, 0, False)])
def test_most_files_decide_what_a_folder_holds(tmp_path, texts, others, is_text):
    (tmp_path / "good").mkdir()
    for number in range(texts):
        (tmp_path / "good" / f"{number}.txt").write_text("a")
    for number in range(others):
        (tmp_path / "good" / f"{number}.png").write_bytes(b"")
    assert is_text_folder(str(tmp_path)) == is_text


def test_a_sample_of_names_decides(tmp_path, monkeypatch):
    """A folder may hold a million pictures: no more than a sample of their names is read."""
    monkeypatch.setattr("dptrain.data.readers.text_folder._SAMPLED_NAMES", 3)
    for name in ("bad", "good"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.txt").write_text("a")
    assert is_text_folder(str(tmp_path))
    assert len(text_folder._first_names(tmp_path / "bad")) == 3
