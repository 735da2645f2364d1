"""Memory of texts is that of their letters, however long a single one is among many."""

import tracemalloc
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dptrain as dp
from dptrain import layers, utils
from dptrain.cli.predictions import Meaning, as_csv
from dptrain.data.preprocessing import MAX_TEXT
from dptrain.data.tabular.table_columns import TableOptions
from dptrain.data.tabular.table_loading import load_table
from dptrain.errors import ConfigError, DataError

ROWS, LONG = 4000, 100_000  # 1.6 GB in texts of fixed width
MOST = 30_000_000
SHORT = ["a b", "b c"] * (ROWS // 2 - 1) + ["c", "a"]
TEXTS = [*SHORT, "b " + "w" * LONG]
TOKENS = [*"ab" * (ROWS // 2), "w" * LONG]


@contextmanager
def at_most(most: int = MOST) -> Iterator[None]:
    """Fail where the block allocates more bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most


def vectorized(**options: object) -> np.ndarray:
    layer = layers.TextVectorization(max_tokens=50, **options)
    layer.adapt(TEXTS)
    return np.asarray(layer(TEXTS))


@pytest.mark.parametrize("tokens", [1, 5000])
def test_indices_of_texts_take_little_more_than_themselves(tokens):
    """However long a single text is, to which the others are padded."""
    texts = ["a b"] * 1000 + ["b " * tokens + "c a"]
    layer = layers.TextVectorization(vocabulary=["b", "a"])
    with at_most(8 * len(texts) * (tokens + 2) * 5 // 4 + 1_000_000):
        indices = np.asarray(layer(texts))
    assert indices.shape == (len(texts), tokens + 2)
    assert indices[0].tolist() == [3, 2] + [0] * tokens
    assert indices[-1].tolist() == [2] * tokens + [1, 3]


@pytest.mark.parametrize("output_mode", ["int", "tf_idf"])
def test_adapting_takes_the_memory_of_some_texts(output_mode):
    texts = np.array(["a b c " * 30] * 20_000 + ["d d"], object)
    layer = layers.TextVectorization(output_mode=output_mode)
    with at_most(8 * 90 * 20_000):  # of a pointer to each token
        layer.adapt(texts)
    assert layer.get_vocabulary(False) == ["c", "b", "a", "d"]
    if output_mode == "tf_idf":
        expected = [np.log(1 + 20_001 / 20_001), np.log(1 + 20_001 / 2)]
        np.testing.assert_allclose(layer.idf_weights[-2:], expected, rtol=1e-6)


def looked_up(texts: object) -> np.ndarray:
    layer = layers.StringLookup(max_tokens=3)
    layer.adapt(texts)
    return np.asarray(layer(texts))


def inverted() -> list[str]:
    layer = layers.StringLookup(vocabulary=["a", "w" * LONG], invert=True)
    return layer(np.array([1] * ROWS + [2])).tolist()


# What is computed, and the first, the last but one and the last of the results.
CASES: dict[str, tuple[Callable[[], object], list[object]]] = {
    "int": (lambda: vectorized()[:, 0], [4, 4, 2]),
    "multi_hot": (lambda: vectorized(output_mode="multi_hot")[:, 1:4], [[1, 0, 1], [0, 0, 1], [1, 0, 0]]),
    "tf_idf": (
        lambda: vectorized(output_mode="tf_idf")[:, 1:4] > 0,
        [[True, False, True], [False, False, True], [True, False, False]],
    ),
    "own standardize": (
        lambda: vectorized(standardize=lambda texts: [text.upper() for text in texts])[:, 0],
        [4, 4, 2],
    ),
    "own split": (lambda: vectorized(split=lambda texts: [text.split() for text in texts])[:, 0], [4, 4, 2]),
    "lookup": (lambda: looked_up(TOKENS), [2, 1, 0]),
    "lookup of bytes": (lambda: looked_up([text.encode() for text in TOKENS]), [2, 1, 0]),
    "lookup of objects": (lambda: looked_up(pd.Series(TOKENS)), [2, 1, 0]),
    "inverse lookup": (lambda: inverted(), ["a", "a", "w" * LONG]),
    "hashing": (lambda: np.asarray(layers.Hashing(2)(TOKENS)) < 2, [True] * 3),
    "crossing": (lambda: np.asarray(layers.HashedCrossing(1)((TOKENS, TOKENS))), [0] * 3),
}


@pytest.mark.parametrize("case", CASES)
def test_one_long_text_among_many(case: str):
    work, expected = CASES[case]
    with at_most():
        result = work()
    assert len(result) == ROWS + 1
    found = [result[0], result[-2], result[-1]]
    assert [row.tolist() if isinstance(row, np.ndarray | np.generic) else row for row in found] == expected


def test_texts_of_a_folder(tmp_path: Path):
    for number in range(300):
        (tmp_path / f"{number}.txt").write_text("a b")
    (tmp_path / "long.txt").write_text("w" * 1_000_000)
    with at_most():
        batches = list(utils.text_dataset_from_directory(tmp_path, labels=None, batch_size=301, shuffle=False))
    assert [len(text) for text in batches[0]] == [3] * 300 + [1_000_000]
    with at_most(3_000_000):
        (few,) = utils.text_dataset_from_directory(tmp_path, labels=None, batch_size=301, shuffle=False, max_length=2)
    assert few.dtype.kind == "U"  # as users expect, where memory allows it
    assert few.tolist() == ["a "] * 300 + ["ww"]


def test_sounds_of_a_folder(tmp_path: Path):
    for number in range(40):
        with wave.open(str(tmp_path / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(2 if number else 2_000_000))
    options = {"labels": None, "batch_size": 40, "shuffle": False, "max_bytes": 2_000_100}
    message = r"/0\.wav: 1,000,000 samples, and padding 40 sounds to 1,000,000 takes 160\.0 MB > .*smaller output_seq"
    with at_most(), pytest.raises(DataError, match=message):
        list(utils.audio_dataset_from_directory(tmp_path, **options))
    (batch,) = utils.audio_dataset_from_directory(tmp_path, **options, output_sequence_length=5)
    assert batch.shape == (40, 5, 1)


def test_texts_of_a_table(tmp_path: Path):
    table = pd.DataFrame(
        {"review": TEXTS, "kind": [TOKENS[0], "y"] * (ROWS // 2) + ["z"], "y": [0, 1] * (ROWS // 2) + [1]}
    )
    path = tmp_path / "t.csv"
    table.to_csv(path, index=False)
    options = TableOptions("y", texts=("review",), words=3, text_length=2)
    with at_most():
        data = load_table(str(path), options, dp.comm.SoloCommunicator(), max_bytes=10_000_000)
    assert len(data.train.y) + len(data.test.y) == ROWS + 1


def test_predictions_of_classes_with_long_names():
    names = ["a", "w" * MAX_TEXT]
    with at_most():
        lines = as_csv(np.eye(2)[[0] * ROWS + [1]], Meaning("multiclass", names)).splitlines()
    assert lines[1].startswith("0,a,1.0,")
    assert lines[-1] == f"{ROWS},{names[1]},0.0,1.0"


def test_padding_to_one_text_of_many_words_is_refused_unless_it_is_cut():
    texts = ["a"] * ROWS + ["a " * 300_000]
    layer = layers.TextVectorization(vocabulary=["a"], output_sequence_length=3)
    with at_most():
        assert layer(texts).numpy()[[0, -1]].tolist() == [[2, 0, 0], [2, 2, 2]]
    layer.output_sequence_length = None
    message = r"4,001 texts to 300,000 tokens takes 9.6 GB; .* text 4000, has 300,000: pass a smaller output_sequence"
    with at_most(), pytest.raises(ConfigError, match=message):
        layer(texts)
    with (
        at_most(),
        pytest.raises(ConfigError, match=r"to 1,000,000,000 tokens takes 32\.0 TB; the longest, text 0, has 1"),
    ):
        layers.TextVectorization(vocabulary=["a"], output_sequence_length=10**9)(texts[:ROWS])


def test_n_grams_of_any_length_are_those_of_the_text():
    layer = layers.TextVectorization(ngrams=10**9, output_mode="count")
    layer.adapt(["a b c", "c"])
    assert set(layer.get_vocabulary()) == {"[UNK]", "a", "b", "c", "a b", "b c", "a b c"}
    with (
        at_most(),
        pytest.raises(ConfigError, match=r"n-grams of text 1, of 5,000 tokens, .*a smaller ngrams= than 1000000000"),
    ):
        layer(["a", "a " * 5000])
    for ngrams in (0, -1, (1, 0)):
        with pytest.raises(ConfigError, match="`ngrams` must be 1 or greater"):
            layers.TextVectorization(ngrams=ngrams)


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(DataError, match="rows of different lengths"):
        layers.StringLookup(vocabulary=["a"])([["a"], ["a", "b"]])
