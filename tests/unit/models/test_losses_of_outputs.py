"""What `compile(loss=...)` may be for one output and for several, and a model whose losses are those of `add_loss`."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
X, A, B = (RNG.standard_normal((20, n)) for n in (4, 1, 3))
WEIGHTS = RNG.random(20)


def model(nested=list) -> dp.Model:
    inputs = dp.Input((4,))
    outputs = {"a": dp.layers.Dense(1, name="a")(inputs), "b": dp.layers.Dense(3, name="b")(inputs)}
    return dp.Model(inputs, outputs if nested is dict else list(outputs.values()), seed=1)


def expected(net: dp.Model, weights=1.0) -> dict[str, float]:
    """Return the means of squares and of absolute errors of both outputs."""
    predicted = net.predict(X, verbose=0)
    values = predicted.values() if isinstance(predicted, dict) else predicted
    actual = {}
    for name, y, value in zip("ab", (A, B), values, strict=True):
        actual[f"{name} squares"] = float((((value - y) ** 2).mean(1) * weights).mean())
        actual[f"{name} sizes"] = float((np.abs(value - y).mean(1) * weights).mean())
    return actual


CASES = {
    "a list": (["mse", "mae"], [A, B], {"a": ["squares"], "b": ["sizes"]}),
    "none for one": (["mse", None], [A, B], {"a": ["squares"]}),
    "none, and targets of the other alone": ([None, "mae"], [B], {"b": ["sizes"]}),
    "none, and bare targets of the other": (["mse", None], A, {"a": ["squares"]}),
    "lists of one": ({"a": ["mse"], "b": ["mae"]}, {"a": A, "b": B}, {"a": ["squares"], "b": ["sizes"]}),
    "lists of several": ({"a": ["mse", "mae"], "b": "mse"}, [A, B], {"a": ["squares", "sizes"], "b": ["squares"]}),
    "none in a dictionary": ({"a": None, "b": dp.losses.MeanAbsoluteError()}, {"b": B}, {"b": ["sizes"]}),
}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("nested", [list, dict])
@pytest.mark.parametrize("case", CASES)
def test_losses_of_two_outputs(case, nested, weights):
    """The logs have each output's loss where several outputs have one, as in Keras."""
    loss, targets, parts = CASES[case]
    net = model(nested)
    net.compile("sgd", loss, dtype="float64")
    numbers = expected(net, 1.0 if weights is None else weights)
    sums = {name: sum(numbers[f"{name} {key}"] for key in keys) for name, keys in parts.items()}
    logs = net.evaluate(X, targets, sample_weight=weights, verbose=0, return_dict=True, batch_size=8)
    sums_by_name = {f"{name}_loss": value for name, value in sums.items()} if len(sums) > 1 else {}
    assert list(logs) == ["loss", *sums_by_name]
    np.testing.assert_allclose(list(logs.values()), [sum(sums.values()), *sums_by_name.values()], rtol=1e-12)


@pytest.mark.parametrize(
    "loss", [["mse"], {"a": "mse"}, {"a": ["mse"]}, ["mse", "mae"], [dp.losses.mean_squared_error]]
)
def test_losses_of_one_output(loss):
    net = dp.Sequential([dp.layers.Dense(1, name="a", input_shape=(4,))], seed=1)
    net.compile("sgd", loss, dtype="float64")
    error = net.predict(X, verbose=0) - A
    expected_loss = (error**2).mean() + (np.abs(error).mean() if len(loss) == 2 else 0)
    assert np.ravel(net.evaluate(X, A, verbose=0))[0] == pytest.approx(expected_loss, rel=1e-12)
    net.fit(X, A, verbose=0)


def test_metrics_need_targets():
    net = model()
    net.compile("sgd", ["mse", None], metrics=[["mae"], ["mae"]], weighted_metrics=[])
    assert net.evaluate(X, [A, B], verbose=0, return_dict=True).keys() == {"loss", "a_mae", "b_mae"}
    with pytest.raises(ConfigError, match="output 'b' has metrics, but no targets"):
        net.evaluate(X, [A], verbose=0)
    with pytest.raises(DataError, match="The structure of `inputs` doesn't match"):
        net.evaluate(X, [A, B, B], verbose=0)


