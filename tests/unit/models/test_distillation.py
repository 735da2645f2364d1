"""A student that learns from a teacher inside `compute_loss`, as in Keras' example of knowledge distillation."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import ops
from dptrain.layers import Dense
from tests.unit.program.virtual_ranks import assert_step_is_the_same_on_ranks

RNG = np.random.default_rng(0)
X, Y, ALPHA, TEMPERATURE = RNG.standard_normal((21, 5)), RNG.integers(0, 3, 21), 0.1, 4.0


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha, temperature, **options):
        super().compile(optimizer=optimizer, metrics=metrics, **options)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        taught = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        learnt = ops.softmax(y_pred / self.temperature, axis=1)
        distilled = self.distillation_loss_fn(taught, learnt) * self.temperature**2
        return self.alpha * self.student_loss_fn(y, y_pred) + (1 - self.alpha) * distilled

    def call(self, inputs):
        return self.student(inputs)


@pytest.fixture
def distiller() -> Distiller:
    teacher = keras.Sequential([Dense(7, "tanh", input_shape=(5,)), Dense(3)], seed=1)
    student_model = Distiller(keras.Sequential([Dense(3, input_shape=(5,))], seed=2), teacher)
    student_model.teacher.trainable = False
    student_model.compile(
        keras.optimizers.SGD(0.1),
        [keras.metrics.SparseCategoricalAccuracy()],
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.KLDivergence(),
        ALPHA,
        TEMPERATURE,
        dtype="float64",
    )
    return student_model


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_the_loss_is_that_of_student_and_teacher(distiller):
    logs = distiller.evaluate(X, Y, verbose=0, return_dict=True)
    logits, taught = distiller.student.predict(X, verbose=0), distiller.teacher.predict(X, verbose=0)
    right = -np.log(softmax(logits))[np.arange(21), Y].mean()
    p, q = softmax(taught / TEMPERATURE), softmax(logits / TEMPERATURE)
    distilled = (p * np.log(p / q)).sum(1).mean() * TEMPERATURE**2
    assert logs["loss"] == pytest.approx(ALPHA * right + (1 - ALPHA) * distilled, rel=1e-6)
    assert logs["sparse_categorical_accuracy"] == pytest.approx((logits.argmax(1) == Y).mean())


def test_the_student_learns_and_the_teacher_stays(distiller):
    before = distiller.teacher.get_weights()
    history = distiller.fit(X, Y, batch_size=8, epochs=5, verbose=0).history
    assert list(history) == ["loss", "sparse_categorical_accuracy"]
    assert history["loss"] == sorted(history["loss"], reverse=True)
    for old, new in zip(before, distiller.teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("shards", [[10, 11], [0, 15, 6]], ids=str)
def test_on_several_ranks(distiller, shards):
    distiller.build((None, 5))
    assert_step_is_the_same_on_ranks(distiller._make_step("train"), (X, Y), shards)


@pytest.mark.parametrize("shards", [[10, 11], [0, 15, 6]], ids=str)
def test_keras_distiller_on_several_ranks(shards):
    teacher, student = (
        keras.Sequential([Dense(4, "tanh", input_shape=(5,), name="hidden"), Dense(3)], seed=seed) for seed in (1, 2)
    )
    losses = [
        keras.distillation.LogitsDistillation(TEMPERATURE),
        keras.distillation.FeatureDistillation("mse", "hidden", "hidden"),
    ]
    model = keras.distillation.Distiller(teacher, student, losses, [1.0, 0.5])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, [keras.metrics.SparseCategoricalAccuracy()], dtype="float64")
    model.build((None, 5))
    assert_step_is_the_same_on_ranks(model._make_step("train"), (X, Y), shards)
