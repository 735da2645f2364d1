"""What a checkpoint's manifest may say: arrays tiled by parts, files tiled by what lies in them."""

import dataclasses
import json
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import DataError
from dptrain.saving import manifest, safetensors_file
from dptrain.saving.manifest import Entries, Manifest, PartOf, blocks, described, joined, sealed
from tests.unit.saving.test_parts import cuts, shapes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def manifest_of(array: np.ndarray, grid: list[list[int]], name: str = "w") -> tuple[Manifest, dict[str, list]]:
    """Return the manifest of an array that a grid of ranks has written, a file each, and the files."""
    files, results = {}, []
    for number, key in enumerate(cells(grid)):
        part = {name: array[tuple(slice(*bounds) for bounds in key)]}
        of = {name: PartOf(name, tuple(start for start, _ in key), array.shape)}
        file = f"shard-{number}.safetensors"
        files[file] = safetensors_file.pieces(part)
        results.append(described(file, files[file], of))
    manifest = joined([*results, described("state.json", [b"{}"], None)])
    return Manifest(3, 0.5, {"batch": 2}, manifest.files, manifest.arrays), files


def cells(grid):
    if not grid:
        return [()]
    pairs = list(zip(grid[0], grid[0][1:], strict=False))
    return [(pair, *rest) for pair in pairs for rest in cells(grid[1:])]


@given(st.data())
def test_what_ranks_write_is_read_back(data):
    shape = data.draw(shapes())
    manifest, _ = manifest_of(
        np.zeros(shape, data.draw(st.sampled_from(["float32", "int64", "bool"]))), data.draw(cuts(shape))
    )
    assert Manifest.parsed(manifest.encoded()) == manifest


@given(st.data())
def test_one_damaged_number_is_noticed(data):
    """Of slices: any other start, length or offset leaves a gap, overlaps, or lies outside."""
    shape = data.draw(shapes(least=1))
    manifest, _ = manifest_of(np.zeros(shape), data.draw(cuts(shape)))
    document = manifest.as_json()
    parts = json.loads(json.dumps(document["arrays"]["w"][2]))
    part = data.draw(st.sampled_from(parts))
    change = data.draw(st.integers(-(1 << 70), 1 << 70).filter(bool))
    place = data.draw(st.sampled_from(["offset", "start", "shape", "file"]))
    if place == "offset":
        part[1] += change
    elif place == "file":
        part[0] = data.draw(st.sampled_from(["../x", "/etc/passwd", "state.json", "", "manifest.json"]))
    elif shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        part[2 if place == "start" else 3][axis] += change
    else:
        part[1] += change
    document["arrays"]["w"][2] = parts
    with pytest.raises(DataError, match=r"damaged: manifest.json does not describe a checkpoint: "):
        Manifest.parsed(sealed(document))


@given(st.data())
def test_a_slice_that_is_missing_or_twice_there_is_noticed(data):
    shape = data.draw(shapes(least=1))
    manifest, _ = manifest_of(np.zeros(shape), data.draw(cuts(shape)))
    document = json.loads(json.dumps(manifest.as_json()))
    parts = document["arrays"]["w"][2]
    if data.draw(st.booleans()):
        parts.append(data.draw(st.sampled_from(parts)))
    else:
        parts.remove(data.draw(st.sampled_from(parts)))
    with pytest.raises(DataError, match="slices overlap, or leave gaps"):
        Manifest.parsed(sealed(document))


@given(JSON | st.dictionaries(st.sampled_from(["schema", "step", "value", "mesh", "files", "arrays"]), JSON))
def test_any_json_is_a_manifest_or_damaged(document):
    with pytest.raises(DataError, match=r"damaged: |schema "):
        Manifest.parsed(sealed(document) if isinstance(document, dict) else json.dumps(document).encode())


@given(st.data())
def test_any_value_in_any_place_is_read_or_damaged(data):
    document = json.loads(json.dumps(manifest_of(np.zeros((4, 6)), [[0, 2, 4], [0, 6]])[0].as_json()))
    place = document
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        manifest = Manifest.parsed(sealed(document))
    except DataError:
        return
    assert Manifest.parsed(manifest.encoded()) == manifest


@given(st.binary(max_size=40))
def test_any_bytes_are_damaged(content):
    with pytest.raises(DataError, match="damaged"):
        Manifest.parsed(content)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"schema": ' + b"9" * 5000 + b"}"])
def test_deep_and_long_content_is_damaged(content):
    with pytest.raises(DataError, match="damaged"):
        Manifest.parsed(content)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "manifest.json", "a\0"])
def test_a_file_lies_in_the_folder(name):
    manifest, _ = manifest_of(np.zeros(3), [[0, 3]])
    files = dict(manifest.files) | {name: manifest.files["state.json"]}
    with pytest.raises(DataError, match="is not the name of a file in it"):
        Manifest.parsed(dataclasses.replace(manifest, files=files).encoded())


@pytest.mark.parametrize(
    ("file", "entry", "message"),
    [
        ("state.json", [2, 1, "0" * 64], "state.json has 2 bytes, and its slices end at 1"),
        ("shard-0.safetensors", [1 << 40, 80, "0" * 64], "in shard-0.safetensors|slices end at"),
        ("state.json", [2, 3, "0" * 64], "size or digest of state.json"),
        ("state.json", [2, 2, "0" * 63], "size or digest of state.json"),
        ("state.json", [-2, -2, "0" * 64], "size or digest of state.json"),
        ("state.json", [True, True, "0" * 64], "size or digest of state.json"),
    ],
)
def test_sizes_are_those_of_what_lies_in_a_file(file, entry, message):
    document = manifest_of(np.zeros(3), [[0, 3]])[0].as_json()
    document["files"][file] = entry
    with pytest.raises(DataError, match=message):
        Manifest.parsed(sealed(document))


def test_two_arrays_do_not_lie_in_one_place():
    pieces = safetensors_file.pieces({"a": np.zeros(2), "b": np.zeros(2)})
    entries = described("x", pieces, {name: PartOf(name, (0,), (2,)) for name in "ab"})
    manifest = Manifest(1, None, {}, entries.files, entries.arrays)
    assert Manifest.parsed(manifest.encoded()) == manifest
    (part,) = entries.arrays["b"].parts
    shifted = dataclasses.replace(entries.arrays["b"], parts=(dataclasses.replace(part, offset=part.offset - 16),))
    entries_of_both = Entries(entries.files, {"a": entries.arrays["a"], "b": shifted})
    with pytest.raises(DataError, match="slices overlap, or leave gaps, in x"):
        Manifest.parsed(dataclasses.replace(manifest, arrays=entries_of_both.arrays).encoded())


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 8), st.integers(1, 64))
def test_blocks_are_all_rows_in_order(shape, itemsize, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", most)
        actual = list(blocks(shape, itemsize))
    rows = [row for start, stop in actual for row in range(start, stop)]
    expected = (shape[0] if shape else 1) if 0 not in shape else 0
    assert rows == list(range(expected))
    width = int(np.prod(shape[1:])) * itemsize
    assert all((stop - start) * width <= max(most, width) for start, stop in actual)


def test_names_may_be_any_text():
    name = string.printable + "é\ud7ff"
    manifest, _ = manifest_of(np.zeros(2), [[0, 2]], name)
    assert Manifest.parsed(manifest.encoded()) == manifest
