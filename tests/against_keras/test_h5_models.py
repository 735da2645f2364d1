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
