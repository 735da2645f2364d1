"""Parts of arrays are read from files of other parts: to the bit, and only the blocks that are needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import DataError
from dptrain.runtime.storage.files import open_directory
from dptrain.saving import manifest
from dptrain.saving.parts import overlap, read_part


@st.composite
def shapes(draw, least=0):
    """Draw the shape of an array of a few elements, with at least so many along each axis."""
    return tuple(draw(st.lists(st.integers(least, 6), max_size=3)))


@st.composite
def cuts(draw, shape):
    """Draw where a grid cuts each axis."""
    inner = [draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 else set() for n in shape]
    return [[0, *sorted(edges), n] for edges, n in zip(inner, shape, strict=True)]


@st.composite
def slices(draw, shape):
    """Draw where a part begins and its shape."""
    starts = [draw(st.integers(0, n)) for n in shape]
    return tuple(starts), tuple(draw(st.integers(0, n - start)) for start, n in zip(starts, shape, strict=True))


@given(st.data())
def test_any_part_is_read_from_any_grid(tmp_path_factory, data):
    from tests.unit.saving.test_manifest import manifest_of

    shape = data.draw(shapes())
    array = np.arange(int(np.prod(shape)), dtype=data.draw(st.sampled_from(["float32", "uint8", "int64"])))
    array = array.reshape(shape)
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", data.draw(st.integers(1, 40)))
        actual, files = manifest_of(array, data.draw(cuts(shape)))
        for name, pieces in files.items():
            (folder / name).write_bytes(b"".join(pieces))
        start, lengths = data.draw(slices(shape))
        with open_directory(folder) as opened:
            part = read_part(opened, actual.arrays["w"], start, lengths)
    expected = array[tuple(slice(first, first + n) for first, n in zip(start, lengths, strict=True))]
    assert part.dtype == array.dtype
    np.testing.assert_array_equal(part, expected)
    assert part.shape == lengths


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), max_size=3))
def test_an_overlap_is_what_both_have(axes):
    left_axes, other = [(a, b) for a, b, _, _ in axes], [(c, d) for _, _, c, d in axes]
    common = [set(range(a, a + b)) & set(range(c, c + d)) for a, b, c, d in axes]
    overlapping = overlap(left_axes, other)
    assert (overlapping is None) == (not all(common))
    assert overlapping is None or [set(range(*bounds)) for bounds in overlapping] == common


def test_only_blocks_that_are_needed_are_read_and_no_damaged_one(tmp_path, monkeypatch):
    from tests.unit.saving.test_manifest import manifest_of

    monkeypatch.setattr(manifest, "BLOCK", 64)  # two rows
    array = np.arange(40, dtype="float64").reshape(10, 4)
    result, files = manifest_of(array, [[0, 6, 10], [0, 4]])
    for name, pieces in files.items():
        content = bytearray(b"".join(pieces))
        if name == "shard-0.safetensors":
            content[-1] ^= 1  # in its last two rows, 4 and 5
            (tmp_path / name).write_bytes(content)
    with open_directory(tmp_path) as folder:
        np.testing.assert_array_equal(read_part(folder, result.arrays["w"], (1, 1), (3, 2)), array[1:4, 1:3])
        with pytest.raises(
            DataError, match=r"damaged: shard-0.safetensors differs from what was written, from byte \d+ on"
        ):
            read_part(folder, result.arrays["w"], (3, 0), (2, 4))
        with pytest.raises(FileNotFoundError):
            read_part(folder, result.arrays["w"], (6, 0), (1, 4))
        size = (tmp_path / "shard-0.safetensors").stat().st_size
        with open(tmp_path / "shard-0.safetensors", "r+b") as file:
            file.truncate(size - 130)
        with pytest.raises(DataError, match="damaged"):
            read_part(folder, result.arrays["w"], (0, 0), (3, 4))
