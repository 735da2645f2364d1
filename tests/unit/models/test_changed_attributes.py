"""Plain attributes that a step has read, and that somebody changes between steps, epochs and trainings."""

from types import SimpleNamespace

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype(np.float32)
Y = RNG.normal(size=(24, 2)).astype(np.float32)


class Penalty(layers.Layer):
    """Adds `beta` times the mean square of its inputs to the loss; notes how often its Python ran."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta, self.note, self.factors, self.calls = beta, 0, {"inner": [1.0]}, 0

    def call(self, inputs):
        self.calls += 1
        self.add_loss(self.beta * self.factors["inner"][0] * ops.mean(inputs**2))
        return inputs


def build(beta: float = 1.0, **options) -> tuple[dp.Sequential, Penalty]:
    penalty = Penalty(beta)
    model = dp.Sequential([layers.Input((4,)), layers.Dense(2), penalty], seed=1)
    model.compile(**{"optimizer": dp.optimizers.SGD(0.1), "loss": "mse"} | options)
    return model, penalty


def trained(model: dp.Sequential, **options) -> list[np.ndarray]:
    model.fit(X, Y, **{"batch_size": 8, "shuffle": False, "verbose": 0} | options)
    return model.get_weights()


def assert_equal(actual, expected) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class At(dp.callbacks.Callback):
    """Does something where a hook is called."""

    def __init__(self, hook: str, action) -> None:
        super().__init__()
        setattr(self, hook, lambda number, logs=None: action(number))


def test_between_two_trainings():
    model, penalty = build()
    trained(model)
    penalty.beta = 0.0
    other, _ = build()
    trained(other)
    other.layers[-1].beta = 0.0
    other.run_eagerly = True
    for lazy, eager in zip(trained(model), trained(other), strict=True):
        np.testing.assert_allclose(lazy, eager, rtol=1e-5)


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_train_batch_begin"])
def test_annealed_by_a_callback(hook):
    results = []
    for eagerly in (False, True):
        model, penalty = build(0.0, run_eagerly=eagerly)
        anneal = At(hook, lambda number, penalty=penalty: setattr(penalty, "beta", 0.3 * (number % 2)))
        results.append(trained(model, epochs=2, callbacks=[anneal]))
    for lazy, eager in zip(*results, strict=True):
        np.testing.assert_allclose(lazy, eager, rtol=1e-5)


def test_between_steps_that_go_on_by_hand():
    model, penalty = build()
    before = model.train_on_batch(X, Y)
    penalty.beta = 100.0
    assert model.train_on_batch(X, Y) > 10 * before
    assert model.test_on_batch(X, Y) > 10 * before


def test_in_a_dictionary_of_lists():
    model, penalty = build()
    before = model.evaluate(X, Y, verbose=0)
    penalty.factors["inner"][0] = 100.0
    assert model.evaluate(X, Y, verbose=0) > 10 * before


def test_in_settings_of_ones_own():
    settings = SimpleNamespace(beta=1.0, inner=SimpleNamespace(scale=1.0))
    model = dp.Sequential([layers.Input((4,)), layers.Dense(2), Configured(settings)], seed=1)
    model.compile(dp.optimizers.SGD(0.1), "mse")
    before = model.train_on_batch(X, Y)
    settings.beta = 100.0
    assert model.test_on_batch(X, Y) > 10 * before
    settings.inner.scale = 100.0
    assert model.test_on_batch(X, Y) > 1000 * before


class Configured(layers.Layer):
    def __init__(self, settings) -> None:
        super().__init__()
        self.settings = settings

    def call(self, inputs):
        self.add_loss(self.settings.beta * self.settings.inner.scale * ops.mean(inputs**2))
        return inputs


def test_an_array_that_is_changed_in_place():
    class Scaled(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = np.ones(4, np.float32)

        def call(self, inputs):
            return inputs * self.scale

    scaled = Scaled()
    model = dp.Sequential([layers.Input((4,)), scaled])
    np.testing.assert_array_equal(model.predict(X, verbose=0), X)
    scaled.scale[2] = 3
    np.testing.assert_array_equal(model.predict(X, verbose=0), X * np.array([1, 1, 3, 1], np.float32))


def change_dropout(model):
    model.layers[0].rate = 0.0


def change_momentum(model):
    model.optimizer.momentum = 0.9


def change_regularizer(model):
    model.layers[1].kernel_regularizer.l2 = 0.5


def change_loss(model):
    model.loss.delta = 1e-3


def change_normalization(model):
    model.layers[2].momentum = 0.5


def change_clipping(model):
    model.optimizer.clipnorm = 1e-3


CHANGES = [change_dropout, change_momentum, change_regularizer, change_loss, change_normalization, change_clipping]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_built_in_has_the_effect_that_it_has_from_the_beginning(change):
    """A training, a change, another training: as eagerly, where Python runs in each step."""
    results = []
    for eagerly in (False, True):
        dense = layers.Dense(2, kernel_regularizer=dp.regularizers.L2(1e-3))
        model = dp.Sequential([layers.Input((4,)), layers.Dropout(0.5), dense, layers.BatchNormalization()], seed=1)
        model.compile(dp.optimizers.SGD(0.1, momentum=0.2), dp.losses.Huber(), run_eagerly=eagerly)
        trained(model)
        change(model)
        results.append(trained(model))
    for lazy, eager in zip(*results, strict=True):
        np.testing.assert_allclose(lazy, eager, rtol=2e-5, atol=1e-6)


def test_a_layer_that_takes_the_place_of_another():
    class Net(dp.Model):
        def __init__(self) -> None:
            super().__init__()
            self.act = layers.Activation("relu")

        def call(self, inputs):
            return self.act(inputs)

    model = Net()
    np.testing.assert_array_equal(model.predict(X, verbose=0), np.maximum(X, 0))
    model.act = layers.Activation("linear")
    np.testing.assert_array_equal(model.predict(X, verbose=0), X)


def test_what_has_not_changed_or_is_not_read_is_not_traced_again():
    model, penalty = build()
    trained(model, epochs=2, validation_data=(X, Y))
    model.predict(X, verbose=0)
    calls = penalty.calls
    penalty.note, model.note = 3, "own"
    penalty.beta = penalty.beta + 0.0
    trained(model, epochs=2, validation_data=(X, Y))
    model.predict(X, verbose=0)
    assert penalty.calls == calls


@pytest.mark.parametrize(("rows", "traces"), [(17, 0), (23, 0), (24, 0), (32, 0), (33, 1)])
def test_about_as_much_data_is_not_traced_again(rows, traces):
    model, penalty = build()
    trained(model)
    assert penalty.calls
    calls, weights = penalty.calls, model.get_weights()
    x, y = np.resize(X, (rows, 4)), np.resize(Y, (rows, 2))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert (penalty.calls > calls) == bool(traces)
    other, _ = build()
    other.set_weights(weights)
    other.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_equal(model.get_weights(), other.get_weights())


def test_who_comes_back_to_a_value_finds_its_trace():
    model, penalty = build(0.0)
    weights = trained(model)
    penalty.beta = 1.0
    trained(model)
    calls = penalty.calls
    penalty.beta = 0.0
    model.set_weights(weights)
    retrained = trained(model)
    penalty.beta = 1.0
    trained(model)
    assert penalty.calls == calls
    other, _ = build(0.0)
    other.set_weights(weights)
    assert_equal(retrained, trained(other))


def test_what_changes_often_is_said_once():
    model, penalty = build()
    model.train_on_batch(X, Y)
    for number in range(2):
        penalty.beta = 2.0 + number
        model.train_on_batch(X, Y)
    penalty.beta = 4.0
    with pytest.warns(UserWarning, match=r"'beta' of Penalty 'penalty' has changed 3 times, last from .* to 4\.0, and"):
        model.train_on_batch(X, Y)
    penalty.beta = 5.0
    model.train_on_batch(X, Y)
