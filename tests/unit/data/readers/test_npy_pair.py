"""Two .npy files: x stays on the disk, y says the task, the last rows are the test part."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.comm import SoloCommunicator
from dptrain.data.readers.npy_pair import load_pair
from dptrain.data.readers.npz import map_npy
from dptrain.errors import AgreedError, DataError

X = np.arange(40, dtype=np.float32).reshape(10, 4)


def loaded(folder, y, x=X, **options):
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return load_pair(str(folder / "x.npy"), str(folder / "y.npy"), SoloCommunicator(), **options)


@pytest.mark.parametrize(
    ("y", "task"),
    [(np.arange(10) / 3, "regression"), (np.arange(10) % 2 / 1, "binary"), (np.arange(10)[:, None] % 3, "multiclass")],
)
def test_the_last_rows_are_the_test_part(tmp_path, y, task):
    data = loaded(tmp_path, y)
    assert data.task == task
    np.testing.assert_array_equal(data.train.x, X[:8])
    np.testing.assert_array_equal(data.test.y, y.reshape(10)[8:])
    assert data.notes[-1].startswith("2 of 10 samples, the last, are held out")


@pytest.mark.parametrize("x", [X, np.asfortranarray(X)])
def test_x_stays_on_the_disk(tmp_path, x):
    data = loaded(tmp_path, np.arange(10) / 3, x, max_bytes=80)  # of y alone
    assert isinstance(data.train.x, np.memmap)
    assert np.shares_memory(data.train.x, data.train.x.base)
    np.testing.assert_array_equal(data.test.x, X[8:])


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (X, np.arange(9), {}, r"x\.npy has 10 rows, .*y\.npy 9; expected as many"),
        (X, np.arange(10), {}, r"y\.npy: the last 2 rows have classes that no row before has; shuffle"),
        (X, np.arange(10), {"max_bytes": 79}, r"y\.npy: declared 80 bytes > max_bytes = 79 bytes"),
        (X[:1], np.arange(1.0), {}, "holds out 0 of 1 samples"),
        (np.where(X == 7, np.nan, X).astype(">f4"), np.arange(10) / 3, {}, r"x\.npy: NaN at sample 1, feature 3"),
        (X[:0], np.arange(0.0), {}, "no samples"),
        (np.where(X == 7, np.nan, X), np.arange(10) / 3, {}, r"x\.npy: NaN at sample 1, feature 3"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, x, y, options, message):
    with pytest.raises(AgreedError, match=message):
        loaded(tmp_path, y, x, **options)


@pytest.mark.parametrize("labels", [np.arange(10) % 2, np.arange(10)[:, None] % 2, np.arange(10) / 3])
def test_files_of_the_other_byte_order_train_as_those_of_this_one(tmp_path, labels):
    def trained(order):
        data = loaded(tmp_path, labels.astype(labels.dtype.newbyteorder(order)), X.astype(f"{order}f4"))
        model = dp.Sequential([dp.layers.Input((4,)), dp.layers.Dense(1)], seed=1)
        model.compile("sgd", "mse")
        history = model.fit(data.train, verbose=0, validation_data=data.test).history
        return data.task, *history.values(), model.predict(data.test.x, verbose=0).tolist()

    assert trained(">") == trained("<")


def test_a_file_of_another_length_than_it_declares_is_refused(tmp_path):
    np.save(path := tmp_path / "x.npy", X)
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"header declares 10x4 = 160 bytes, file has 1[56]"):
            map_npy(path)


def test_objects_are_refused(tmp_path):
    np.save(path := tmp_path / "x.npy", np.array([{}, None]), allow_pickle=True)
    with pytest.raises(DataError, match="pickled Python objects"):
        map_npy(path)
