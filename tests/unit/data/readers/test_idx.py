"""The IDX reader against files that are right, and against every way in which they can be wrong."""

import gzip
import hashlib
import math
import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.data.readers.idx import open_idx
from dptrain.data.sources import GZIP_PADDING
from dptrain.errors import DataError
from tests.conftest import MNIST
from tests.sample import examples
from tests.unit.data.idx_files import idx_bytes, packed, write_idx

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
IMAGES = np.arange(7 * 4 * 3, dtype=np.uint8).reshape(7, 4, 3)

# What a read may need beside the array: the buffer for skipped rows, the decompressor's, and Python's own.
SLACK = 4_000_000


def read_with_peak(path, max_bytes):
    """The array or the DataError, and the peak of allocated bytes."""
    tracemalloc.start()
    try:
        result = open_idx(path, max_bytes=max_bytes).read()
    except DataError as error:
        result = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return result, peak


def error_of(path, **options):
    with pytest.raises(DataError) as caught:
        open_idx(path, **options).read()
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_in_native_order(tmp_path, code, ending):
    numbers = np.array([[0, 1, 2], [100, 127, 3], [5, 7, 11], [13, 17, 19]]).astype(DTYPES[code])
    data = idx_bytes(code, (4, 3), numbers.tobytes())
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(data) if ending else data)
    source = open_idx(path)
    assert source.dtype == np.dtype(DTYPES[code]).newbyteorder("=")
    assert source.dtype.isnative
    assert (source.shape, source.nbytes, source.where) == ((4, 3), numbers.nbytes, str(path))
    np.testing.assert_array_equal(source.read(), numbers)
    out = np.empty((2, 3), source.dtype)
    source.read_into(out, 1)
    np.testing.assert_array_equal(out, numbers[1:3])


def test_gzip_is_known_by_its_bytes_not_by_its_name(tmp_path):
    write_idx(tmp_path / "a.gz", IMAGES)
    (tmp_path / "a.gz").rename(tmp_path / "plain")
    write_idx(tmp_path / "b", IMAGES)
    (tmp_path / "b").rename(tmp_path / "b.gz")
    for name in ("plain", "b.gz"):
        np.testing.assert_array_equal(open_idx(tmp_path / name).read(), IMAGES)


@pytest.mark.parametrize("padding", [0, 1, 1 << 40])
def test_zeros_behind_gzip_are_read_as_far_as_a_tape_has_them(tmp_path, padding):
    path = tmp_path / "images.gz"
    write_idx(path, IMAGES)
    os.truncate(path, 16 + IMAGES.nbytes + GZIP_PADDING + padding)
    if padding:
        with pytest.raises(DataError, match=r"images\.gz: \d+ bytes of gzip for 84 of content; delete it and fetch"):
            open_idx(path)
    else:
        np.testing.assert_array_equal(open_idx(path).read(), IMAGES)


