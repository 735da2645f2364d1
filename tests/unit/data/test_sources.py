"""Sources of rows: the contract of `read_into`, and what `DataSources` refuses."""

from contextlib import contextmanager
from io import BytesIO

import numpy as np
import pytest

from dptrain.data.sources import (
    ArraySource,
    DataSources,
    StreamSource,
    check_declared,
    format_bytes,
    format_shape,
    stream_errors,
)
from dptrain.errors import DataError, ExitCode


class MemorySource(ArraySource):
    """The plainest source: an array that is in memory."""

    def __init__(self, array, where="array"):
        super().__init__(where, array.shape, array.dtype)
        self._array = array

    def _read_rows(self, out, start):
        out[...] = self._array[start : start + len(out)]


def stream_source(array, *, tail=b"", sequential=True, fortran_order=False, shape=None):
    order = "F" if fortran_order else "C"
    payload = array.tobytes(order) + tail

    @contextmanager
    def open_payload():
        with BytesIO(payload) as stream:
            yield stream

    return StreamSource(
        "file", shape or array.shape, array.dtype, open_payload, sequential=sequential, fortran_order=fortran_order
    )


def memory_sources(**changes):
    arrays = {
        "x_train": np.zeros((6, 4, 3), np.uint8),
        "y_train": np.arange(6),
        "x_test": np.zeros((2, 4, 3), np.uint8),
        "y_test": np.arange(2),
        **changes,
    }
    return DataSources("set", **{key: MemorySource(array, key) for key, array in arrays.items()})


def test_memory_source_reads_part_of_an_array_in_native_order():
    array = np.arange(24, dtype=">i4").reshape(6, 4)[:, ::-1]
    source = MemorySource(array)
    assert (source.shape, source.dtype, source.nbytes) == ((6, 4), np.dtype("=i4"), 96)
    out = np.empty((2, 4), np.int32)
    source.read_into(out, 3)
    np.testing.assert_array_equal(out, array[3:5])
    np.testing.assert_array_equal(source.read(), array)


def test_a_single_number_is_refused():
    with pytest.raises(DataError, match="scalar: a single number, expected an array"):
        MemorySource(np.array(3), "scalar")


