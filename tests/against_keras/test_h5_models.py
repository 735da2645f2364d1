"""Whole models in `.h5`, between dptrain and the real Keras 3, both ways."""

import numpy as np
import pytest

import dptrain as dp

pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

# Keras on PyTorch gives rise to it wherever it turns a variable into an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RNG = np.random.default_rng(6)
X, Y = RNG.random((12, 3)), RNG.random((12, 2))


def trained(module, **options):
    """A functional model that calls a Sequential twice, with some training behind it, in Keras or dptrain."""
    layers = module.layers
    inputs = layers.Input((3,), dtype="float64")
    inner = module.Sequential([layers.Input((3,), dtype="float64"), layers.Dense(3, "tanh")], name="inner")
    outputs = layers.Dense(2)(layers.BatchNormalization()(layers.Concatenate()([inner(inputs), inner(inner(inputs))])))
    model = module.Model(inputs, outputs)
    model.compile(module.optimizers.Adam(0.01), "mean_squared_error", **options)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    return model


OPTIONS = {"device": "cpu", "dtype": "float64", "run_eagerly": True}


def assert_goes_on(model, loaded):
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 6
    losses = [
        candidate.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False).history["loss"]
        for candidate in (model, loaded)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_an_h5_of_keras(keras, tmp_path):
    theirs = trained(keras)
    theirs.save(tmp_path / "m.h5")
    assert_goes_on(theirs, dp.models.load_model(tmp_path / "m.h5", **OPTIONS))


def test_an_h5_of_ours_in_keras(keras, tmp_path):
    ours = trained(dp, **OPTIONS)
    ours.save(tmp_path / "m.h5")
    theirs = keras.models.load_model(tmp_path / "m.h5")  # whose optimizer Keras builds for no weights
    np.testing.assert_allclose(theirs.predict(X, verbose=0), ours.predict(X, verbose=0), rtol=1e-6)
    assert float(theirs.optimizer.learning_rate) == 0.01
    assert len(theirs.weights) == len(ours.weights)


class Shifted(dp.layers.Layer):
    """Has a name of its own, and a configuration without Keras' keys."""

    def __init__(self, by, **options):
        super().__init__(**options)
        self.by = by

    def call(self, x):
        return x + self.by

    def get_config(self):
        return {"by": self.by, "name": self.name}


def test_an_h5_with_operations(keras, tmp_path):
    """Keras writes them without modules, and takes `Add` for the layer of that name when it reads its file."""
    inputs = keras.Input((3,))
    hidden = keras.ops.relu(keras.layers.Dense(4)(inputs) + 3.0) * 0.5
    added = keras.layers.Add()([hidden, keras.ops.tanh(hidden / 2.0)])
    theirs = keras.Model(inputs, keras.ops.concatenate([added, keras.ops.expand_dims(inputs[:, 1], -1)], axis=-1))
    theirs.save(tmp_path / "m.h5")
    ours = dp.models.load_model(tmp_path / "m.h5", device="cpu")
    np.testing.assert_allclose(ours.predict(X, verbose=0), theirs.predict(X, verbose=0), rtol=1e-5)
    ours.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(again.predict(X, verbose=0), theirs.predict(X, verbose=0), rtol=1e-5)


def test_an_h5_with_a_layer_that_says_little(tmp_path):
    inputs = dp.layers.Input((3,))
    model = dp.Model(inputs, Shifted(2.0)(inputs))
    model.save(tmp_path / "m.h5")
    with pytest.raises(dp.errors.DataError, match=r"Shifted.*custom_objects"):
        dp.models.load_model(tmp_path / "m.h5")
    ours = dp.models.load_model(tmp_path / "m.h5", custom_objects={"Shifted": Shifted}, device="cpu")
    np.testing.assert_allclose(ours.predict(X, verbose=0), X + 2, rtol=1e-6)