def test_several_gzip_members_are_one_stream(tmp_path):
    data = idx_bytes(8, IMAGES.shape, IMAGES.tobytes())
    (tmp_path / "a").write_bytes(gzip.compress(data[:20]) + gzip.compress(data[20:]))
    np.testing.assert_array_equal(open_idx(tmp_path / "a").read(), IMAGES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x-idx3-ubyte", b"<!DOCTYPE html>", "not IDX: first bytes 3c21444f (HTML?), expected 00000803"),
        ("y-idx1-ubyte", b"<html><body>", "not IDX: first bytes 3c68746d (HTML?), expected 00000801"),
        ("x", packed(b"<!DOCTYPE html>"), "not IDX: first bytes 3c21444f (HTML?), expected 00000803"),
        ("x", packed(packed(b"any")), "(gzip twice?)"),
        ("x", b"PK\3\4....", "(zip?)"),
        ("x", b"\x80\4\x95\0\0\0", "first bytes 80049500 (pickle?)"),
        ("x", b"", "not IDX: only 0 bytes"),
        ("x", b"\0\0\x08", "not IDX: only 3 bytes"),
        ("x", b"\0\0\x07\1\0\0\0\0", "not IDX: first bytes 00000701"),
        ("x", b"\0\0\x08\0", "not IDX: first bytes 00000800"),
        ("x", b"\0\0\x08\3\0\0\0\1\0\0", "header of 3 dimensions declared = 16 bytes, file has 10"),
        ("x", idx_bytes(8, (1,) * 40, b"a"), "40 dimensions declared, expected 1 to 32"),
        (
            "x",
            idx_bytes(8, (2, 3), b"12345"),
            "header declares 2x3 = 6 bytes, file has 5; delete it and fetch it again",
        ),
        ("x", idx_bytes(8, (2, 3), b"1234567"), "header declares 2x3 = 6 bytes, file has 7"),
        ("x", packed(idx_bytes(8, (2, 3), b"12345")), "header declares 2x3 = 6 bytes, file has 5"),
        ("x", packed(idx_bytes(8, (2, 3), b"1234567")), "header declares 2x3 = 6 bytes, file has 7 or more"),
        ("x", packed(idx_bytes(8, (2, 3), b"123456"))[:-9], "the compressed data ends early"),
        ("x", packed(idx_bytes(8, (2, 3), b"123456")) + b"junk", "damaged (Not a gzipped file (b'ju'))"),
    ],
)
def test_malformed_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in error_of(tmp_path / name)


def test_bad_checksum_and_bad_length_of_gzip(tmp_path):
    good = gzip.compress(idx_bytes(8, IMAGES.shape, IMAGES.tobytes()))
    for position, message in ((-5, "CRC check failed"), (-1, "Incorrect length")):
        bad = bytearray(good)
        bad[position] ^= 1
        (tmp_path / "x").write_bytes(bad)
        text = error_of(tmp_path / "x")
        assert message in text
        assert "delete it and fetch it again" in text
        # A read of the first row alone finds it as well.
        with pytest.raises(DataError, match=message):
            open_idx(tmp_path / "x").read_into(np.empty((1, 4, 3), np.uint8))


def test_missing_file_and_folder(tmp_path):
    assert error_of(tmp_path / "no") == f"data: {tmp_path / 'no'} not found"
    assert "Is a directory" in error_of(tmp_path)


@pytest.mark.parametrize("compressed", [False, True])
def test_truncation_at_every_byte(tmp_path, compressed):
    data = idx_bytes(8, IMAGES.shape, IMAGES.tobytes())
    data = gzip.compress(data) if compressed else data
    path = tmp_path / "x"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match=r"not IDX|header|ends early"):
            open_idx(path).read()


@pytest.mark.parametrize("shape", [(8_000_000, 1000), (2**32 - 1, 2**32 - 1), (2**32 - 1,) * 32, (0, 2**32 - 1)])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_bomb_is_refused_before_anything_is_allocated(tmp_path, shape, compressed):
    data = idx_bytes(8, shape, b"")
    (tmp_path / "x").write_bytes(gzip.compress(data) if compressed else data)
    error, peak = read_with_peak(tmp_path / "x", 10**9)
    assert "> max_bytes = 1.0 GB" in str(error)
    if len(shape) == 2 and shape[1] == 1000:
        assert "declared 8.0 GB > max_bytes = 1.0 GB" in str(error)
    assert peak < SLACK


def test_a_stream_that_never_ends_is_read_one_byte_too_far_at_most(tmp_path):
    (tmp_path / "x").write_bytes(gzip.compress(idx_bytes(8, (10, 10), bytes(50_000_000)), 1))
    error, peak = read_with_peak(tmp_path / "x", 1000)
    assert "header declares 10x10 = 100 bytes, file has 101 or more" in str(error)
    assert peak < SLACK


