"""Keras' data sets from this machine's files: what is there, what is not, what was changed, and what would run code."""

import hashlib
import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest

from dptrain import datasets
from dptrain.data import cached_files
from dptrain.errors import AgreedError, ConfigError, DataError
from tests.unit.data.idx_files import write_idx

RNG = np.random.default_rng(0)
SETS = ("boston_housing", "california_housing", "cifar10", "cifar100", "imdb", "reuters")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    (tmp_path / "datasets").mkdir()
    return tmp_path / "datasets"


@pytest.fixture
def unpinned(monkeypatch):
    """Files of the tests have other checksums than Keras'."""
    monkeypatch.setattr(cached_files, "_has", lambda path, checksum, algorithm: True)


def ragged(lengths):
    texts = np.empty(len(lengths), object)
    texts[:] = [RNG.integers(1, 50, length).tolist() for length in lengths]
    return texts


@pytest.mark.parametrize("name", SETS)
def test_what_is_not_there_is_said_in_a_line_with_where_it_belongs(name, cache):
    with pytest.raises(
        AgreedError, match=r"does not exist, and dptrain does not download https://.*put the file there"
    ) as caught:
        getattr(datasets, name).load_data()
    assert str(cache) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["boston_housing", "imdb", "reuters"])
def test_another_file_is_refused_before_it_is_read(name, cache, tmp_path):
    for path in (cache / f"{name}.npz", tmp_path / "own" / "file.npz"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(os.getcwd))
    for file in (f"{name}.npz", tmp_path / "own" / "file.npz"):
        with pytest.raises(AgreedError, match=r"the sha256 of .* is not "):
            getattr(datasets, name).load_data(file)
    with pytest.raises(AgreedError, match="not found: expected"):
        getattr(datasets, name).load_data(tmp_path / "none" / "x.npz")


def test_objects_other_than_arrays_and_lists_are_refused_though_the_checksum_fits(cache, unpinned):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(cache / "made"),)

    texts = np.empty(1, object)
    texts[0] = Evil()
    np.savez(cache / "reuters.npz", x=texts, y=np.zeros(1))
    with pytest.raises(AgreedError, match=r"reuters\.npz: damaged .*mkdir is not read"):
        datasets.reuters.load_data()
    assert not (cache / "made").exists()


def test_a_damaged_archive_is_named(cache, unpinned):
    (cache / "imdb.npz").write_bytes(b"no zip")
    (cache / "cifar-10-binary.tar.gz").write_bytes(b"no tar")
    for load in (datasets.imdb.load_data, datasets.cifar10.load_data):
        with pytest.raises(AgreedError, match="damaged"):
            load()


def test_tables_are_split_in_the_order_of_a_seed(cache, unpinned):
    x, y = RNG.random((700, 8)), np.arange(700.0)
    np.savez(cache / "california_housing.npz", x=x, y=y)
    (x_train, y_train), (x_test, y_test) = datasets.california_housing.load_data()
    assert (len(x_train), len(x_test)) == (560, 140)
    order = np.concatenate([y_train, y_test]).astype(int)
    assert sorted(order) == list(range(700))
    np.testing.assert_array_equal(np.concatenate([x_train, x_test]), x[order])
    assert len(datasets.california_housing.load_data("small", test_split=0.5)[0][0]) == 300
    with pytest.raises(ConfigError, match="test_split"):
        datasets.california_housing.load_data(test_split=1)
    with pytest.raises(ConfigError, match="version"):
        datasets.california_housing.load_data("medium")


def test_texts_have_starts_unknown_words_and_lengths(cache, unpinned):
    np.savez(cache / "imdb.npz", x_train=ragged([3, 9, 4]), y_train=[0, 1, 1], x_test=ragged([2, 8]), y_test=[1, 0])
    (x_train, y_train), (x_test, y_test) = datasets.imdb.load_data(num_words=20, maxlen=8)
    assert sorted(map(len, x_train)) == [4, 5]
    assert [len(x_test), len(y_train), len(y_test)] == [1, 2, 1]
    for text in [*x_train, *x_test]:
        assert text[0] == 1
        assert all(word == 2 or 3 < word < 20 for word in text[1:])
    with pytest.raises(ConfigError, match="Increase maxlen"):
        datasets.imdb.load_data(maxlen=2)
    np.savez(cache / "reuters.npz", x=ragged([5] * 10), y=np.arange(10))
    (x_train, _), (x_test, _) = datasets.reuters.load_data(start_char=None, index_from=0)
    assert np.array([*x_train, *x_test]).shape == (10, 5)  # the greatest number of all, 49, is unknown, as in Keras
    assert len(datasets.reuters.get_label_names()) == 46


