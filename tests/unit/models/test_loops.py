"""Training loops of one's own around a model, as Keras' guides on PyTorch and TensorFlow write them."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, ops

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((40, 8)), RNG.integers(0, 3, 40)


def build() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = layers.Dense(6, "relu")(inputs)
    model = keras.Model(inputs, layers.Dense(3)(hidden), seed=1)
    model.compile(keras.optimizers.Adam(0.01), crossentropy(), dtype="float64")
    return model


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def by_tape(model, loss_fn, optimizer, x, y):
    with keras.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_fn(y, logits)
    gradients = tape.gradient(loss, model.trainable_weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    return loss, logits


def by_backward(model, loss_fn, optimizer, x, y):
    logits = model(x, training=True)
    loss = loss_fn(y, logits)
    model.zero_grad()
    weights = list(model.trainable_weights)
    loss.backward()
    optimizer.apply([weight.value.grad for weight in weights], weights)
    return loss, logits


@pytest.mark.parametrize("update", [by_tape, by_backward])
def test_a_loop_trains_what_fit_trains(update):
    """Losses, metric and weights of two epochs; the metric is used alone, and begins anew."""
    fitted, model = build(), build()
    accuracy, optimizer = keras.metrics.SparseCategoricalAccuracy(), keras.optimizers.Adam(0.01)
    fitted.compile(fitted.optimizer, crossentropy(), metrics=[accuracy], dtype="float64")
    expected = fitted.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    metric, actual = keras.metrics.SparseCategoricalAccuracy(), {"loss": [], "sparse_categorical_accuracy": []}
    for _ in range(2):
        losses = []
        for start in range(0, 40, 16):
            rows = slice(start, start + 16)
            loss, logits = update(model, crossentropy(), optimizer, X[rows], Y[rows])
            metric.update_state(Y[rows], logits)
            losses.append(float(loss) * len(logits))
        actual["loss"].append(sum(losses) / 40)
        actual["sparse_categorical_accuracy"].append(float(metric.result()))
        metric.reset_state()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-12)
    for mine, other in zip(model.get_weights(), fitted.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10)


def test_losses_of_layers_are_those_of_the_last_call():
    class Sparse(layers.Layer):
        def call(self, inputs):
            self.add_loss(0.01 * ops.sum(inputs))
            return inputs

    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(3)(Sparse()(layers.Dense(6, "relu")(inputs))), seed=1)
    assert model.losses == []
    kernel, bias = (weight.numpy() for weight in model.weights[:2])
    for rows in (slice(0, 9), slice(9, 40)):
        model(X[rows])
        np.testing.assert_allclose(
            [float(loss) for loss in model.losses], [0.01 * np.maximum(X[rows] @ kernel + bias, 0).sum()], rtol=1e-5
        )
    with keras.GradientTape() as tape:
        model(X, training=True)
        total = sum(model.losses)
    gradients = tape.gradient(total, model.trainable_weights)
    np.testing.assert_allclose(gradients[1], 0.01 * (X @ kernel + bias > 0).sum(0), rtol=1e-5)
    assert gradients[2:] == [None, None]
