"""Data sets beside Keras', from the same files: the same rows, in the same order, with the same numbers."""

import importlib

import numpy as np
import pytest

from dptrain import datasets
from dptrain.data import cached_files

RNG = np.random.default_rng(0)


@pytest.fixture
def cache(keras, tmp_path, monkeypatch):
    """A cache whose files have other checksums than those that are pinned."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(cached_files, "_has", lambda path, checksum, algorithm: True)
    file_utils = importlib.import_module("keras.src.utils.file_utils")
    monkeypatch.setattr(file_utils, "validate_file", lambda *arguments, **options: True)
    monkeypatch.setattr(file_utils.config, "keras_home", lambda: str(tmp_path))
    (tmp_path / "datasets").mkdir()
    return tmp_path / "datasets"


def ragged(rows):
    sequences = np.empty(rows, object)
    sequences[:] = [RNG.integers(1, 60, RNG.integers(2, 12)).tolist() for _ in range(rows)]
    return sequences


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        for array, expected in zip(mine, other, strict=True):
            assert array.dtype == expected.dtype
            assert [list(row) if array.dtype == object else row for row in array.tolist()] == expected.tolist()


@pytest.mark.parametrize("options", [{}, {"test_split": 0.33, "seed": 5}])
@pytest.mark.parametrize("name", ["boston_housing", "california_housing"])
def test_tables(keras, cache, name, options):
    np.savez(cache / f"{name}.npz", x=RNG.random((40, 8)), y=RNG.random(40))
    assert_same(getattr(datasets, name).load_data(**options), getattr(keras.datasets, name).load_data(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_words": 30, "skip_top": 8, "maxlen": 9, "seed": 5},
        {"start_char": None, "oov_char": None, "num_words": 30},
        {"start_char": None, "index_from": 0},
    ],
)
@pytest.mark.parametrize("name", ["imdb", "reuters"])
def test_texts(keras, cache, name, options):
    parts = {"x_train": ragged(30), "y_train": RNG.integers(0, 2, 30), "x_test": ragged(9), "y_test": np.arange(9)}
    np.savez(cache / f"{name}.npz", **(parts if name == "imdb" else {"x": ragged(40), "y": np.arange(40)}))
    assert_same(getattr(datasets, name).load_data(**options), getattr(keras.datasets, name).load_data(**options))


def test_names_of_topics(keras):
    assert datasets.reuters.get_label_names() == keras.datasets.reuters.get_label_names()
