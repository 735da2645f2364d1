"""The bytes of a .safetensors file."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays

from dptrain.program.tensor import Variable
from dptrain.saving import safetensors_file

WEIGHTS = {"dense/kernel": np.arange(6.0, dtype=np.float32).reshape(2, 3), "dichte/größe": np.ones(3)}
LAYERS = [{"class": "Dense", "config": {"units": 3, "name": 'ä"\\'}}]


def test_equal_weights_give_equal_bytes():
    """The library orders the metadata at random."""
    assert len({safetensors_file.encode(WEIGHTS, LAYERS) for _ in range(20)}) == 1


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1),
        st.sampled_from(["?", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8"]).flatmap(
            lambda kind: arrays(kind, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
        ),
        max_size=5,
    )
)
def test_the_library_reads_any_arrays(tensors):
    tensors = {name: value.T for name, value in tensors.items() if name != "__metadata__"}
    loaded = safetensors.numpy.load(b"".join(safetensors_file.pieces(tensors)))
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_the_library_reads_what_was_written(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_file.encode(WEIGHTS, LAYERS))
    loaded = safetensors.numpy.load_file(path)
    assert sorted(loaded) == sorted(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert loaded[name].dtype == weight.dtype
        np.testing.assert_array_equal(loaded[name], weight)
    with safetensors.safe_open(path, "np") as file:
        assert json.loads(file.metadata()["architecture"]) == LAYERS
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "tensors are aligned"


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "uint32", "int16", "uint64"])
def test_weights_of_any_integer_type_are_loaded(tmp_path, dtype):
    path, weight = tmp_path / "model.safetensors", Variable(np.zeros(3, dtype), "counts")
    path.write_bytes(safetensors_file.encode({"counts": np.array([1, 0, 1], dtype)}, LAYERS))
    (value,) = safetensors_file.load(path, {"counts": weight}).values.values()
    assert value.dtype == dtype
    np.testing.assert_array_equal(value, [1, 0, 1])
