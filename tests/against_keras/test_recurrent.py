"""Recurrent models and masks: 200 steps from Keras' weights, in float64, and files both ways."""

import numpy as np
import pytest

import dptrain as dp

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*destroy the mask information:UserWarning"),
]
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 9, (45, 5)) * (np.arange(5) < RNG.integers(2, 6, (45, 1)))
LABELS = RNG.integers(0, 3, (45, 5))


def labelling(k):
    """Return a model of module k (dptrain or Keras) that labels steps, with a mask up to the loss."""
    L = k.layers
    inputs = k.Input((5,), dtype="int32")
    x = L.Embedding(9, 4, mask_zero=True)(inputs)
    x = L.Bidirectional(L.LSTM(3, return_sequences=True))(x)
    x = L.Add()([L.GRU(6, return_sequences=True)(x), x])
    x = L.RNN([L.SimpleRNNCell(4), L.GRUCell(5, reset_after=False)], return_sequences=True)(x)
    x = L.TimeDistributed(L.Dense(4, activation="tanh"))(x)
    return k.Model(inputs, L.Dense(3)(x))


def translating(k):
    """Return a model whose decoder begins with the encoder's states."""
    L = k.layers
    inputs = k.Input((5,), dtype="int32")
    embedded = L.Embedding(9, 4, mask_zero=True)(inputs)
    _, *states = L.LSTM(4, return_state=True)(embedded)
    x = L.LSTM(4, return_sequences=True)(embedded, initial_state=states)
    return k.Model(inputs, L.Dense(3)(L.LayerNormalization()(x)))


def picturing(k):
    """Return a model of small pictures of the ids."""
    L = k.layers
    inputs = k.Input((5,), dtype="int32")
    x = L.Reshape((5, 2, 3))(L.Embedding(9, 6)(inputs))
    x = L.ConvLSTM1D(3, 2, padding="same", return_sequences=True)(x)
    return k.Model(inputs, L.Dense(3)(L.TimeDistributed(L.Flatten())(x)))


MODELS = {"labelling": labelling, "translating": translating, "picturing": picturing}


@pytest.mark.parametrize("name", MODELS)
def test_two_hundred_steps(keras, name):
    ours, theirs = MODELS[name](dp), MODELS[name](keras)
    assert [weight.shape for weight in ours.weights] == [tuple(weight.shape) for weight in theirs.weights]
    for k, model in ((dp, ours), (keras, theirs)):
        loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
        compile_options = {"dtype": "float64", "jit_compile": False} if k is dp else {}
        model.compile(k.optimizers.SGD(0.3, 0.5), loss, metrics=["accuracy"], **compile_options)
    start = [weight + 0.1 * RNG.random(weight.shape) for weight in theirs.get_weights()]
    for model in (ours, theirs):
        model.set_weights(start)
    options = {"batch_size": 5, "epochs": 23, "shuffle": False, "verbose": 0}  # 9 steps each
    mine, their_history = (model.fit(IDS, LABELS, **options).history for model in (ours, theirs))
    np.testing.assert_allclose(mine["loss"], their_history["loss"], rtol=1e-8)
    if name == "picturing" or keras.backend.backend() != "jax":  # in whose training steps masks do not reach metrics
        np.testing.assert_allclose(mine["accuracy"], their_history["accuracy"], rtol=1e-6)
    for weight, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(
        ours.evaluate(IDS, LABELS, batch_size=32, verbose=0), theirs.evaluate(IDS, LABELS, verbose=0), rtol=1e-6
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ending", ["keras", "h5", "weights.h5"])
def test_files_are_read_both_ways(keras, name, ending, tmp_path):
    ours, theirs = MODELS[name](dp), MODELS[name](keras)
    expected = theirs.predict(IDS, verbose=0)
    path, back = str(tmp_path / f"theirs.{ending}"), str(tmp_path / f"ours.{ending}")
    if ending == "weights.h5":
        theirs.save_weights(path)
        ours.load_weights(path)
        ours.save_weights(back)
        rebuilt = MODELS[name](keras)
        rebuilt.load_weights(back)
    else:
        theirs.save(path)
        ours = dp.models.load_model(path)
        ours.save(back)
        rebuilt = keras.models.load_model(back)
    np.testing.assert_allclose(ours.predict(IDS, verbose=0), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rebuilt.predict(IDS, verbose=0), expected, rtol=1e-4, atol=1e-5)


def test_masks_of_layers_that_merge(keras):
    """Values and masks, also where one input has none."""
    x, state = (RNG.normal(size=(3, 4, 2)) * (RNG.random((3, 4, 1)) < 0.5) for _ in range(2))
    for name in ("Add", "Subtract", "Average", "Multiply", "Maximum", "Minimum", "Concatenate"):
        for second in (True, False):
            results = []
            for k in (dp, keras):
                masked = [
                    k.layers.Masking(dtype="float64")(x),
                    k.layers.Masking(dtype="float64")(state) if second else k.ops.convert_to_tensor(state),
                ]
                output = getattr(k.layers, name)(dtype="float64")(masked)
                mask = getattr(output, "_keras_mask", None)
                results.append([np.asarray(output), None if mask is None else np.asarray(mask)])
            np.testing.assert_allclose(results[0][0], results[1][0], err_msg=name)
            assert (results[0][1] is None) == (results[1][1] is None), name
            if results[1][1] is not None:
                np.testing.assert_array_equal(results[0][1], results[1][1], err_msg=name)


def nested_shapes(outputs):
    """Return the shapes of tensors, nested like these; a shape as it is."""
    if hasattr(outputs, "shape"):
        return tuple(outputs.shape)
    if any(part is None or isinstance(part, int) for part in outputs):
        return tuple(outputs)
    return [nested_shapes(part) for part in outputs]


def shapes_of_states(library, cells, bidirectional):
    """Return shapes of outputs and states: symbolic, of a decoder that starts from them, eager, and of models."""
    L = library.layers

    def layer():
        made = [getattr(L, name)(units) for name, units in cells]
        rnn = L.RNN(made[0] if len(made) == 1 else made, return_state=True)
        return L.Bidirectional(rnn) if bidirectional else rnn

    x, inputs = np.zeros((2, 5, 3)), library.Input((5, 3))
    encoder, decoder = layer(), layer()
    outputs = encoder(inputs)
    decoded = decoder(inputs, initial_state=list(outputs[1:]))
    results = [outputs, decoded, encoder.compute_output_shape((None, 5, 3)), encoder(x)]
    models = [library.Model(inputs, outputs), library.Model(inputs, decoded)]
    shapes = [nested_shapes(result) for result in results]
    return [*shapes, *(nested_shapes(model(x)) for model in models)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    "cells",
    [
        [("GRUCell", 3)],
        [("LSTMCell", 3)],
        [("GRUCell", 3), ("GRUCell", 4)],
        [("LSTMCell", 3), ("SimpleRNNCell", 4)],
        [("SimpleRNNCell", 2), ("LSTMCell", 2), ("GRUCell", 3)],
    ],
    ids=lambda cells: "-".join(name for name, _ in cells),
)
def test_states_are_nested_as_by_keras(keras, cells, bidirectional):
    assert shapes_of_states(dp, cells, bidirectional) == shapes_of_states(keras, cells, bidirectional)
