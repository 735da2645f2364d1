"""Whatever reads NumPy's arrays reads every type, byte order, memory order and number of axes as NumPy does."""

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain.data.readers.npz import map_npy, open_arrays
from dptrain.errors import DataError
from tests.unit.data.shards.shard_files import write_tar

NUMBERS = [f"{order}{kind}" for order in "<>" for kind in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8")]
DTYPES = ["i1", "u1", *NUMBERS]
SHAPES = [(6,), (3, 2), (2, 3, 4), (4, 1, 2)]
Array = Any


def saved(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def by_tar(folder: Path, array: Array) -> Array:
    write_tar(folder / "a.tar", [{"npy": saved(array)}, {"npy": saved(array)}])
    batch = dp.utils.ShardedDataset(str(folder / "a.tar"), 2)[0]
    np.testing.assert_array_equal(batch[0], batch[1])
    return batch[0]


def by_map(folder: Path, array: Array) -> Array:
    np.save(folder / "a.npy", array)
    return map_npy(folder / "a.npy")


def by_archive(folder: Path, array: Array) -> Array:
    np.savez(folder / "a.npz", x=array)
    source = open_arrays(folder / "a.npz", lambda names: ["x"])["x"]
    part = np.empty((len(array) - 1, *array.shape[1:]), source.dtype)
    source.read_into(part, 1)
    whole = source.read()
    np.testing.assert_array_equal(part, whole[1:])
    return whole


READERS: dict[str, Callable[[Path, Array], Array]] = {"tar": by_tar, ".npy": by_map, ".npz": by_archive}


@pytest.mark.parametrize("reader", READERS)
def test_every_layout(tmp_path, reader):
    dtypes = [*DTYPES, *(["?"] if reader == "tar" else [])]  # data sets of arrays refuse booleans
    for dtype, shape, order in itertools.product(dtypes, SHAPES, "CF"):
        array = np.arange(np.prod(shape)).reshape(shape).astype(dtype).copy(order)
        read = np.asarray(READERS[reader](tmp_path, array))
        np.testing.assert_array_equal(read, array, err_msg=f"{dtype} {shape} {order}")
        assert read.dtype.newbyteorder("=") == array.dtype.newbyteorder("="), dtype


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if np.dtype(dtype).kind in "iu"])
def test_token_ids_of_every_type(tmp_path, dtype):
    most = min(np.iinfo(dtype).max, 2**31 - 1)
    ids = np.array([0, 1, 100, most - 1, most], dtype)
    np.save(tmp_path / "t.npy", ids)
    x, y = dp.utils.ShardedDataset(str(tmp_path / "t.npy"), 4, False, sequence_length=4)[0]
    assert (x.dtype, y.dtype) == (np.int32, np.int32)
    assert (x.tolist(), y.tolist()) == ([ids[:4].tolist()], [ids[1:].tolist()])
    for wrong in (np.iinfo(dtype).min, 2**31, 2**32 + 5, np.iinfo(dtype).max):
        if wrong < 0 or most < wrong <= np.iinfo(dtype).max:
            ids[2] = wrong
            np.save(tmp_path / "t.npy", ids)
            for options in ({}, {"vocabulary_size": 2**40}):
                data = dp.utils.ShardedDataset(str(tmp_path / "t.npy"), 4, False, sequence_length=4, **options)
                with pytest.raises(DataError, match=rf"id {wrong} at token 2 "):
                    data[0]