class Sparse(dp.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


@pytest.mark.parametrize("targets", [None, A])
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
def test_added_losses_are_enough(targets, options):
    """No compiled loss: the targets may be there, and count for nothing."""
    net = dp.Sequential([dp.layers.Dense(3, use_bias=False, input_shape=(4,)), Sparse()], seed=1)
    net.compile(dp.optimizers.SGD(1.0), dtype="float64", **options)
    (kernel,) = before = net.get_weights()
    history = net.fit(X, targets, batch_size=20, verbose=0).history
    np.testing.assert_allclose(history["loss"], [0.1 * ((X @ kernel) ** 2).mean()], rtol=1e-12)
    gradient = 0.2 * X.T @ (X @ kernel) / (20 * 3)
    np.testing.assert_allclose(net.get_weights()[0], before[0] - gradient, rtol=1e-10)


class Endpoint(dp.layers.Layer):
    """Takes the targets as an input, and has loss and metric of its own."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn, self.spread = dp.losses.BinaryCrossentropy(from_logits=True), dp.metrics.Mean("spread")

    def call(self, targets, logits, sample_weights=None):
        self.add_loss(self.loss_fn(targets, logits, sample_weights))
        self.spread.update_state(ops.std(logits))
        return ops.softmax(logits)


def test_a_layer_that_is_the_end_of_training():
    inputs, targets = dp.Input((4,), name="inputs"), dp.Input((3,), name="targets")
    outputs = Endpoint(name="predictions")(targets, dp.layers.Dense(3, use_bias=False)(inputs))
    net = dp.Model([inputs, targets], outputs, seed=1)
    net.compile("adam", dtype="float64")
    (kernel,) = net.get_weights()
    logits, yes = X @ kernel, B > 0
    history = net.fit({"inputs": X, "targets": yes * 1.0}, batch_size=20, verbose=0).history
    crossentropy = np.logaddexp(0, np.where(yes, -logits, logits)).mean()
    np.testing.assert_allclose([history["loss"], history["spread"]], [[crossentropy], [logits.std()]], rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        (["mse", ("mse", "mae")], [0.5, (0.2, 0.3)]),
        (["mse", ("mse", "mae")], None),
        ("mse", [0.5, (0.2, 0.3)]),
        (["mse", (None, "mae")], None),
    ],
)
@pytest.mark.parametrize("form", [False, True])
def test_losses_nested_as_the_outputs(loss, weights, form):
    def like(parts):
        return {"a": parts[0], "b": parts[1]} if form and isinstance(parts, tuple) else parts

    entry = dp.Input((3,))
    outputs = [dp.layers.Dense(2, name=name)(entry) for name in "pqr"]
    nested = [outputs[0], like((outputs[1], outputs[2]))]
    model = dp.Model(entry, nested)
    nested_loss = loss if isinstance(loss, str) else [loss[0], like(loss[1])]
    model.compile(
        "sgd", nested_loss, loss_weights=None if weights is None else [weights[0], like(weights[1])], device="cpu"
    )
    x, y = np.random.default_rng(1).normal(size=(2, 6, 3))
    y = y[:, :2]
    actual = model.evaluate(x, [y, like((y + 1, y - 1))], verbose=0, return_dict=True)["loss"]
    flat_loss = [loss] * 3 if isinstance(loss, str) else [loss[0], *loss[1]]
    flat_weights = [1, 1, 1] if weights is None else [weights[0], *weights[1]]
    predicted = [tensor.numpy() for tensor in dp.Model(entry, outputs)(x.astype(np.float32))]
    errors = [prediction - target for prediction, target in zip(predicted, (y, y + 1, y - 1), strict=True)]
    losses = [
        np.abs(error).mean() if kind == "mae" else (error**2).mean()
        for error, kind in zip(errors, flat_loss, strict=True)
    ]
    expected = sum(w * e for w, e, kind in zip(flat_weights, losses, flat_loss, strict=True) if kind is not None)
    assert actual == pytest.approx(expected, rel=1e-5)


def test_outputs_with_names_for_their_places():
    Pair = collections.namedtuple("Pair", "first second")

    class Twice(dp.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = dp.layers.Dense(2), dp.layers.Dense(2)

        def call(self, x):
            return Pair(self.first(x), self.second(x))

    model = Twice()
    model.compile("sgd", Pair("mse", "mae"))
    x, y = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    model.fit(x, Pair(y, y), verbose=0)
    assert type(model.predict(x, verbose=0)) is type(model(x)) is Pair


@pytest.mark.parametrize(
    ("units", "targets", "kind"),
    [
        (1, np.array([[0.0], [1.0], [1.0], [0.0]]), "binary_crossentropy"),
        (3, np.array([0, 2, 1, 0]), "sparse_categorical_crossentropy"),
        (3, np.eye(3)[[0, 2, 1, 0]], "categorical_crossentropy"),
    ],
)
def test_crossentropy_is_chosen_by_shape(units, targets, kind):
    model = dp.Sequential([dp.Input((3,)), dp.layers.Dense(units, "sigmoid" if units == 1 else "softmax")])
    x, results = np.random.default_rng(2).normal(size=(4, 3)), []
    for loss in ("crossentropy", "ce", kind):
        model.compile("sgd", loss)
        results.append(model.evaluate(x, targets, verbose=0))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("targets", [A, [A]], ids=["an array", "a list"])
@pytest.mark.parametrize("weights", [None, [0.5, 0.25]], ids=["", "weighted"])
def test_each_of_several_losses_of_one_output_is_in_logs(targets, weights):
    net = dp.Sequential([dp.Input((4,)), dp.layers.Dense(1)], seed=1)
    net.compile("sgd", ["mse", "mae"], loss_weights=weights, metrics=["mse"])
    error = net.predict(X, verbose=0) - A
    squares, sizes = float((error**2).mean()), float(np.abs(error).mean())
    first, second = weights or (1, 1)
    values = {"loss": first * squares + second * sizes, "mse_loss": squares, "mae_loss": sizes, "mse": squares}
    logs = net.evaluate(X, targets, verbose=0, return_dict=True)
    assert logs == pytest.approx(values, rel=1e-5)
    in_order = [values[name] for name in ("loss", "mse", "mse_loss", "mae_loss")]
    assert net.evaluate(X, targets, verbose=0) == pytest.approx(in_order, rel=1e-5)
    history = net.fit(X, targets, batch_size=20, shuffle=False, verbose=0).history
    assert {name: values[0] for name, values in history.items()} == pytest.approx(values, rel=1e-5)


def test_weights_of_several_losses_of_one_output_are_as_many():
    net = dp.Sequential([dp.Input((4,)), dp.layers.Dense(1)])
    with pytest.raises(ConfigError, match="must match the number of losses, got 2 losses and 3 weights"):
        net.compile("sgd", ["mse", "mae"], loss_weights=[1, 2, 3])


def two_outputs(structure):
    x = dp.Input((3,))
    outputs = [dp.layers.Dense(1, name="y1")(x), dp.layers.Dense(1, name="y2")(x)]
    return dp.Model(x, structure(*outputs))


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("structure", "key"),
    [
        (lambda a, b: {"a": a, "b": b}, {"first": "a", "second": "b"}),
        (Pair, {"first": 0, "second": 1}),
        (lambda a, b: (a, b), {"first": 0, "second": 1}),
    ],
    ids=["dictionary", "namedtuple", "tuple"],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_of_all_outputs_beside_one_of_each(structure, key, weighted):
    """As in Keras a list beside outputs that are no list names losses of all of them."""
    rng = np.random.default_rng(0)
    x, y1, y2 = rng.random((8, 3)), rng.random((8, 1)), rng.random((8, 1))
    first, second = key["first"], key["second"]

    def both(y_true, y_pred):
        error = (y_true[first] - y_pred[first]) * (y_true[second] - y_pred[second])
        return dp.ops.mean(dp.ops.absolute(error), -1)

    factors = [0.5, 2.0, 3.0] if weighted else [1.0, 1.0, 1.0]
    model = two_outputs(structure)
    model.compile("sgd", [both, structure("mse", "mae")], [0.5, structure(2.0, 3.0)] if weighted else None)
    logs = model.evaluate(x, structure(y1, y2), batch_size=4, verbose=0, return_dict=True)
    predictions = model.predict(x, verbose=0)
    e1, e2 = y1 - predictions[first], y2 - predictions[second]
    values = [np.abs(e1 * e2).mean(), (e1**2).mean(), np.abs(e2).mean()]
    names = ("a", "b") if structure(1, 2) == {"a": 1, "b": 2} else ("y1", "y2")
    expected = dict(zip((f"{names[0]}_{names[1]}_loss", f"{names[0]}_loss", f"{names[1]}_loss"), values, strict=True))
    expected["loss"] = float(np.dot(factors, values))
    assert logs == pytest.approx(expected, rel=1e-5)
    assert set(model.fit(x, structure(y1, y2), verbose=0).history) == set(expected)
    with pytest.raises(
        ConfigError, match="not supported: sample weights for each output with one loss over several outputs"
    ):
        model.fit(x, structure(y1, y2), sample_weight=structure(np.ones(8), np.ones(8)), verbose=0)


def test_factors_of_several_losses_of_one_output():
    """`loss_weights=(.5, (.2, .3))`."""
    rng = np.random.default_rng(0)
    x, y1, y2 = rng.random((8, 3)), rng.random((8, 1)), rng.random((8, 1))
    model = two_outputs(lambda *outputs: outputs)
    model.compile("sgd", ("mse", ("mae", "mse")), loss_weights=(0.5, (0.2, 0.3)))
    loss = model.evaluate(x, (y1, y2), verbose=0, return_dict=True)["loss"]
    e1, e2 = (y - prediction for y, prediction in zip((y1, y2), model.predict(x, verbose=0), strict=True))
    assert loss == pytest.approx(0.5 * (e1**2).mean() + 0.2 * np.abs(e2).mean() + 0.3 * (e2**2).mean(), rel=1e-5)
