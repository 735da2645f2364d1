"""Networks that share an embedding: a contrastive and a triplet loss, as in Keras' examples."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, ops
from tests.unit.program.virtual_ranks import assert_step_is_the_same_on_ranks

RNG = np.random.default_rng(0)
FIRST, SECOND, THIRD = (RNG.standard_normal((17, 6)) for _ in range(3))
SAME, MARGIN = RNG.integers(0, 2, 17).astype(float), 0.5


class Distance(layers.Layer):
    def call(self, first, second):
        return ops.sqrt(ops.maximum(ops.sum(ops.square(first - second), axis=1, keepdims=True), 1e-7))


def contrastive(y_true, y_pred):
    shortfall = ops.square(ops.maximum(MARGIN - y_pred, 0))
    return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * shortfall)


def twins() -> keras.Model:
    embedding = keras.Sequential(
        [layers.Dense(4, "tanh", input_shape=(6,)), layers.BatchNormalization()], name="shared"
    )
    first, second = keras.Input((6,)), keras.Input((6,))
    model = keras.Model([first, second], Distance()(embedding(first), embedding(second)), seed=1)
    model.compile("rmsprop", contrastive, metrics=["mae"], dtype="float64")
    return model


@pytest.mark.parametrize("weights", [None, RNG.random(17)], ids=["", "weighted"])
def test_a_contrastive_loss_is_one_number(weights):
    """A batch's weights then multiply it by their mean, as in Keras."""
    model = twins()
    distance = model.predict([FIRST, SECOND], verbose=0)[:, 0]
    value = ((1 - SAME) * distance**2 + SAME * np.maximum(MARGIN - distance, 0) ** 2).mean()
    logs = model.evaluate([FIRST, SECOND], SAME, sample_weight=weights, batch_size=17, verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx(value * (1 if weights is None else weights.mean()), rel=1e-6)
    assert logs["mae"] == pytest.approx(np.abs(distance - SAME).mean(), rel=1e-6)


class Triplets(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.loss_tracker = embedding, keras.metrics.Mean(name="loss")

    def each(self, data):
        anchor, positive, negative = (self.embedding(image) for image in data[0])
        near, far = (ops.sum(ops.square(anchor - other), axis=-1) for other in (positive, negative))
        return ops.maximum(near - far + MARGIN, 0.0)

    def train_step(self, data):
        with keras.GradientTape() as tape:
            losses = self.each(data)
        gradients = tape.gradient(losses, self.embedding.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.embedding.trainable_weights, strict=True))
        self.loss_tracker.update_state(losses)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


@pytest.fixture
def triplets() -> Triplets:
    model = Triplets(keras.Sequential([layers.Dense(3, use_bias=False, input_shape=(6,))], seed=1))
    model.compile(keras.optimizers.SGD(0.01), weighted_metrics=[], dtype="float64")
    model._set_dtype("float64")
    return model


def test_a_triplet_loss_of_single_samples(triplets):
    (kernel,) = triplets.embedding.get_weights()
    near, far = FIRST - SECOND, FIRST - THIRD
    losses = np.maximum(((near @ kernel) ** 2).sum(1) - ((far @ kernel) ** 2).sum(1) + MARGIN, 0)
    history = triplets.fit([FIRST, SECOND, THIRD], batch_size=17, verbose=0).history
    np.testing.assert_allclose(history["loss"], [losses.mean()], rtol=1e-6)
    on = (losses > 0)[:, None]
    gradient = 2 * ((near * on).T @ (near @ kernel) - (far * on).T @ (far @ kernel))
    np.testing.assert_allclose(triplets.embedding.get_weights()[0], kernel - 0.01 * gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shards", [[8, 9], [0, 12, 5]], ids=str)
def test_on_several_ranks(triplets, shards):
    assert_step_is_the_same_on_ranks(twins()._make_step("train"), ([FIRST, SECOND], SAME[:, None]), shards)
    assert_step_is_the_same_on_ranks(triplets._make_step("train"), ([FIRST, SECOND, THIRD],), shards)
