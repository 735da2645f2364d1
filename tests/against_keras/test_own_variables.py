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
        def __init__(self, units, words=(), **options):
            super().__init__(units, **options)
            self.words = tuple(words)

        def save_own_variables(self, store):
            super().save_own_variables(store)
            store["many"] = np.array(len(self.words))

        def load_own_variables(self, store):
            self.many = int(np.asarray(store["many"]))
            super().load_own_variables({name: store[name] for name in ("0", "1")})

        def save_assets(self, inner_path):
            Path(inner_path, "words.txt").write_text("\n".join(self.words))

        def load_assets(self, inner_path):
            self.words = tuple(Path(inner_path, "words.txt").read_text().split())

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
    assert (loaded.layers[0].words, loaded.layers[0].many) == (("a", "b"), 2)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    model.save_weights(tmp_path / "m.weights.h5")
    restored = words(reader)
    restored.load_weights(tmp_path / "m.weights.h5")
    for weight, expected in zip(restored.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


class _Blocks:
    """A model whose layers are built in several ways, by Keras or by dptrain."""

    def __init__(self, module):
        layers = module.layers

        class Block(layers.Layer):
            def __init__(self, **options):
                super().__init__(**options)
                self.inner, self.listed = layers.Dense(3, name="inner"), [layers.Dense(3, name="listed")]

            def build(self, input_shape):
                self.factor = self.add_weight((3,), name="factor")
                self.inner.build(input_shape)
                super().build(input_shape)

            def call(self, inputs):
                return self.listed[0](self.inner(inputs)) * self.factor

        class Whole(module.Model):
            def __init__(self):
                super().__init__(name="whole")
                self.block = Block(name="block")
                self.head = module.Sequential([layers.Dense(2, name="out"), layers.BatchNormalization(name="norm")])
                self.head.name = "head"

            def call(self, inputs):
                return self.head(self.block(inputs))

        self.block, self.whole = Block(name="alone"), Whole()
        inputs = module.Input((3,))
        self.functional = module.Model(inputs, layers.Dense(2, name="top")(self.block(inputs)), name="functional")
        self.whole(module.ops.zeros((2, 3)))
        steps = [module.Input((5, 4)), layers.Bidirectional(layers.LSTM(2, name="lstm"), name="both")]
        steps += [module.Sequential([layers.Dense(1, name="last")], name="nested")]
        self.sequential = module.Sequential(steps, name="steps")
        self.models = self.functional, self.whole, self.sequential


def test_paths_have_the_layers_around(keras):
    ours, theirs = _Blocks(dp), _Blocks(keras)
    for model, their_model in zip(ours.models, theirs.models, strict=True):
        assert [weight.path for weight in model.weights] == [weight.path for weight in their_model.weights]
        assert model.path == their_model.path
    layers = ours.block, ours.block.inner, ours.block.listed[0], ours.whole.head, ours.whole.block.inner
    their_layers = theirs.block, theirs.block.inner, theirs.block.listed[0], theirs.whole.head, theirs.whole.block.inner
    assert [layer.path for layer in layers] == [layer.path for layer in their_layers]
    assert dp.layers.Dense(3).path is None
