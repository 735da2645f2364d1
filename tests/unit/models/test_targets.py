"""What metrics and losses of one's own make of targets: of any shape, and of types in which arithmetic wraps."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import Input, Model, Sequential, layers, ops
from dptrain.errors import DataError

RNG = np.random.default_rng(3)
X = RNG.normal(size=(12, 3)).astype(np.float32)
WEIGHTS = RNG.integers(1, 5, 12).astype(np.float32)


def own_loss(y_true, y_pred):
    """Return a loss that takes targets of any shape."""
    return ops.mean(ops.square(y_pred), tuple(range(1, y_pred.ndim)))


def identity(shape=(3,), **options):
    inputs = layers.Input(shape)
    model = dp.Model(inputs, layers.Identity(name="same")(inputs))
    model.compile("sgd", own_loss, **options)
    return model


def accuracies(model, y, **options):
    logs = model.evaluate(options.pop("x", X), y, verbose=0, return_dict=True, **options)
    return {key: value for key, value in logs.items() if key != "loss"}


LABELS = RNG.integers(0, 3, 12)
RIGHT = (X.argmax(1) == LABELS).astype(float)
MULTIPLE = np.eye(3)[LABELS] + np.eye(3)[(LABELS + 1) % 3]
TARGETS = {
    "labels": (LABELS, RIGHT),
    "a column": (LABELS[:, None], RIGHT),
    "small labels": (LABELS.astype("u1"), RIGHT),
    "one-hot": (np.eye(3)[LABELS], RIGHT),
    "one-hot of truth values": (np.eye(3)[LABELS].astype(bool), RIGHT),
    "several labels": (MULTIPLE, X.argmax(1) == MULTIPLE.argmax(1)),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("targets", [["accuracy"], ["acc"], {"same": ["accuracy"]}, [["accuracy"]]])
def test_accuracy_beside_a_loss_of_ones_own(name, targets):
    y, right = TARGETS[name]
    model = identity(metrics=targets, weighted_metrics=targets)
    plain, weighted = accuracies(model, y, sample_weight=WEIGHTS).values()
    np.testing.assert_allclose([plain, weighted], [np.mean(right), np.average(right, weights=WEIGHTS)], rtol=1e-6)


def test_one_output_is_true_or_false():
    y = (X[:, :1] > 0).astype(int)
    for targets in (y, y[:, 0], y.astype(bool)):
        assert accuracies(identity((1,), metrics=["accuracy"]), targets, x=X[:, :1] + 0.5) == {
            "accuracy": pytest.approx(((X[:, :1] > 0) == y).mean())
        }


def test_maps():
    x = RNG.normal(size=(5, 2, 4, 3)).astype(np.float32)
    labels = RNG.integers(0, 3, (5, 2, 4))
    expected = {"accuracy": pytest.approx((x.argmax(-1) == labels).mean())}
    for y in (labels, labels[..., None], np.eye(3)[labels], labels.astype("u1")):
        assert accuracies(identity((2, 4, 3), metrics=["accuracy"]), y, x=x) == expected


def test_crossentropy_beside_a_loss_of_ones_own():
    p = np.exp(X) / np.exp(X).sum(1, keepdims=True)
    expected = {"crossentropy": pytest.approx(-np.log(p[np.arange(12), LABELS]).mean(), rel=1e-5)}
    for y in (LABELS, np.eye(3)[LABELS]):
        assert accuracies(identity(metrics=["crossentropy"]), y, x=p) == expected


def test_each_output_has_its_own_kind():
    inputs = layers.Input((3,))
    outputs = {name: layers.Identity(name=name)(inputs) for name in ("a", "b", "c")}
    model = dp.Model(inputs, outputs)
    model.compile("sgd", own_loss, metrics={name: ["accuracy"] for name in outputs})
    actual = accuracies(model, {"a": LABELS, "b": np.eye(3)[LABELS], "c": MULTIPLE})
    expected = [RIGHT.mean(), RIGHT.mean(), (X.argmax(1) == MULTIPLE.argmax(1)).mean()]
    np.testing.assert_allclose([actual[f"{name}_accuracy"] for name in "abc"], expected)


def test_training_and_own_steps():
    class Net(dp.Model):
        def __init__(self):
            super().__init__()
            self.same = layers.Identity()

        def call(self, x):
            return self.same(x)

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            return self.compute_metrics(x, y, y_pred)

    model = Net()
    model.compile("sgd", metrics=["accuracy"])
    for y in (LABELS, np.eye(3)[LABELS]):
        assert model.evaluate(X, y, verbose=0, return_dict=True)["accuracy"] == pytest.approx(RIGHT.mean())
    model = dp.Sequential([layers.Input((3,)), layers.Dense(3)])
    model.compile("sgd", own_loss, metrics=["accuracy"])
    history = model.fit(X, np.eye(3)[LABELS], verbose=0, validation_data=(X, LABELS)).history
    assert {"accuracy", "val_accuracy"} <= set(history)
    keeper = dp.callbacks.EarlyStopping("accuracy", patience=1)
    model.fit(X, LABELS, verbose=0, callbacks=[keeper])
    assert keeper.monitor_op is not None


class Negative(dp.metrics.Metric):
    def __init__(self):
        super().__init__(name="negative")
        self.total = self.add_weight(name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(-y_true))

    def result(self):
        return self.total.value


def negative(y_true, y_pred):
    return -y_true


def doubled(y_true, y_pred):
    return y_true + y_true


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int8", "uint16", "uint32", "int64", "float16"])
def test_arithmetic_of_targets_does_not_wrap(dtype):
    y = (np.arange(36).reshape(12, 3) % 2 * 100).astype(dtype)
    value = 1 if dtype == "bool" else 100
    assert accuracies(identity(metrics=[negative, doubled]), y) == {"negative": -value / 2, "doubled": value}
    assert accuracies(identity(metrics=[Negative()]), y) == {"negative": -18 * value}


@pytest.mark.parametrize(
    ("loss", "compared"),
    [("mse", lambda y, p: np.mean((y - p) ** 2)), ("mae", lambda y, p: np.mean(np.abs(y - p)))],
)
@pytest.mark.parametrize(("target", "units"), [((10,), 1), ((1,), 10), ((4, 10), 1), ((4, 1), 10), ((), 1)])
def test_axes_of_length_1_are_broadcast(loss, compared, target, units):
    """As in Keras' guides; the loss is a mean over all pairs of a row."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, *target[:-1], 3)), rng.normal(size=(6, *target))
    model = Sequential([Input(x.shape[1:]), layers.Dense(units)])
    model.compile("sgd", loss, metrics=["mse"], dtype="float64")
    predictions = model.predict(x, verbose=0)
    targets = y if target else y[:, None]
    logs = model.evaluate(x, y, verbose=0, return_dict=True)
    np.testing.assert_allclose(logs["loss"], compared(targets, predictions), rtol=1e-12)
    np.testing.assert_allclose(logs["mse"], np.mean((targets - predictions) ** 2), rtol=1e-12)