def test_rows_in_the_middle_need_no_memory_for_the_others(tmp_path):
    array = np.arange(4_000_000, dtype=np.uint32).astype(">i4").reshape(40_000, 100)
    (tmp_path / "x").write_bytes(gzip.compress(idx_bytes(0x0C, array.shape, array.tobytes()), 1))
    source = open_idx(tmp_path / "x")
    out = np.empty((10, 100), np.int32)
    tracemalloc.start()
    source.read_into(out, 39_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(out, array[39_000:39_010])
    assert peak < array.nbytes / 4


def test_a_file_that_was_exchanged_after_opening_is_noticed(tmp_path):
    write_idx(tmp_path / "x", IMAGES)
    source = open_idx(tmp_path / "x")
    write_idx(tmp_path / "x", IMAGES[:3])
    with pytest.raises(DataError, match="changed since it was opened"):
        source.read()


def reference(data):
    """The array in `data`, or None: written after the format's description, for trusted sizes."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except Exception:
            return None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in DTYPES or not 1 <= data[3] <= 32:
        return None
    offset = 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, offset, 4))
    dtype = np.dtype(DTYPES[data[2]])
    if len(data) < offset or len(data) - offset != math.prod(shape) * dtype.itemsize:
        return None
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize > 1 << 16:
        return None
    return np.frombuffer(data, dtype, offset=offset).reshape(shape)


def agrees_with_reference(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(data)
        result, peak = read_with_peak(path, 1 << 16)
    expected = reference(data)
    if expected is None:
        assert isinstance(result, DataError)
        assert "\n" not in str(result)
    else:
        assert not isinstance(result, DataError), result
        assert result.dtype == expected.dtype.newbyteorder("=")
        assert result.tobytes() == expected.astype(result.dtype).tobytes()
        assert result.shape == expected.shape
    assert peak < SLACK


headers = st.builds(
    lambda code, shape, payload: idx_bytes(code, shape, payload),
    st.sampled_from([*DTYPES, 0, 0x0A, 0xFF]),
    st.lists(st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1)), max_size=5),
    st.binary(max_size=64),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.one_of(st.binary(max_size=64), headers), st.booleans())
def test_any_bytes(data, compressed):
    agrees_with_reference(gzip.compress(data) if compressed else data)


def mutate(data, edits):
    data = bytearray(data)
    for kind, place, content in edits:
        at = place % (len(data) + 1)
        if kind == "set":
            data[at : at + len(content)] = content
        elif kind == "insert":
            data[at:at] = content
        elif kind == "delete":
            del data[at : at + 1 + len(content)]
        else:
            del data[at:]
    return bytes(data)


edits = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "truncate"]),
        st.integers(0, 10_000),
        st.binary(min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(250), deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.booleans(), edits)
def test_any_mutation_of_a_valid_file(code, compressed, changes):
    numbers = np.arange(24).astype(DTYPES[code])
    data = idx_bytes(code, (4, 3, 2), numbers.tobytes())
    agrees_with_reference(mutate(gzip.compress(data, mtime=0) if compressed else data, changes))


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"the real MNIST is not at {MNIST}")
def test_the_real_mnist():
    images = open_idx(MNIST / "train-images-idx3-ubyte.gz")
    labels = open_idx(MNIST / "train-labels-idx1-ubyte.gz").read()
    assert (images.shape, images.dtype, images.nbytes) == ((60000, 28, 28), np.uint8, 47_040_000)
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert np.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    x = images.read()
    # The mean and deviation that everybody quotes, and the content's published digest.
    assert round(float(x.mean()) / 255, 4) == 0.1307
    assert round(float(x.std()) / 255, 4) == 0.3081
    content = idx_bytes(8, x.shape, x.tobytes())
    assert hashlib.sha256(content).hexdigest() == "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    part = np.empty((500, 28, 28), np.uint8)
    images.read_into(part, 59_000)
    np.testing.assert_array_equal(part, x[59_000:59_500])