def test_numbers_of_words(cache, unpinned):
    for name in ("imdb", "reuters"):
        (cache / f"{name}_word_index.json").write_text(json.dumps({"the": 1, "é": 2}))
        assert getattr(datasets, name).get_word_index() == {"the": 1, "é": 2}


@pytest.mark.parametrize(
    ("name", "labels", "parts"),
    [
        (
            "cifar10",
            1,
            [*(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)), "cifar-10-batches-bin/test_batch.bin"],
        ),
        ("cifar100", 2, ["cifar-100-binary/train.bin", "cifar-100-binary/test.bin"]),
    ],
)
def test_pictures(name, labels, parts, cache, unpinned):
    contents = {part: RNG.integers(0, 10, (2, labels + 3072)).astype(np.uint8) for part in parts}
    with tarfile.open(cache / f"{name[:5]}-{name[5:]}-binary.tar.gz", "w:gz") as archive:
        for part, rows in contents.items():
            member = tarfile.TarInfo(part)
            member.size = rows.nbytes
            archive.addfile(member, io.BytesIO(rows.tobytes()))
    (x_train, y_train), (x_test, y_test) = getattr(datasets, name).load_data()
    assert x_train.shape == (2 * (len(parts) - 1), 32, 32, 3)
    assert (x_test.shape, y_train.shape, y_test.shape) == ((2, 32, 32, 3), (len(x_train), 1), (2, 1))
    test = contents[parts[-1]]
    np.testing.assert_array_equal(y_test[:, 0], test[:, labels - 1])
    assert x_test[1, 2, 3, 1] == test[1, labels + 1024 + 2 * 32 + 3]  # planes of colours lie one after the other
    if name == "cifar100":
        np.testing.assert_array_equal(datasets.cifar100.load_data("coarse")[1][1][:, 0], test[:, 0])
        with pytest.raises(ConfigError, match="label_mode"):
            datasets.cifar100.load_data("medium")


def test_the_checksum_is_of_the_whole_file(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"1")
    cached_files.require_checksum(path, hashlib.sha256(b"1").hexdigest())
    with pytest.raises(DataError, match=r"the sha256 of .* is not"):
        cached_files.require_checksum(path, hashlib.sha256(b"2").hexdigest())


DIGITS = {
    "x_train": RNG.integers(0, 256, (20, 28, 28), np.uint8),
    "y_train": np.arange(20, dtype=np.uint8) % 10,
    "x_test": RNG.integers(0, 256, (10, 28, 28), np.uint8),
    "y_test": np.arange(10, dtype=np.uint8),
}


def assert_digits(parts):
    (x_train, y_train), (x_test, y_test) = parts
    for array, key in zip((x_train, y_train, x_test, y_test), DIGITS, strict=True):
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, DIGITS[key])


@pytest.fixture
def nothing_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "dptrain"))
    monkeypatch.delenv("DPTRAIN_DATA", raising=False)


def test_mnist_is_read_from_keras_cache_by_default_by_name_and_by_path(cache, unpinned, nothing_cached, tmp_path):
    np.savez_compressed(cache / "mnist.npz", **DIGITS)
    np.savez_compressed(tmp_path / "digits.npz", **DIGITS)
    for path in ((), ("mnist.npz",), (tmp_path / "digits.npz",), (str(cache / "mnist.npz"),)):
        assert_digits(datasets.mnist.load_data(*path))


def test_another_mnist_file_is_refused(cache, nothing_cached, tmp_path):
    for path in (cache / "mnist.npz", tmp_path / "digits.npz"):
        np.savez(path, **DIGITS)
    for path in ((), ("mnist.npz",), (tmp_path / "digits.npz",)):
        with pytest.raises(AgreedError, match=r"the sha256 of .*\.npz is not 731c5ac6"):
            datasets.mnist.load_data(*path)
    with pytest.raises(AgreedError, match=r"not found: expected mnist\.npz"):
        datasets.mnist.load_data(tmp_path / "none" / "mnist.npz")


def test_fashion_mnist_is_read_from_keras_cache(cache, nothing_cached):
    files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    (cache / "fashion-mnist").mkdir()
    for file, array in zip(files, DIGITS.values(), strict=True):
        write_idx(cache / "fashion-mnist" / f"{file}.gz", array)
    assert_digits(datasets.fashion_mnist.load_data())
