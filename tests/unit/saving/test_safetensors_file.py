"""The bytes of a .safetensors file."""

import json

import numpy as np
import safetensors.numpy

from dptrain.saving import safetensors_file

WEIGHTS = {"dense/kernel": np.arange(6.0, dtype=np.float32).reshape(2, 3), "dichte/größe": np.ones(3)}
LAYERS = [{"class": "Dense", "config": {"units": 3, "name": 'ä"\\'}}]


def test_equal_weights_give_equal_bytes():
    """The library orders the metadata at random."""
    assert len({safetensors_file.encode(WEIGHTS, LAYERS) for _ in range(20)}) == 1


def test_the_library_reads_what_was_written(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_file.encode(WEIGHTS, LAYERS))
    found = safetensors.numpy.load_file(path)
    assert sorted(found) == sorted(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert found[name].dtype == weight.dtype
        np.testing.assert_array_equal(found[name], weight)
    with safetensors.safe_open(path, "np") as file:
        assert json.loads(file.metadata()["architecture"]) == LAYERS
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "tensors are aligned"
