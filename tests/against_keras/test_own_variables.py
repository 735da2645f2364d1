"""Layers that say what is in files, between dptrain and the real Keras 3, both ways."""

from pathlib import Path

import numpy as np
import pytest

import dptrain as dp

pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

# Keras on PyTorch gives rise to it wherever it turns a variable into an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.random.default_rng(7).random((4, 3))


def words(module):
    """Return a model with such a layer, and its class, in Keras or dptrain."""

    @module.saving.register_keras_serializable("Against")
    class Words(module.layers.Dense):
        def __init__(self, units, known=(), **options):
            super().__init__(units, **options)
            self.known = tuple(known)

        def save_own_variables(self, store):
            super().save_own_variables(store)
            store["many"] = np.array(len(self.known))

        def load_own_variables(self, store):
            self.many = int(np.asarray(store["many"]))
            super().load_own_variables({name: store[name] for name in ("0", "1")})

        def save_assets(self, inner_path):
            Path(inner_path, "words.txt").write_text("\n".join(self.known))

        def load_assets(self, inner_path):
            self.known = tuple(Path(inner_path, "words.txt").read_text().split())

        def get_config(self):
            return super().get_config()

    inputs = module.layers.Input((3,), dtype="float64")
    return module.Sequential([inputs, Words(2, ["a", "b"], activation="tanh", dtype="float64")])


@pytest.mark.parametrize("direction", ["from keras", "to keras"])
def test_both_ways(keras, tmp_path, direction):
    writer, reader = (keras, dp) if direction == "from keras" else (dp, keras)
    model = words(writer)
    words(reader)  # which registers the class
    model.save(tmp_path / "m.keras")
    loaded = reader.saving.load_model(tmp_path / "m.keras")
    assert (loaded.layers[0].known, loaded.layers[0].many) == (("a", "b"), 2)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    model.save_weights(tmp_path / "m.weights.h5")
    other = words(reader)
    other.load_weights(tmp_path / "m.weights.h5")
    for one, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, expected)
