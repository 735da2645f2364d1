"""Gradients of every layer, activation and loss by central differences in float64."""

import numpy as np
import pytest

from dptrain import layers as all_layers
from dptrain.backend.base import ACTIVATIONS, DIVISOR, INPUT_ACTIVATIONS, LOSS
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.batches.feed import ResidentFeed
from dptrain.batches.sampling import Shard
from dptrain.layers import (
    ELU,
    LAYERS,
    Activation,
    BatchNormalization,
    Dense,
    Dropout,
    Flatten,
    LeakyReLU,
    ReLU,
    Rescaling,
    Reshape,
    Softmax,
)
from dptrain.losses import (
    LOSSES,
    BinaryCrossentropy,
    CategoricalCrossentropy,
    Huber,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    SparseCategoricalCrossentropy,
)
from dptrain.model import Architecture
from dptrain.optimizers import SGD
from dptrain.train.replica import Replica

ROWS = 7


def check(
    stack: list[all_layers.Layer],
    loss: Loss,
    input_shape: tuple[int, ...] = (6,),
    seed: int = 3,
    weighted: bool = False,
) -> None:
    """Compare every parameter's gradient with (loss(p + h) - loss(p - h)) / 2h."""
    rng = np.random.default_rng(seed)
    replica = Replica(NumpyBackend(np.float64), Architecture(stack, input_shape), seed)
    replica.compile(loss, SGD(0.1), [])
    replica.reserve(ROWS)
    layout = replica.architecture.layout
    size = layout.size
    replica.params[:] = rng.standard_normal(layout.full_size) * 0.5
    for entry in layout.entries:  # gaps stay zero, as in training
        replica.params[entry.offset + entry.size : -(-(entry.offset + entry.size) // 64) * 64] = 0
        if entry.name.endswith("moving_variance"):
            np.square(entry.view(replica.params), out=entry.view(replica.params))
    x = rng.standard_normal((ROWS, *input_shape))
    if loss.takes_labels:
        y = rng.integers(0, replica.architecture.output_shape[-1], ROWS)
    else:
        y = rng.standard_normal((ROWS, *replica.architecture.output_shape))
    weights = np.where(np.arange(ROWS) == 2, 0, rng.random(ROWS) * 3) if weighted else None
    feed = ResidentFeed(replica.backend, replica.as_stored(x, y, weights))
    feed.start(np.arange(ROWS), [])
    shard = Shard(0, ROWS, 0)

    def loss_at(params: np.ndarray) -> float:
        replica.params[:] = params
        replica.forward_backward(feed, [shard])
        return float(replica.reduction[size + LOSS])

    start = replica.params.copy()
    loss_at(start)
    gradient = replica.reduction[:size].copy()
    if not weighted and loss.ignored is None:
        assert float(replica.reduction[size + DIVISOR]) == ROWS
    step = 1e-6
    trained = [entry for entry in layout.entries if entry.trainable]
    assert trained, "nothing to check"
    for entry in trained:
        for index in range(entry.offset, entry.offset + entry.size):
            moved = np.zeros(layout.full_size)
            moved[index] = step
            expected = (loss_at(start + moved) - loss_at(start - moved)) / (2 * step)
            np.testing.assert_allclose(gradient[index], expected, rtol=1e-6, atol=1e-7, err_msg=f"{entry.name}")


def losses_for(output: str) -> list[Loss]:
    return [SparseCategoricalCrossentropy()] if output == "softmax" else [MeanSquaredError()]


@pytest.mark.parametrize("activation", ACTIVATIONS + INPUT_ACTIVATIONS)
def test_dense_with_every_activation(activation):
    check([Dense(5, activation), Dense(4, "softmax")], SparseCategoricalCrossentropy())


@pytest.mark.parametrize("activation", ACTIVATIONS + INPUT_ACTIVATIONS)
def test_activation_layer(activation):
    check([Dense(5), Activation(activation), Dense(4)], MeanSquaredError())


@pytest.mark.parametrize("use_bias", [True, False])
def test_dense_with_and_without_bias(use_bias):
    check([Dense(5, "tanh", use_bias), Dense(3, None, use_bias)], MeanSquaredError())


@pytest.mark.parametrize(
    "middle",
    [
        Dropout(0.4),
        Dropout(0.0),
        Dropout(1.0),
        Rescaling(-1.7, 0.3),
        Activation("tanh"),
        Flatten(),
        Dense(6, "sigmoid"),
        Dense(6, "gelu", trainable=False),
        Dense(6, "relu", trainable=False),
        LeakyReLU(0.4),
        ReLU(),
        ReLU(negative_slope=0.1),
        ELU(0.6),
        Softmax(),
        Reshape((5, 1)),
        BatchNormalization(),
        BatchNormalization(scale=False),
        BatchNormalization(center=False, epsilon=0.1),
        BatchNormalization(trainable=False),
    ],
    ids=lambda layer: type(layer).__name__ + str(layer.own_config())[:60],
)
def test_every_layer_between_dense_layers(middle):
    flat = [Flatten()] if isinstance(middle, Reshape) else []
    check([Dense(5, "tanh"), middle, *flat, Dense(4, "softmax")], SparseCategoricalCrossentropy())


def test_batch_normalization_of_more_than_one_axis_and_as_the_first_layer():
    stack = [BatchNormalization(), Reshape((2, 3)), BatchNormalization(), Flatten(), Dense(4, "softmax")]
    check(stack, SparseCategoricalCrossentropy())


def test_every_layer_class_is_covered():
    covered = {"Activation", "BatchNormalization", "Dense", "Dropout", "ELU", "Flatten", "LeakyReLU", "ReLU"}
    covered |= {"Rescaling", "Reshape", "Softmax"}
    nothing_to_compute = {"InputLayer"}
    assert set(LAYERS) == covered | nothing_to_compute, "a new layer needs a gradient test in this file"


EVERY_LOSS = [
    (SparseCategoricalCrossentropy(), "softmax"),
    (SparseCategoricalCrossentropy(), "sigmoid"),  # taken for shares of their sum
    (SparseCategoricalCrossentropy(from_logits=True), "linear"),
    (SparseCategoricalCrossentropy(from_logits=True), "softmax"),
    (SparseCategoricalCrossentropy(ignore_class=1), "softmax"),
    (SparseCategoricalCrossentropy(ignore_class=1), "sigmoid"),
    (CategoricalCrossentropy(), "softmax"),
    (CategoricalCrossentropy(label_smoothing=0.2), "sigmoid"),
    (CategoricalCrossentropy(from_logits=True, label_smoothing=0.2), "linear"),
    (BinaryCrossentropy(), "sigmoid"),
    (BinaryCrossentropy(label_smoothing=0.2), "softmax"),
    (BinaryCrossentropy(from_logits=True), "linear"),
    (MeanSquaredError(), "linear"),
    (MeanSquaredError(), "softmax"),
    (MeanAbsoluteError(), "linear"),
    (Huber(0.7), "linear"),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", EVERY_LOSS, ids=lambda case: f"{type(case[0]).__name__}-{case[1]}")
def test_every_loss(case, weighted):
    loss, last = case
    check([Dense(5, "tanh"), Dense(4, last)], loss, weighted=weighted)


def test_every_loss_class_is_covered():
    assert set(LOSSES.values()) == {type(loss) for loss, _ in EVERY_LOSS}, "a new loss needs a gradient test"


def test_layers_before_the_first_parameters():
    check([Flatten(), Rescaling(0.5, 0.1), Dropout(0.3), Dense(4, "softmax")], SparseCategoricalCrossentropy(), (2, 3))


def test_softmax_as_a_layer_of_its_own():
    check([Dense(5, "relu"), Dense(4), Activation("softmax")], SparseCategoricalCrossentropy())
