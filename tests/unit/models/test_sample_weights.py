"""Weights of samples, and of their steps and pixels: from arrays, generators and data sets by number."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError, DataError

RNG = np.random.default_rng(5)
ROWS, STEPS, CLASSES = 12, 4, 3
X = RNG.normal(size=(ROWS, STEPS, CLASSES)).astype(np.float32)
P = np.exp(X) / np.exp(X).sum(-1, keepdims=True)
LABELS = RNG.integers(0, CLASSES, (ROWS, STEPS))
LOSSES = -np.log(np.take_along_axis(P, LABELS[..., None], -1)[..., 0])
RIGHT = (P.argmax(-1) == LABELS).astype(float)
OF_STEPS = RNG.integers(0, 4, (ROWS, STEPS)).astype(np.float32)


def identity(shape=(STEPS, CLASSES), loss="sparse_categorical_crossentropy", **options):
    inputs = layers.Input(shape)
    model = dp.Model(inputs, layers.Identity(name="same")(inputs))
    model.compile("sgd", loss, metrics=["accuracy"], weighted_metrics=["accuracy"], **options)
    return model


class Dataset(dp.utils.PyDataset):
    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return tuple(part[4 * index : 4 * index + 4] for part in self.parts)


def expected(weights):
    broadcast = np.broadcast_to(weights.reshape(*weights.shape, *(1,) * (2 - weights.ndim)), LOSSES.shape)
    return [(LOSSES * broadcast).mean(), RIGHT.mean(), np.average(RIGHT, weights=broadcast)]


WEIGHTS = {
    "a step": OF_STEPS,
    "a step, with an axis more": OF_STEPS[..., None],
    "a sample": OF_STEPS[:, 0],
    "a column": OF_STEPS[:, :1],
    "whole numbers": OF_STEPS.astype(np.uint8),
    "of the other byte order": OF_STEPS.astype(">f8"),
    "strided": np.asfortranarray(OF_STEPS),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_for_each_step(name):
    weights = WEIGHTS[name]
    right = expected(OF_STEPS[:, 0] if name in ("a sample", "a column") else OF_STEPS)
    model = identity()
    np.testing.assert_allclose(model.evaluate(P, LABELS, sample_weight=weights, verbose=0), right, rtol=1e-5)
    np.testing.assert_allclose(model.test_on_batch(P, LABELS, weights), right, rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(Dataset(P, LABELS, weights), verbose=0), right, rtol=1e-5)
    batches = iter([(P, LABELS, weights)])
    np.testing.assert_allclose(model.evaluate(batches, steps=1, verbose=0), right, rtol=1e-5)


def test_a_weight_for_each_pixel():
    x = RNG.normal(size=(5, 2, 3, 4)).astype(np.float32)
    y, weights = RNG.normal(size=x.shape), RNG.random((5, 2, 3)).astype(np.float32)
    model = identity((2, 3, 4), "mse")
    right = (((x - y) ** 2).mean(-1) * weights).mean()
    assert model.evaluate(x, y, sample_weight=weights, verbose=0)[0] == pytest.approx(right, rel=1e-5)
    with pytest.raises(
        DataError, match=r"or up to \(5, 2, 3\), one for each of a sample's parts, found float32 \(5, 3\)"
    ):
        model.evaluate(x, y, sample_weight=weights[:, 0], verbose=0)


def test_training_by_arrays_and_by_batches_is_the_same():
    def trained(kind):
        model = dp.Sequential([layers.Input((STEPS, CLASSES)), layers.Dense(CLASSES, "softmax")], seed=1)
        model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        if kind == "arrays":
            arguments = {"x": X, "y": LABELS, "batch_size": 4, "sample_weight": OF_STEPS}
        elif kind == "number":
            arguments = {"x": Dataset(X, LABELS, OF_STEPS)}
        else:
            arguments = {"x": iter(list(Dataset(X, LABELS, OF_STEPS))), "steps_per_epoch": 3}
        history = model.fit(**arguments, shuffle=False, verbose=0, validation_data=(X, LABELS, OF_STEPS)).history
        return [*model.get_weights(), *history.values()]

    arrays = trained("arrays")
    for kind in ("number", "generator"):
        for actual, right in zip(trained(kind), arrays, strict=True):
            np.testing.assert_allclose(actual, right, rtol=1e-6)
    without = dp.Sequential([layers.Input((STEPS, CLASSES)), layers.Dense(CLASSES, "softmax")], seed=1)
    without.compile("adam", "sparse_categorical_crossentropy")
    without.fit(X, LABELS, 4, shuffle=False, verbose=0)
    assert not np.allclose(without.get_weights()[0], arrays[0], rtol=1e-4)


def own_loss(y_true, y_pred):
    return ops.square(y_pred)  # a number for each element


def test_a_loss_of_ones_own_may_have_a_number_for_each_element():
    weights = RNG.random(X.shape).astype(np.float32)
    actual = identity(loss=own_loss).evaluate(X, LABELS, sample_weight=weights[..., 0], verbose=0)[0]
    assert actual == pytest.approx((X**2 * weights[..., :1]).mean(), rel=1e-5)
    model = dp.Sequential([layers.Input((STEPS, CLASSES))])
    model.add(layers.Identity())
    model.compile("sgd", own_loss)
    assert model.evaluate(X, X, sample_weight=weights, verbose=0) == pytest.approx((X**2 * weights).mean(), rel=1e-5)
    model.compile("sgd", lambda y_true, y_pred: ops.mean(ops.square(y_pred), (1, 2)))
    with pytest.raises(
        ConfigError, match=r"sample_weight of shape \(12, 4, 3\): expected the shape of the values that it weigh"
    ):
        model.evaluate(X, X, sample_weight=weights, verbose=0)


def two_outputs():
    inputs = layers.Input((STEPS, CLASSES))
    outputs = [layers.Identity(name="steps")(inputs), layers.Lambda(lambda x: x[:, 0], name="first")(inputs)]
    model = dp.Model(inputs, outputs)
    model.compile("sgd", ["sparse_categorical_crossentropy", "mse"])
    return model


FIRST = RNG.normal(size=(ROWS, CLASSES))


@pytest.mark.parametrize("nest", [list, tuple, lambda pair: dict(zip(("steps", "first"), pair, strict=True))])
def test_several_outputs(nest):
    weights = OF_STEPS, OF_STEPS[:, 0]
    right = [(LOSSES * OF_STEPS).mean(), (((P[:, 0] - FIRST) ** 2).mean(1) * OF_STEPS[:, 0]).mean()]
    model = two_outputs()
    results = model.evaluate(P, [LABELS, FIRST], sample_weight=nest(weights), verbose=0, return_dict=True)
    np.testing.assert_allclose([results["steps_loss"], results["first_loss"]], right, rtol=1e-5)
    results = model.evaluate(P, [LABELS, FIRST], sample_weight=nest((None, weights[1])), verbose=0, return_dict=True)
    np.testing.assert_allclose([results["steps_loss"], results["first_loss"]], [LOSSES.mean(), right[1]], rtol=1e-5)


def test_an_output_that_a_dictionary_leaves_out_has_no_weights():
    results = two_outputs().evaluate(P, [LABELS, FIRST], sample_weight={"steps": OF_STEPS}, verbose=0, return_dict=True)
    right = [(LOSSES * OF_STEPS).mean(), ((P[:, 0] - FIRST) ** 2).mean()]
    np.testing.assert_allclose([results["steps_loss"], results["first_loss"]], right, rtol=1e-5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"stepz": OF_STEPS}, r"sample_weight: 'stepz' is not one of the outputs \['steps', 'first'\]"),
        ([OF_STEPS] * 3, "sample_weight: The structure of `inputs` doesn't match .* Received: 3 arrays"),
        ([1.0] * ROWS, r"Unrecognized data type: sample_weight=\[1.0, .*convert it to an array"),
        (OF_STEPS, r"sample_weight: expected \(12,\) real numbers, one per sample, found float32 \(12, 4\)"),
        ([OF_STEPS, OF_STEPS], r"sample_weight\['1'\]: expected \(12,\) real numbers, one per sample, found"),
        (
            [OF_STEPS[:, :3], None],
            r"sample_weight\['0'\]: expected \(12,\) .*up to \(12, 4\), .* found float32 \(12, 3\)",
        ),
    ],
)
def test_what_does_not_go_with_several_outputs(weights, message):
    with pytest.raises(DataError, match=message):
        two_outputs().evaluate(P, [LABELS, FIRST], sample_weight=weights, verbose=0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0] * ROWS, r"Unrecognized data type: sample_weight=\[1.0, .*convert it to an array"),
        ({"other": OF_STEPS}, r"sample_weight: 'other' is not one of the outputs \['same'\]"),
        ([OF_STEPS, OF_STEPS], "sample_weight: The structure of `inputs` doesn't match"),
        (np.full((ROWS, STEPS), np.nan), "sample_weight: 48 values are not finite"),
        (OF_STEPS[:5], r"sample_weight: expected \(12,\) real numbers"),
    ],
)
def test_what_does_not_go_with_one_output(weights, message):
    with pytest.raises(DataError, match=message):
        identity().evaluate(P, LABELS, sample_weight=weights, verbose=0)


def test_one_output_takes_a_list_or_dictionary_of_one():
    right = expected(OF_STEPS)
    for weights in ([OF_STEPS], {"same": OF_STEPS}):
        np.testing.assert_allclose(identity().evaluate(P, LABELS, sample_weight=weights, verbose=0), right, rtol=1e-5)
