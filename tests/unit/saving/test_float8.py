"""Weights in float8: kept as such whatever the policy, and read back from files of every kind with the same bits."""

import numpy as np
import pytest
import safetensors.numpy

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError
from dptrain.runtime.types import TYPES
from dptrain.saving import load_program, state

TYPE_NAMES = [name for name, known in TYPES.items() if known.storage.itemsize == 1 and known.is_float]
VALUES = np.array([0.3, 448, -7.7, 2**-9, np.nan])


@dp.saving.register_keras_serializable("tests")
class Scaled(layers.Layer):
    """Multiplies by weights in float8."""

    def __init__(self, dtype_of_scale, **keywords):
        super().__init__(**keywords)
        self.dtype_of_scale = dtype_of_scale

    def build(self, shape):
        self.scale = self.add_weight(
            (shape[-1],), "ones", dtype=self.dtype_of_scale, trainable=False, autocast=False, name="scale"
        )

    def call(self, x):
        return x * ops.cast(self.scale, x.dtype)

    def get_config(self):
        return super().get_config() | {"dtype_of_scale": self.dtype_of_scale}


def build(dtype, values=VALUES, policy=None):
    model = dp.Sequential([dp.Input((values.size,)), Scaled(dtype, name="scaled"), layers.Dense(2, name="dense")])
    model.compile("sgd", "mse", dtype=policy)
    model.layers[0].scale.assign(values)
    return model


def bits(model):
    weight = model.layers[0].scale.numpy()
    return weight.dtype.name, weight.tobytes()


@pytest.fixture(params=TYPE_NAMES)
def dtype(request):
    return request.param


@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_bfloat16"])
def test_no_policy_changes_a_weights_type(dtype, policy):
    assert bits(build(dtype, policy=policy)) == (dtype, VALUES.astype(dtype).tobytes())


@pytest.mark.parametrize("name", ["model.weights.h5", "model.safetensors"])
def test_files_of_weights(tmp_path, dtype, name):
    """Files have float32, which every library reads."""
    saved, loaded = build(dtype), build(dtype, np.zeros(VALUES.size))
    saved.save_weights(tmp_path / name)
    loaded.load_weights(tmp_path / name)
    assert bits(loaded) == bits(saved)
    if name.endswith(".safetensors"):
        scale = safetensors.numpy.load_file(tmp_path / name)["scaled/scale"]
        assert scale.dtype == np.float32
        np.testing.assert_array_equal(scale, VALUES.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
def test_files_of_models(tmp_path, dtype, name):
    saved = build(dtype)
    saved.save(tmp_path / name)
    assert bits(dp.models.load_model(tmp_path / name)) == bits(saved)


def test_a_state_has_the_bits_themselves(dtype):
    arrays = {"a": VALUES.astype(dtype), "b": np.arange(3.0), "c": VALUES.astype("bfloat16"), "d": np.uint8([1, 2])}
    content = state.pack(arrays, {"step": 3}, "dptrain test 1")
    about, unpacked = state.unpack(content, "here", "dptrain test 1", "start afresh")
    assert about == {"step": 3}
    assert {name: (array.dtype, array.tobytes()) for name, array in unpacked.items()} == {
        name: (array.dtype, array.tobytes()) for name, array in arrays.items()
    }


def test_a_checkpoint(tmp_path, dtype):
    x, y = np.ones((8, VALUES.size), np.float32), np.ones((8, 2), np.float32)
    values = np.array([0.3, 1.1, -0.7, 2**-9, 0.0])
    saved = build(dtype, values)
    saved.fit(x, y, epochs=2, verbose=0, callbacks=[dp.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)])
    loaded = build(dtype, np.zeros(values.size))
    loaded.fit(x, y, epochs=2, verbose=0, callbacks=[dp.callbacks.BackupAndRestore(tmp_path)])
    assert bits(loaded) == bits(saved) == (dtype, values.astype(dtype).tobytes())


def test_a_program(tmp_path, dtype):
    x, values = np.ones((3, VALUES.size), np.float32), np.nan_to_num(VALUES)
    model = build(dtype, values)
    model.export(tmp_path / "model.npz", format="program", verbose=False)
    program = load_program(tmp_path / "model.npz")
    np.testing.assert_array_equal(program(x), model.predict(x, verbose=0))


def test_onnx_has_no_float8(tmp_path, dtype):
    """A weight becomes a constant of float32; what a layer computes in float8 is refused, with the layer's name."""
    pytest.importorskip("onnx")
    build(dtype).export(tmp_path / "model.onnx", format="onnx", verbose=False)
    inputs = dp.Input((2,))
    outputs = layers.Lambda(lambda x: ops.cast(ops.cast(x, dtype), "float32"), name="rounds")(inputs)
    with pytest.raises(ConfigError, match=f"not supported in ONNX: op 'round_to' in 'rounds.*' of {dtype}"):
        dp.Model(inputs, outputs).export(tmp_path / "other.onnx", format="onnx", verbose=False)


def test_a_policy_is_no_float8(dtype):
    with pytest.raises(ConfigError, match=f"not supported: dtype policy '{dtype}'"):
        dp.mixed_precision.set_global_policy(dtype)
