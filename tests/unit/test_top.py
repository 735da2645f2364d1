"""What Keras has at the top: `import dptrain as keras`."""

import subprocess
import sys

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain.errors import ConfigError
from dptrain.program.tensor import Variable


def test_names_are_the_objects_of_their_rooms():
    assert keras.Layer is keras.layers.Layer
    assert keras.Loss is keras.losses.Loss
    assert keras.Metric is keras.metrics.Metric
    assert keras.Optimizer is keras.optimizers.Optimizer
    assert keras.InputSpec is keras.layers.InputSpec
    assert keras.Initializer is keras.initializers.Initializer
    assert keras.Regularizer is keras.regularizers.Regularizer
    assert keras.DTypePolicy is keras.mixed_precision.Policy
    assert keras.version() == keras.__version__


def test_a_function_of_symbolic_tensors():
    a, b = keras.Input((3,)), keras.Input((3,))
    function = keras.Function({"a": a, "b": b}, [a + b, a * b], name="both")
    x, y = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    added, times = function({"a": x, "b": y})
    np.testing.assert_array_equal(added, x + y)
    np.testing.assert_array_equal(times, x * y)
    assert (len(function.inputs), len(function.outputs), function.name) == (2, 2, "both")
    with pytest.raises(ConfigError, match="`outputs` argument cannot be empty"):
        keras.Function(a, [])
    with pytest.raises(ConfigError, match="not connected"):
        keras.Function(a, b + 1)


def test_symbolic_tensors():
    x = keras.KerasTensor((None, 3), "int32", name="x")
    assert (x.shape[1:], x.dtype, x.name) == ((3,), np.int32, "x")
    assert isinstance(x, keras.KerasTensor)
    assert isinstance(keras.Input((3,)), keras.KerasTensor)
    assert not isinstance(keras.ops.ones(3), keras.KerasTensor)
    assert L.Dense(2)(keras.KerasTensor((5, 3))).shape == (5, 2)
    assert str(keras.KerasTensor((None, None, 4)).shape) == "(None, None, 4)"
    assert (x.sparse, x.ragged) == (False, False)
    with pytest.raises(ConfigError, match="not supported: KerasTensor"):
        keras.KerasTensor((None, 3), sparse=True)


def test_variables_as_keras_makes_them():
    variable = keras.Variable("ones", (2, 3), name="w")
    assert (variable.numpy().tolist(), variable.name, variable.trainable) == ([[1] * 3] * 2, "w", True)
    count = keras.Variable(initializer=0, dtype="int64", trainable=False)
    count.assign_add(2)
    assert (int(count), count.dtype) == (2, np.int64)
    assert keras.Variable(lambda shape, dtype=None: np.full(shape, 7), shape=(2,)).numpy().tolist() == [7, 7]
    assert isinstance(Variable(1.0), keras.Variable)
    assert isinstance(variable, Variable)
    with pytest.raises(ConfigError, match="the `shape` argument should be specified"):
        keras.Variable("ones")
    with pytest.raises(ConfigError, match="unknown initializer 'one_s'"):
        keras.Variable("one_s", (2,))


def test_a_layer_trains_its_variables():
    class Scale(keras.Layer):
        def __init__(self):
            super().__init__()
            self.factor = keras.Variable(1.0, name="factor")

        def call(self, x):
            return x * self.factor

    model = keras.Sequential([keras.Input((1,)), Scale()])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(np.ones((4, 1)), np.full((4, 1), 2.0), batch_size=4, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], 1.2, rtol=1e-6)  # 1 + 0.1 * 2


def test_settings():
    for room in (keras.config, keras.backend):
        assert (room.backend(), room.floatx(), room.epsilon()) == ("dptrain", "float32", 1e-7)
        assert room.image_data_format() == "channels_last"
        room.set_floatx("float32")
        room.set_image_data_format("channels_last")
        room.set_epsilon(1e-7)
    for call, message in (
        (lambda: keras.config.set_epsilon(1e-5), "epsilon = 1e-05; expected 1e-07"),
        (lambda: keras.config.set_backend("jax"), "backend = 'jax'; expected 'dptrain'"),
    ):
        with pytest.raises(ConfigError, match=f"^not supported: .*{message}"):
            call()
    assert keras.backend.clear_session is keras.utils.clear_session


@pytest.mark.parametrize(
    "line",
    ["from dptrain.version import __version__", "dptrain.version()", "import dptrain.tree", "dptrain.backend.floatx()"],
)
def test_fresh_interpreters(line):
    subprocess.run([sys.executable, "-c", f"import dptrain; {line}"], check=True, timeout=60)
