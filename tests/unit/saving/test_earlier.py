"""Files that dptrain has written before steps were programs: they are read, and training goes on as it did there.

A float64 Flatten, Dense(5, "tanh"), BatchNormalization, Dense(2, "softmax"), of seed 9, after five epochs of Adam(0.01)
on X and Y in batches of 6, unshuffled; `expected.npz` has what it then predicted, and five epochs more.
"""

from pathlib import Path

import numpy as np
import pytest

import dptrain as dp

pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

EARLIER = Path(__file__).parent / "earlier"
RNG = np.random.default_rng(2)
X, Y = RNG.random((12, 2, 3)), np.arange(12) % 2


@pytest.fixture
def expected():
    with np.load(EARLIER / "expected.npz") as archive:
        yield dict(archive)


def test_a_model_trains_on(expected):
    model = dp.models.load_model(EARLIER / "model.keras", device="cpu")
    np.testing.assert_allclose(model.predict(X, verbose=0), expected["predicted"], rtol=1e-12)
    history = model.fit(X, Y, batch_size=6, epochs=5, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected["losses"], rtol=1e-12)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected["later"], rtol=1e-12)


@pytest.mark.parametrize("name", ["model.safetensors", "model.keras"])
def test_weights(expected, name):
    model = dp.models.load_model(EARLIER / "model.keras", device="cpu")
    model.set_weights([0 * weight for weight in model.get_weights()])
    model.load_weights(EARLIER / name)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected["predicted"], rtol=1e-12)


def test_dropout_goes_on_counting(expected):
    """Its draws were counted by the optimizer's iterations."""
    model = dp.models.load_model(EARLIER / "dropout.keras", device="cpu")
    np.testing.assert_allclose(model.predict(X, verbose=0), expected["dropout"], rtol=1e-12)
    (dropout,) = (layer for layer in model.layers if isinstance(layer, dp.layers.Dropout))
    assert int(dropout.seed_generator.count) == int(model.optimizer.iterations) == 10


def test_a_program_of_before_it_had_bodies():
    """Its loop, of a bidirectional GRU over three steps, is written down."""
    program = dp.saving.load_program(EARLIER / "gru.program", device="cpu")
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 3, 2)
    np.testing.assert_allclose(program(x), np.load(EARLIER / "gru.npy"), rtol=1e-6)
