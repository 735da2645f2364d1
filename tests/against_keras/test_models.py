"""What a model is and does besides its numbers: layers, build, trainable, class weights, stops."""

import itertools

import numpy as np
import pytest

import dptrain as dp

pytestmark = pytest.mark.filterwarnings("ignore")  # Keras'


def toy(rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4)), rng.integers(0, 3, rows)


def both(keras, *layers, **options):
    """Return the model in both libraries, with Keras' weights, compiled."""
    keras.utils.set_random_seed(0)
    result = []
    for k in (keras, dp):
        stack = [k.Input((4,)), *(getattr(k.layers, name)(*arguments) for name, *arguments in layers)]
        result.append(k.Sequential(stack, **options))
    theirs, ours = result
    # A model of dptrain is float32 until `compile` says otherwise: begin both at numbers that it can hold.
    start = [np.asarray(weight, np.float32) for weight in theirs.get_weights()]
    for model in (theirs, ours):
        model.set_weights(start)
    theirs.compile("sgd", "mse", jit_compile=False)
    ours.compile("sgd", "mse", dtype="float64", jit_compile=False)
    return result


def agree(ours, theirs) -> None:
    for mine, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, np.asarray(expected), rtol=1e-6)


@pytest.mark.parametrize("case", ["constructor", "setter", "layer"])
def test_trainable(keras, case):
    x, _ = toy()
    stack = [("Dense", 3, "tanh"), ("BatchNormalization",), ("Dense", 2)]
    theirs, ours = both(keras, *stack, **({"trainable": False} if case == "constructor" else {}))
    before = ours.get_weights()
    histories = []
    for model in (theirs, ours):
        if case != "constructor":
            (model.layers[0] if case == "layer" else model).trainable = False
        histories.append(model.fit(x, x[:, :2], epochs=2, shuffle=False, verbose=0).history)
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=1e-6)
    agree(ours, theirs)
    assert [layer.trainable for layer in ours.layers] == [layer.trainable for layer in theirs.layers]
    unchanged = [np.array_equal(old, new) for old, new in zip(before, ours.get_weights(), strict=True)]
    assert unchanged[:2] == [True, True]
    assert int(np.asarray(theirs.optimizer.iterations)) == ours.optimizer.iterations


def test_layers_leave_the_input_out(keras):
    theirs, ours = both(keras, ("Dense", 3), ("Dense", 2))
    assert [type(layer).__name__ for layer in ours.layers] == [type(layer).__name__ for layer in theirs.layers]


@pytest.mark.parametrize("input_shape", [(None, 28, 28), (32, 28, 28)])
def test_build(keras, input_shape):
    counts = []
    for k in (keras, dp):
        model = k.Sequential([k.layers.Flatten(), k.layers.Dense(3)])
        model.build(input_shape)
        counts.append(model.count_params())
    assert counts == [2355, 2355]


def test_a_model_of_rescaling_alone(keras):
    x, _ = toy()
    histories = []
    for model in both(keras, ("Rescaling", 2.0)):
        history = model.fit(x, x, epochs=2, verbose=0, validation_data=(x, x)).history
        histories.append([*history["loss"], *history["val_loss"], model.evaluate(x, x, verbose=0)])
        np.testing.assert_allclose(np.asarray(model.predict(x, verbose=0)), 2 * x)
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-6)


@pytest.mark.parametrize("validation", ["split", "data"])
def test_class_weights(keras, validation):
    x, y = toy()
    theirs, ours = both(keras, ("Dense", 3, "softmax"))
    theirs.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    ours.compile("sgd", "sparse_categorical_crossentropy", dtype="float64", jit_compile=False)
    validation_data = {"validation_split": 0.25} if validation == "split" else {"validation_data": (x[:9], y[:9])}
    options = {"epochs": 3, "shuffle": False, "verbose": 0, "class_weight": {0: 5.0, 2: 0.1}}
    expected = theirs.fit(x, y, **options, **validation_data).history
    history = ours.fit(x, y, **options, **validation_data).history
    for key in ("loss", "val_loss"):
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-5)


def test_stops(keras):
    x, _ = toy()
    results = []
    for k, model in zip((keras, dp), both(keras, ("Dense", 2)), strict=True):

        class Stop(k.callbacks.Callback):
            def on_test_batch_end(self, batch, logs=None):
                self.model.stop_evaluating = batch == 2

            def on_predict_batch_end(self, batch, logs=None):
                self.model.stop_predicting = batch == 2

        options = {"verbose": 0, "callbacks": [Stop()]}
        endless = (tuple([x[:7], x[:7, :2]]) for _ in itertools.count())
        values = [model.evaluate(endless, **options), model.evaluate(x, x[:, :2], batch_size=4, **options)]
        outputs = [model.predict(x, batch_size=4, **options)]
        outputs.append(model.predict(((x[:7],) for _ in itertools.count()), **options))
        history = model.fit(
            x, x[:, :2], shuffle=False, validation_data=(x, x[:, :2]), validation_batch_size=4, **options
        )
        values += [*history.history["loss"], *history.history["val_loss"]]
        results.append((values, [np.asarray(output) for output in outputs]))
        assert (model.stop_evaluating, model.stop_predicting) == (True, True)
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-6)
    assert [len(output) for output in results[1][1]] == [12, 21]
    for mine, expected in zip(results[1][1], results[0][1], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-7)  # in float32