@pytest.mark.parametrize(
    ("target", "output", "advice"),
    [
        ((12,), (3, 4), r"found \(12,\); pass y.reshape\(-1, 3, 4\)"),
        ((4,), (3, 4), r"found \(4,\); pass y\[:, None\], to compare it with each"),
        ((5,), (3, 4), r"found \(5,\)$"),
    ],
)
def test_a_message_shows_how_to_reshape(target, output, advice):
    model = Sequential([Input(output), layers.Dense(output[-1])])
    model.compile("sgd", "mse")
    with pytest.raises(DataError, match=advice):
        model.fit(np.zeros((6, *output)), np.zeros((6, *target)), verbose=0)


class TwoTargets(Model):
    """Compares one output with two targets."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        first, second = y
        return ops.mean((y_pred - first) ** 2) + ops.mean(ops.abs(y_pred - second))


@pytest.mark.parametrize("loss", [None, "mse", ["mse", "mae"]])
@pytest.mark.parametrize("metrics", [None, ["mae"]])
def test_two_targets_of_an_output_in_a_loss_of_ones_own(loss, metrics):
    x, y = np.ones((8, 3)), (np.zeros((8, 1)), np.full((8, 1), 5.0))
    model = TwoTargets()
    model.compile("sgd", loss, metrics=metrics)
    logs = model.evaluate(x, y, verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx(9 + 2)
    if metrics:
        assert logs["mae"] == pytest.approx(3), "metrics get the first, as in Keras"
    assert model.fit(x, y, verbose=0).history["loss"] == [pytest.approx(9 + 2)]
    assert model.train_on_batch(x, y) is not None
