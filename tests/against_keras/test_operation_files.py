"""Files of models with Keras' operations, between dptrain and the real Keras 3, both ways."""

import json
import zipfile

import numpy as np
import pytest

import dptrain as dp
from dptrain.program import tree
from tests.unit.models.operation_cases import CASES, built

pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

# Where dptrain computes something else, see docs/keras.md.
DIFFERENT = ("sparsemax", "sparsemax2")
# Keras writes their other names, or what is nothing here.
OTHER_NAMES = ("true_divide", "left_shift", "right_shift", "bitwise_not", "quotient", "real", "conjugate")


def operations(path):
    """Return the operations in a file as module, class and configuration, without names."""
    with zipfile.ZipFile(path) as file:
        listed = json.loads(file.read("config.json"))["config"]["layers"]
    return sorted(
        (layer["module"], layer["class_name"], json.dumps({**layer["config"], "name": ""}, sort_keys=True))
        for layer in listed
        if ".ops" in layer["module"]
    )


def written_and_read(keras, model, samples, path):
    """Return what a model of Keras gives, also after it was saved and loaded; skip where Keras cannot do either."""
    try:
        model.save(path)
        keras.models.load_model(path)(samples)
        return model(samples)
    except Exception as error:  # of whatever kind
        pytest.skip(f"not in Keras' own files: {str(error).splitlines()[0][:100]}")


def assert_close(results, expected):
    for result, other in zip(tree.leaves(results), tree.leaves(expected), strict=True):
        result, other = np.asarray(result), np.asarray(other)
        assert result.shape == other.shape
        np.testing.assert_allclose(result.astype(float), other.astype(float), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENT])
def test_files_with_an_operation(keras, name, tmp_path):
    ours, samples = built(dp, CASES[name])
    ours.save(tmp_path / "ours.keras")
    try:
        theirs, _ = built(keras, CASES[name])
    except Exception as error:  # of whatever kind
        pytest.skip(f"not a model in Keras: {str(error).splitlines()[0][:100]}")
    expected = written_and_read(keras, theirs, samples, tmp_path / "theirs.keras")
    result = ours(samples)
    assert_close(keras.models.load_model(tmp_path / "ours.keras")(samples), result)
    assert_close(dp.models.load_model(tmp_path / "theirs.keras")(samples), expected)
    kinds = [[operation[:2] for operation in operations(tmp_path / f"{of}.keras")] for of in ("ours", "theirs")]
    assert kinds[0] == kinds[1] or name in OTHER_NAMES