@pytest.mark.parametrize(
    ("out", "start"),
    [
        (np.empty((2, 3), np.int64), 0),
        (np.empty((2, 4), np.int32), 0),
        (np.empty((2, 3), ">i4"), 0),
        (np.empty((3, 2), np.int32).T, 0),
        (np.empty((2, 3), np.int32), 4),
        (np.empty((2, 3), np.int32), -1),
        (np.empty((6, 3), np.int32), 0),
    ],
    ids=["dtype", "row", "byte order", "not contiguous", "past the end", "before the start", "too many"],
)
def test_a_buffer_that_does_not_fit_is_the_callers_mistake(out, start):
    with pytest.raises(ValueError, match="array: ") as caught:
        MemorySource(np.zeros((5, 3), np.int32)).read_into(out, start)
    assert not isinstance(caught.value, DataError)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("fortran_order", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i2", "<f8", ">f8"])
def test_every_window_of_a_stream(sequential, fortran_order, dtype):
    array = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(dtype)
    source = stream_source(array, sequential=sequential, fortran_order=fortran_order)
    for start in range(6):
        for stop in range(start, 6):
            out = np.full((stop - start, 3, 2), 99, source.dtype)
            source.read_into(out, start)
            np.testing.assert_array_equal(out, array[start:stop])


def test_fortran_order_with_columns_longer_than_the_buffer(monkeypatch):
    monkeypatch.setattr("dptrain.data.sources.CHUNK_BYTES", 16)
    array = np.arange(11 * 6, dtype=np.int32).reshape(11, 2, 3)
    out = np.empty((4, 2, 3), np.int32)
    stream_source(array, fortran_order=True).read_into(out, 5)
    np.testing.assert_array_equal(out, array[5:9])


def test_a_sequential_stream_is_checked_to_its_end_by_a_read_of_its_first_row():
    array = np.arange(12, dtype=np.uint8).reshape(4, 3)
    out = np.empty((1, 3), np.uint8)
    with pytest.raises(DataError, match="header declares 4x3 = 12 bytes, file has 13 or more"):
        stream_source(array, tail=b"!").read_into(out)
    with pytest.raises(DataError, match="header declares 5x3 = 15 bytes, file has 12"):
        stream_source(array, shape=(5, 3)).read_into(out)


def test_images_and_labels_must_be_as_many():
    with pytest.raises(DataError, match=r"6 images, 5 labels \(x_train, y_train\)") as caught:
        memory_sources(y_train=np.arange(5))
    assert caught.value.exit_code == ExitCode.DATA
    with pytest.raises(DataError, match="2 images, 3 labels"):
        memory_sources(y_test=np.arange(3))


def test_splits_must_agree_and_hold_something():
    with pytest.raises(DataError, match=r"a sample is \(4, 3\) in x_train and \(4, 4\) in x_test"):
        memory_sources(x_test=np.zeros((2, 4, 4), np.uint8))
    with pytest.raises(DataError, match=r"x_test: no samples"):
        memory_sources(x_test=np.zeros((0, 4, 3), np.uint8), y_test=np.arange(0))


def test_labels_in_a_column_become_a_vector_as_in_keras():
    sources = memory_sources(y_train=np.arange(6)[:, None], y_test=np.arange(2)[:, None])
    assert sources.y_train.shape == (6,)
    np.testing.assert_array_equal(sources.y_train.read(), np.arange(6))
    out = np.empty(2, np.int64)
    sources.y_train.read_into(out, 3)
    np.testing.assert_array_equal(out, [3, 4])
    # Targets of a regression keep their shape.
    targets = memory_sources(y_train=np.zeros((6, 1)), y_test=np.zeros((2, 1)))
    assert targets.y_train.shape == (6, 1)


def test_declared_sizes_are_bounded():
    check_declared("f", (1000,), 1, 1000)
    with pytest.raises(DataError, match=r"f: declared 8\.0 GB > max_bytes = 1\.0 GB \(shape 1000x1000x1000\)"):
        check_declared("f", (1000, 1000, 1000), 8, 10**9)
    # A size of zero does not excuse the others.
    with pytest.raises(DataError, match="declared"):
        check_declared("f", (0, 2**32 - 1, 2**32 - 1), 1, 10**9)
    with pytest.raises(DataError, match="declared 1001 bytes > max_bytes = 1000 bytes"):
        check_declared("f", (1001,), 1, 1000)
    with pytest.raises(DataError, match="declared 1000000001 bytes > max_bytes = 1000000000 bytes"):
        check_declared("f", (10**9 + 1,), 1, 10**9)
    with pytest.raises(DataError, match="33 dimensions"):
        check_declared("f", (1,) * 33, 1, 10**9)
    with pytest.raises(DataError, match="0 dimensions"):
        check_declared("f", (), 1, 10**9)


def test_formats():
    assert [format_bytes(n) for n in (7, 1500, 999_960, 2 * 10**9, 10**15)] == [
        "7 bytes",
        "1.5 kB",
        "1.0 MB",
        "2.0 GB",
        "1.0 PB",
    ]
    assert format_bytes(255**8 * 10) == "179 EB"
    assert format_shape((2, 3)) == "2x3"
    assert format_shape((1,) * 200) == "1x1x1x1x...x1"


def test_errors_of_the_system_are_one_line_with_the_place(tmp_path):
    with pytest.raises(DataError, match=r"^data: F not found$"), stream_errors("F"):
        (tmp_path / "missing").read_bytes()
    with pytest.raises(DataError, match=r"^F: cannot be read \(Is a directory\)"), stream_errors("F"):
        tmp_path.read_bytes()
