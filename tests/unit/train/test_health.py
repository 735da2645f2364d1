"""What becomes of a training whose state or loss is not finite, in one process."""

import itertools
import math

import numpy as np
import pytest

import dptrain as dp
from dptrain import comm
from dptrain.callbacks import Callback, TerminateOnNaN
from dptrain.errors import ConfigError, DivergenceError
from dptrain.layers import Dense, Rescaling
from dptrain.optimizers import SGD, Adam
from dptrain.train import health


def toy(rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype(np.float32), rng.integers(0, 3, rows)


def build(optimizer=None, **options) -> dp.Sequential:
    model = dp.Sequential([Dense(8, activation="tanh", input_shape=(6,)), Dense(3, activation="softmax")], seed=1)
    model.compile(optimizer or Adam(0.01), "sparse_categorical_crossentropy", **options)
    return model


class Plant(Callback):
    """Puts a value into parameters after the last step of the first epoch."""

    def __init__(self, value: float, *names: str) -> None:
        self.value, self.names = value, names

    def on_train_batch_end(self, batch: int, logs=None) -> None:
        for weight in self.model.weights:
            if weight._path in self.names:
                value = weight.numpy()
                value.reshape(-1)[-2:] = self.value
                weight.assign(value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_samples_are_named_that_are_not_finite(value):
    x, y = toy()
    x[[17, 33], 2] = value
    with pytest.raises(
        DivergenceError, match=r"^training diverged in step 2 of epoch 1: x is not finite in sample 17$"
    ):
        build().fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    model = build()
    with pytest.raises(DivergenceError, match=r": x is not finite in samples? (17|33|17, 33)$") as caught:
        model.fit(x, y, batch_size=30, epochs=2, verbose=0)
    assert caught.value.exit_code == 76
    assert all(np.isfinite(weight).all() for weight in model.get_weights()), "the state is that before the step"


def test_what_the_samples_go_through_is_named_with_its_layer():
    """The scores overflow in the second step, after an update that is far too large."""
    x, y = toy()
    model = dp.Sequential([Dense(8, activation="relu", input_shape=(6,)), Dense(3)], seed=1)
    model.compile(SGD(1e30), dp.losses.SparseCategoricalCrossentropy(from_logits=True))
    expected = (
        r"in step 2 of epoch 1: op '\w+' (of|behind) layer 'dense_1' is the first to produce a NaN, at \[.*\] of shape "
    )
    with pytest.raises(DivergenceError, match=expected):
        model.fit(x, y, batch_size=10, verbose=0)


class Outside(dp.layers.Layer):
    """Applies a function to what it does not allow, unless its input is kept positive."""

    def __init__(self, function, least=-np.inf):
        super().__init__()
        self.function, self.least = function, least

    def call(self, x):
        return self.function(dp.ops.maximum(x, self.least))


OUTSIDE = {
    "log": (dp.ops.log, -1.5, r"op 'log' of layer 'outside' .* a NaN, .*; its input is -1\.5 there"),
    "log of 0": (dp.ops.log, 0, r"op 'log' of layer 'outside' .* an infinity, .*; its input is 0 there"),
    "log1p": (dp.ops.log1p, -2, r"op 'log1p' of layer 'outside' .*; its input is -2 there"),
    "sqrt": (dp.ops.sqrt, -4, r"op 'sqrt' of layer 'outside' .*; its input is -4 there"),
    "gradient of sqrt": (dp.ops.sqrt, 0, r"an infinity, .*; its inputs? (is|are) .*0 there"),
    "power": (lambda x: x**0.5, -3, r"; its inputs? (is|are) -3( and 0\.5)? there"),
    "divide": (lambda x: x / x, 0, r"op 'divide' of layer 'outside' .* a NaN, .*; its inputs are 0 and 0 there"),
    "reciprocal": (
        lambda x: 1 / x,
        0,
        r"op '\w+' of layer 'outside' .* an infinity, .*; its inputs? (is|are) .*0 there",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_op_outside_of_its_domain_says_what_it_was_given(name):
    """A smaller learning rate would not help; what the message advises does."""
    function, value, expected = OUTSIDE[name]
    x = np.full((10, 3), 2.0)
    x[4, 1] = value

    def fitted(least):
        model = dp.Sequential(
            [dp.layers.Input((3,)), Dense(3, kernel_initializer="identity"), Outside(function, least)]
        )
        model.layers[-1].name = "outside"
        model.compile(SGD(0.001), "mse", dtype="float64")
        return model.fit(x, np.ones((10, 3)), batch_size=10, shuffle=False, verbose=0)

    with pytest.raises(DivergenceError, match=expected) as caught:
        fitted(-np.inf)
    assert "of sample 4" in str(caught.value)
    assert "such as by ops.maximum(x, 1e-7)" in str(caught.value)
    assert "learning rate" not in str(caught.value)
    assert np.isfinite(fitted(1e-7).history["loss"]).all()


def test_an_update_that_overflows_is_seen_before_its_loss():
    """The one step's loss is finite; only the parameters that it leaves are not."""
    x, y = toy(10)
    model = dp.Sequential([Dense(1, input_shape=(6,))], seed=0)
    model.compile(SGD(3e38), "mse", dtype="float32")
    expected = (
        r"in step 1 of epoch 1: op 'multiply' behind layer 'dense' is the first to produce an infinity, at \[0, 0\]"
    )
    with pytest.raises(DivergenceError, match=expected):
        model.fit(x, y.astype(float), batch_size=10, verbose=0)


@pytest.mark.parametrize("seconds", [0.0, math.inf])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_parameters_that_a_callback_has_spoilt_are_named(monkeypatch, value, seconds):
    """The same steps, made again, would not show it; nor does a look before the callback's turn."""
    monkeypatch.setattr(health, "_SECONDS", seconds)
    x, y = toy(10)
    planted = Plant(value, "dense_1/kernel", "dense_1/bias")
    expected = r"parameter 'dense_1/kernel' has 2 values that are not finite after step 1 of epoch 1; try a "
    with pytest.raises(DivergenceError, match=expected):
        build().fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[planted])


def test_large_parameters_and_those_that_are_meant_to_be_infinite_end_nothing():
    class Masked(dp.layers.Layer):
        def build(self, input_shape):
            self.mask = self.add_weight((3,), initializer=lambda shape, dtype: np.full(shape, -np.inf), trainable=False)

        def call(self, x):
            return x + dp.ops.where(self.mask < 0, 0.0, 1.0)

    x, y = toy(10)
    model = dp.Sequential([Dense(3, input_shape=(6,)), Masked(), dp.layers.Softmax()])
    model.compile(SGD(1e-30), "sparse_categorical_crossentropy")
    planted = Plant(float(np.finfo(np.float32).max), "dense/bias")
    model.fit(x, y, batch_size=10, verbose=0, callbacks=[planted])


def test_a_loss_of_the_validation_that_is_not_finite():
    x, y = toy()
    bad = x.copy()
    bad[3] = np.nan
    with pytest.raises(DivergenceError, match="training diverged: val_loss = nan in epoch 1"):
        build().fit(x, y, validation_data=(bad, y), verbose=0)


def test_ignore_goes_on_as_keras():
    x, y = toy()
    x[17] = np.nan
    history = build().fit(x, y, epochs=2, verbose=0, on_nonfinite="ignore", validation_data=(x, y)).history
    assert len(history["loss"]) == 2
    assert math.isnan(history["loss"][0])


def test_terminate_on_nan_decides_where_it_is():
    x, y = toy()
    x[17] = np.nan
    model = build()
    history = model.fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[TerminateOnNaN()]).history
    assert len(history["loss"]) == 1
    assert model.stop_training


@pytest.mark.parametrize("most", [1, 1000, 1 << 20])
def test_batches_of_a_generator_are_kept_until_the_next_copy_of_the_state(monkeypatch, most):
    monkeypatch.setattr(health, "_MAX_BATCH_BYTES", most)
    x, y = toy()
    x[[17, 18]] = np.nan

    def batches():
        for begin, stop in itertools.pairwise((0, 10, 13, 20, 50, 60)):  # of several sizes, in memory that is reused
            yield x[begin:stop], y[begin:stop]

    model = build()
    expected = r"^training diverged in step 3 of epoch 1: x is not finite in samples 4, 5 of its batch$"
    with pytest.raises(DivergenceError, match=expected):
        model.fit(batches(), verbose=0, shuffle=False, steps_per_epoch=5)
    assert all(np.isfinite(weight).all() for weight in model.get_weights()), "the state is that before the step"
    scores = dp.Sequential([Dense(8, activation="relu", input_shape=(6,)), Dense(3)], seed=1)
    scores.compile(SGD(1e30), dp.losses.SparseCategoricalCrossentropy(from_logits=True))
    x[[17, 18]] = 0
    with pytest.raises(
        DivergenceError, match=r"in step 2 of epoch 1: op '\w+' (of|behind) layer 'dense_1' is the first"
    ):
        scores.fit(batches(), verbose=0, shuffle=False, steps_per_epoch=5)


def test_samples_that_are_gone_are_not_asked_for_again():
    x, y = toy()
    x[17] = np.nan
    model = build()
    model._open_trainer(comm.current())._data_bytes = 400  # streamed to the device
    with pytest.raises(DivergenceError, match="parameter 'dense/kernel' has 48 values that are not finite after step"):
        model.fit(x, y, batch_size=10, verbose=0, shuffle=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_nonfinite": "jump"}, "on_nonfinite = 'jump': expected one of 'stop', 'skip', 'ignore'"),
        ({"skip_outliers": 0}, "skip_outliers = 0: expected a number > 0"),
        ({"on_nonfinite": "skip"}, "not supported: skipping steps with run_eagerly"),
    ],
)
def test_what_cannot_be_asked(arguments, message):
    x, y = toy()
    model = build(run_eagerly=True)
    with pytest.raises(ConfigError, match=message):
        model.fit(x, y, verbose=0, **arguments)


def test_a_variable_that_is_no_number_of_steps(monkeypatch):
    monkeypatch.setenv("DPTRAIN_DIGEST_EVERY", "often")
    x, y = toy()
    with pytest.raises(ConfigError, match="DPTRAIN_DIGEST_EVERY = 'often': expected a number of steps, or 0 to"):
        build().fit(x, y, verbose=0)


def test_looking_changes_no_bit():
    x, y = toy()
    first, second = build(), build()
    first.fit(x, y, batch_size=7, epochs=3, verbose=0)
    second.fit(x, y, batch_size=7, epochs=3, verbose=0, on_nonfinite="ignore")
    for weight, other in zip(first.get_weights(), second.get_weights(), strict=True):
        assert weight.tobytes() == other.tobytes()


def test_samples_that_are_rescaled_are_looked_at_as_they_come():
    x = np.random.default_rng(0).integers(0, 256, (20, 6), np.uint8)
    model = dp.Sequential([Rescaling(np.inf, input_shape=(6,)), Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(DivergenceError, match=r"in step 1 of epoch 1: op '.*' (of|behind) layer '"):
        model.fit(x, x[:, 0] % 3, batch_size=10, verbose=0)
