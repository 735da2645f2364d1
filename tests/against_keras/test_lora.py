"""LoRA as Keras has it: the same steps from the same factors, and the same files."""

import numpy as np
import pytest

import dptrain as dp

pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

# Keras on PyTorch gives rise to it wherever it turns a variable into an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.random.default_rng(4).integers(0, 9, (37, 6))
Y = np.random.default_rng(5).normal(size=(37, 3))
# Keras' factors are float32 in layers of float64, too.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def stack(module, begins=True):
    """Return a model of Keras or dptrain in which layers of each class have LoRA, from the constructor or later."""
    arguments = {"lora_rank": 2} if begins else {}
    L = module.layers
    stacked = [
        L.Embedding(9, 8, **arguments),
        L.Conv1D(6, 2, kernel_regularizer="l2", **arguments),
        L.EinsumDense("abc,cde->abde", (None, 2, 3), "tanh", "e", **arguments),
        L.Reshape((5, 6)),
        L.MultiHeadAttention(2, 3),
        L.Flatten(),
        L.Dense(3, kernel_regularizer="l2", **arguments),
    ]
    inputs = x = L.Input((6,), dtype="int32")
    for layer in stacked:
        x = layer(x, x) if isinstance(layer, L.MultiHeadAttention) else layer(x)
    if not begins:
        stacked[0].enable_lora(2, lora_alpha=4)
        stacked[2].enable_lora(3, lora_alpha=1.5)
        stacked[4]._query_dense.enable_lora(1)
        stacked[6].enable_lora(2)
    return module.Model(inputs, x)


def compiled(module, model, optimizer="Adam"):
    options = {"dtype": "float64", "device": "cpu"} if module is dp else {}
    settings = {"epsilon": 1e-3} if optimizer == "Adam" else {}  # the least gradients do not decide a whole step
    model.compile(getattr(module.optimizers, optimizer)(0.01, **settings), "mse", **options)
    return model


def fitted(model, epochs=3):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]


@pytest.mark.parametrize(("begins", "optimizer"), [(True, "SGD"), (False, "Adam")])
def test_steps(keras, begins, optimizer):
    theirs, ours = compiled(keras, stack(keras, begins), optimizer), compiled(dp, stack(dp, begins), optimizer)
    assert [w.shape for w in ours.get_weights()] == [w.shape for w in theirs.get_weights()]
    for attribute in ("weights", "trainable_weights", "non_trainable_weights"):
        assert [w.name for w in getattr(ours, attribute)] == [w.name for w in getattr(theirs, attribute)]
    rng = np.random.default_rng(6)
    start = [w + 0.1 * rng.normal(size=w.shape) for w in theirs.get_weights()]
    theirs.set_weights(start)
    ours.set_weights([np.asarray(w) for w in theirs.get_weights()])
    np.testing.assert_allclose(fitted(ours), fitted(theirs), rtol=1e-5)
    for mine, expected in zip(ours.weights, theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine.numpy(), expected, **CLOSE, err_msg=mine.path)
    np.testing.assert_allclose(ours.predict(X, verbose=0), theirs.predict(X, verbose=0), **CLOSE)


@pytest.mark.parametrize("direction", ["from keras", "to keras"])
@pytest.mark.parametrize(
    ("ending", "begins"),
    [
        ("model.keras", True),  # of an attention's projection Keras does not write that it has LoRA
        ("model.weights.h5", False),
        pytest.param("model.h5", True, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning")
def test_files(keras, tmp_path, direction, ending, begins):
    writer, reader = (keras, dp) if direction == "from keras" else (dp, keras)
    keras.utils.set_random_seed(1)
    model = compiled(writer, stack(writer, begins))
    fitted(model)
    expected = np.asarray(model.predict(X, verbose=0))
    if ending == "model.weights.h5":
        model.save_weights(tmp_path / ending)
        loaded, other = stack(reader, begins), stack(reader)
        loaded.load_weights(tmp_path / ending)
        other.load_weights(tmp_path / ending)
        np.testing.assert_allclose(other.predict(X, verbose=0), expected, **CLOSE)
    else:
        model.save(tmp_path / ending)
        # Keras does not read its own name of the loss in this form.
        compiles = (reader, ending) != (keras, "model.h5")
        loaded = reader.saving.load_model(tmp_path / ending, compile=compiles)
        assert loaded.layers[1].lora_enabled
    if ending != "model.weights.h5" and compiles:
        assert int(np.asarray(loaded.optimizer.iterations)) == 15
        assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
        for mine, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), **CLOSE, err_msg=mine.path)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, **CLOSE)


def test_live_models(keras):
    keras.utils.set_random_seed(1)
    theirs = compiled(keras, stack(keras))
    fitted(theirs)
    ours = dp.models.from_keras(theirs, dtype="float64", device="cpu")
    for mine, expected in zip(ours.weights, theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-6, err_msg=mine.path)
    np.testing.assert_allclose(fitted(ours), fitted(theirs), rtol=1e-5)
