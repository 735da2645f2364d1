"""The npz reader against archives that NumPy writes, and against ones that it should not open."""

import io
import pickle
import struct
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.data.readers.npz import KEYS, open_npz
from dptrain.errors import DataError
from tests.sample import examples

SLACK = 4_000_000

ARRAYS = {
    "x_train": np.arange(6 * 5, dtype=np.uint8).reshape(6, 5),
    "y_train": np.array([0, 1, 2, 0, 1, 2]),
    "x_test": np.arange(2 * 5, dtype=np.uint8).reshape(2, 5),
    "y_test": np.array([1, 2]),
}


def saved(folder, *, compressed=False, **changes):
    path = Path(folder) / "set.npz"
    (np.savez_compressed if compressed else np.savez)(path, **{**ARRAYS, **changes})
    return path


class Written(str):
    """Stands in a header as it is, without quotation marks."""

    __repr__ = str.__str__


def npy(descr, shape, payload=b"", *, fortran_order=False, version=1):
    header = f"{{'descr': {descr!r}, 'fortran_order': {fortran_order}, 'shape': {shape!r}, }}".encode() + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes((version, 0)) + length + header + payload


def archive(folder, compression=zipfile.ZIP_STORED, **members):
    """An archive of raw members, those of ARRAYS unless named."""
    path = Path(folder) / "raw.npz"
    with zipfile.ZipFile(path, "w", compression) as file:
        for key in KEYS:
            buffer = io.BytesIO()
            np.save(buffer, ARRAYS[key])
            file.writestr(f"{key}.npy", members.get(key, buffer.getvalue()))
    return path


def read_all(path, **options):
    sources = open_npz(path, **options)
    return {key: getattr(sources, key).read() for key in KEYS}


def error_of(path, **options):
    with pytest.raises(DataError) as caught:
        read_all(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("compressed", [False, True])
def test_what_numpy_saves(tmp_path, compressed):
    path = saved(tmp_path, compressed=compressed, extra=np.zeros(3))
    assert open_npz(path).name == "set"
    for key, array in read_all(path).items():
        assert array.dtype == ARRAYS[key].dtype
        np.testing.assert_array_equal(array, ARRAYS[key])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["<u2", ">u2", "i1", ">i8", "<f2", ">f4", ">f8", "<f8"])
def test_every_window_of_every_dtype_in_native_order(tmp_path, dtype, compressed):
    x = np.arange(30).reshape(6, 5).astype(dtype)
    path = saved(tmp_path, compressed=compressed, x_train=x)
    source = open_npz(path).x_train
    assert source.dtype.isnative
    assert source.dtype == x.dtype.newbyteorder("=")
    for start in range(6):
        out = np.empty((6 - start, 5), source.dtype)
        source.read_into(out, start)
        np.testing.assert_array_equal(out, x[start:])


def test_fortran_order_is_put_right(tmp_path):
    x = np.asfortranarray(np.arange(6 * 2 * 3, dtype=np.float32).reshape(6, 2, 3))
    path = saved(tmp_path, x_train=x, x_test=x[:2])
    source = open_npz(path).x_train
    np.testing.assert_array_equal(source.read(), x)
    out = np.empty((3, 2, 3), np.float32)
    source.read_into(out, 2)
    np.testing.assert_array_equal(out, x[2:5])


def test_labels_in_a_column(tmp_path):
    path = saved(tmp_path, y_train=ARRAYS["y_train"][:, None], y_test=ARRAYS["y_test"][:, None])
    np.testing.assert_array_equal(read_all(path)["y_train"], ARRAYS["y_train"])


@pytest.mark.parametrize("version", [1, 2, 3])
def test_header_versions(tmp_path, version):
    path = archive(tmp_path, x_train=npy("|u1", (6, 5), ARRAYS["x_train"].tobytes(), version=version))
    np.testing.assert_array_equal(read_all(path)["x_train"], ARRAYS["x_train"])


def test_a_name_with_a_line_break_is_shown_on_one_line(tmp_path):
    np.savez(tmp_path / "a.npz", **{"x\ntrain": np.zeros(3)})
    assert r"found x\ntrain" in error_of(tmp_path / "a.npz")


def test_missing_arrays_are_named_with_what_is_there(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros(3), labels=np.zeros(3))
    message = error_of(tmp_path / "a.npz")
    assert "no y_train, x_test, y_test in the archive" in message
    assert "found labels, x_train" in message
    np.savez(tmp_path / "b.npz")
    assert "found nothing" in error_of(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **{f"a{i:02}": np.zeros(1) for i in range(12)})
    assert "a09 and 2 more" in error_of(tmp_path / "c.npz")


def test_objects_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    path = saved(tmp_path, y_train=np.array([Bomb()] * 6, dtype=object))
    assert "y_train: holds pickled Python objects (dtype object), which are never loaded" in error_of(path)
    path = archive(tmp_path, x_train=pickle.dumps(Bomb()))
    assert "not .npy: first bytes 8004" in (message := error_of(path))
    assert "(pickle? it is never loaded)" in message
    (tmp_path / "bare.npz").write_bytes(pickle.dumps(Bomb()))
    assert "not an .npz archive" in (message := error_of(tmp_path / "bare.npz"))
    assert "(pickle? it is never loaded)" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an .npz archive: first bytes none"),
        (b"<!DOCTYPE html>", "first bytes 3c21444f (HTML?)"),
        (b"\0\0\x08\3", "(IDX? name the folder that holds the four files)"),
        (npy("|u1", (1,), b"a"), "(a single .npy? save the four arrays with numpy.savez)"),
        (b"PK\3\4 and nothing more", "damaged (File is not a zip file)"),
    ],
)
def test_other_files(tmp_path, content, message):
    (tmp_path / "a.npz").write_bytes(content)
    assert message in error_of(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (b"", "not .npy: first bytes none"),
        (b"<html>", "(HTML?), expected 934e554d5059"),
        (b"\x93NUMPY", ".npy version"),
        (b"\x93NUMPY\4\0\0\0", ".npy version 04.00"),
        (b"\x93NUMPY\1\0\5", "the .npy header ends early"),
        (b"\x93NUMPY\1\0\xff\0{}", "header of 255 bytes declared, file has 2"),
        (b"\x93NUMPY\2\0\xff\xff\xff\xff{}", "header of 4294967295 bytes declared, at most 65536 are read"),
        (npy("|u1", (6, 5), bytes(29)), "header declares 6x5 = 30 bytes, file has 29"),
        (npy("|u1", (6, 5), bytes(31)), "header declares 6x5 = 30 bytes, file has 31"),
        (npy("|u1", (6, -5)), "damaged .npy header"),
        (npy("|u1", [6, 5]), "damaged .npy header"),
        (npy("|u1", (True, 5)), "damaged .npy header"),
        (npy("|u1", (6.0, 5)), "damaged .npy header"),
        (npy("|u1", (6, 5), fortran_order=1), "damaged .npy header"),
        (npy("|u1", (6, 5)).replace(b"shape", b"shale"), "damaged .npy header"),
        (npy("|u1", (6, 5)).replace(b"}", b"]"), "damaged .npy header"),
        (npy("|u1", ()), "0 dimensions declared"),
        (npy("<U4", (6,)), "dtype '<U4'; expected integers or floats"),
        (npy("|b1", (6,)), "dtype '|b1'; expected integers or floats"),
        (npy("<c8", (6,)), "dtype '<c8'"),
        (npy("<f16", (6,)), "dtype '<f16'"),
        (npy([("a", "<i4")], (6,)), "expected integers or floats"),
        (npy("|u1", (8_000_000, 1000)), "declared 8.0 GB > max_bytes = 1.0 GB"),
        (npy("|u1", (2**62,) * 32), "declared more than 1000 EB > max_bytes = 1.0 GB"),
        (npy("|u1", (10**400, 1000)), "damaged .npy header"),
        (npy("|u1", Written("(6, 0x" + "f" * 5000 + ")")), "damaged .npy header"),
        (npy("|u1", Written("[" * 5000)), "damaged .npy header"),
    ],
)
def test_malformed_members(tmp_path, member, message):
    assert message in error_of(archive(tmp_path, x_train=member))


def test_methods_that_numpy_does_not_use_are_refused(tmp_path):
    assert "x_train: zip compression 14" in error_of(archive(tmp_path, zipfile.ZIP_LZMA))
    path = archive(tmp_path)
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(signature) + offset] |= 1
    path.write_bytes(data)
    assert "encrypted" in error_of(path)


def test_a_bad_checksum_is_found_by_a_read_of_the_first_row(tmp_path):
    path = saved(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(ARRAYS["x_train"].tobytes()) + 29] ^= 1  # in the last row
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x_train: damaged \(Bad CRC-32"):
        open_npz(path).x_train.read_into(np.empty((1, 5), np.uint8))


def test_a_zip_bomb_is_neither_allocated_nor_unpacked(tmp_path):
    bomb = npy("|u1", (2_000_000_000,), bytes(20_000_000))
    path = archive(tmp_path, zipfile.ZIP_DEFLATED, x_train=bomb)
    assert path.stat().st_size < 100_000
    # The second bomb admits its size in the archive only: what the .npy header declares is short of it.
    path_short = archive(tmp_path / "..", zipfile.ZIP_DEFLATED, x_train=npy("|u1", (6, 5), bytes(20_000_000)))
    tracemalloc.start()
    first = error_of(path)
    second = error_of(path_short)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "declared 2.0 GB > max_bytes = 1.0 GB" in first
    assert "header declares 6x5 = 30 bytes, file has 20000000" in second
    assert peak < SLACK


def test_an_archive_that_lies_about_the_length_of_a_member(tmp_path):
    path = archive(tmp_path, zipfile.ZIP_DEFLATED, x_train=npy("|u1", (6, 5), bytes(2_000_000)))
    data = path.read_bytes()
    true = len(npy("|u1", (6, 5))) + 2_000_000
    path.write_bytes(data.replace(struct.pack("<I", true), struct.pack("<I", true - 2_000_000 + 30)))
    # Only as much as the archive declares is unpacked, and then the checksum does not fit.
    assert "damaged" in error_of(path)


def test_max_bytes_bounds_each_array(tmp_path):
    path = saved(tmp_path)
    read_all(path, max_bytes=48)
    assert "y_train: declared 48 bytes > max_bytes = 47 bytes" in error_of(path, max_bytes=47)


def test_an_archive_that_was_exchanged_after_opening_is_noticed(tmp_path):
    source = open_npz(saved(tmp_path)).x_train
    saved(tmp_path, x_train=np.zeros((6, 7), np.uint8))
    with pytest.raises(DataError, match="changed since it was opened"):
        source.read()
    np.savez(tmp_path / "set.npz", other=np.zeros(1))
    with pytest.raises(DataError, match="changed since it was opened"):
        source.read()


def test_missing_file(tmp_path):
    assert error_of(tmp_path / "no.npz") == f"data: {tmp_path / 'no.npz'} not found"


def outcome(path):
    """What could be read, or None and the message."""
    try:
        return read_all(path, max_bytes=1 << 16), ""
    except DataError as error:
        return None, str(error)


def right_or_refused(data, *, original):
    """Checksums cover every byte of a member, so that whatever can be read must be what was saved."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        path.write_bytes(data)
        tracemalloc.start()
        arrays, message = outcome(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < SLACK
    assert "\n" not in message
    if arrays is not None:
        assert original
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, ARRAYS[key])


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes(data, signed):
    right_or_refused(b"PK\3\4" * signed + data, original=False)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["set", "insert", "delete", "truncate"]),
            st.integers(0, 100_000),
            st.binary(min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_any_mutation_of_a_valid_archive(compressed, edits):
    with tempfile.TemporaryDirectory() as folder:
        data = bytearray(saved(folder, compressed=compressed).read_bytes())
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
    right_or_refused(bytes(data), original=True)


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=120), st.integers(0, 200), st.booleans())
def test_any_header_behind_a_good_checksum(text, place, inside):
    """The parser of the .npy header sees what it would not if checksums always caught the damage."""
    good = npy("|u1", (6, 5), ARRAYS["x_train"].tobytes())
    member = good[: place % len(good)] + text + good[place % len(good) :] if inside else good[:10] + text
    with tempfile.TemporaryDirectory() as folder:
        arrays, message = outcome(archive(folder, x_train=member))
    assert "\n" not in message
    if arrays is not None:
        np.testing.assert_array_equal(arrays["x_train"], np.load(io.BytesIO(member), allow_pickle=False))
