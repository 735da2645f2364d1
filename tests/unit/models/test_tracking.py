"""Metrics that a model has: compiled ones, its own, those of its layers, wherever they are kept."""

from collections import UserList
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers import Dense, Layer
from dptrain.metrics import Mean, Metric
from tests.unit.program.virtual_ranks import assert_step_is_the_same_on_ranks

RNG = np.random.default_rng(0)
X, Y, WEIGHTS = RNG.standard_normal((21, 4)), RNG.standard_normal((21, 2)), RNG.random(21)


class Measured(Layer):
    """Notes the mean of its inputs, sample by sample, and their largest mean in a batch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kept = {"size": Mean("size"), "rest": [Mean("squares")]}

    def call(self, inputs):
        self.kept["size"].update_state(inputs)
        self.kept["rest"][0].update_state(ops.mean(ops.square(inputs)))
        return inputs


class Nested(Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.parts = (Measured(),)

    def call(self, inputs):
        return self.parts[0](inputs)


def compiled(model: dp.Model, **options) -> dp.Model:
    model.compile(dp.optimizers.SGD(0.1), "mse", dtype="float64", **options)
    return model


@pytest.mark.parametrize("layer", [Measured, Nested])
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"run_eagerly": True}])
def test_metrics_of_layers_are_in_the_logs(layer, options):
    """They begin anew with every epoch and evaluation; predictions leave them alone."""
    model = compiled(dp.Sequential([layer(input_shape=(4,)), Dense(2)], seed=1), **options)
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, epochs=2, validation_data=(X[:9], Y[:9]), **arguments).history
    assert list(history) == ["loss", "size", "squares", "val_loss", "val_size", "val_squares"]
    batches = [X[:8], X[8:16], X[16:]]
    np.testing.assert_allclose(history["size"], [X.mean()] * 2, rtol=1e-6)
    np.testing.assert_allclose(history["squares"], [np.mean([(batch**2).mean() for batch in batches])] * 2, rtol=1e-12)
    np.testing.assert_allclose(history["val_size"], [X[:9].mean()] * 2, rtol=1e-6)
    before = [variable.numpy() for metric in model.metrics for variable in metric.variables]
    model.predict(X, verbose=0)
    np.testing.assert_array_equal(
        [variable.numpy() for metric in model.metrics for variable in metric.variables], before
    )


@pytest.mark.parametrize("shards", [[21], [10, 11], [0, 15, 6]], ids=str)
def test_metrics_of_layers_are_of_all_ranks(shards):
    model = compiled(dp.Sequential([Measured(input_shape=(4,)), Dense(2)], seed=1))
    logs = assert_step_is_the_same_on_ranks(model._make_step("train"), (X, Y), shards)
    np.testing.assert_allclose([logs["size"], logs["squares"]], [X.mean(), (X**2).mean()], rtol=1e-6)


def test_metrics_in_lists_and_dictionaries_and_those_of_an_inner_model():
    class Outer(dp.Model):
        def __init__(self):
            super().__init__(seed=1)
            self.inner = dp.Sequential([Measured(input_shape=(4,)), Dense(2)])
            self.inner.own = Mean("of the inner model alone")
            self.own, self.more = [Mean("first"), {"key": Mean("second")}], (Mean("third"),)

        def call(self, inputs):
            self.own[0].update_state(inputs)
            return self.inner(inputs)

    model = compiled(Outer(), metrics=["mae"])
    logs = model.evaluate(X, Y, verbose=0, return_dict=True)
    names = ["loss", "compile_metrics", "first", "second", "third", "size", "squares"]
    assert [metric.name for metric in model.metrics] == names
    assert list(logs) == [name if name != "compile_metrics" else "mae" for name in names]
    np.testing.assert_allclose([logs["first"], logs["second"]], [X.mean(), 0], rtol=1e-6)
    assert [metric.name for metric in model.inner.metrics] == ["of the inner model alone", "size", "squares"]
    assert [metric.name for metric in Nested().metrics] == ["size", "squares"]


def test_a_metric_has_the_state_of_metrics_in_its_lists():
    class Several(Metric):
        def __init__(self, name="several"):
            super().__init__(name=name)
            self.parts, self.seen = [Mean("a"), {"b": Mean("b")}], dp.program.tensor.Variable(np.zeros(2), "seen")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.parts[0].update_state(y_true)
            self.parts[1]["b"].update_state(y_pred)
            self.seen.assign_add([1.0, 2.0])

        def result(self):
            return {"a": self.parts[0].result(), "b": self.parts[1]["b"].result()}

    metric = Several()
    assert [variable.name for variable in metric.variables] == ["seen", "total", "count", "total", "count"]
    assert {key: float(value) for key, value in metric([1.0, 2.0], [3.0, 5.0]).items()} == {"a": 1.5, "b": 4}
    metric.reset_state()
    assert not any(variable.numpy().any() for variable in metric.variables)
    model = compiled(dp.Sequential([Dense(2, input_shape=(4,))], seed=1), metrics=[Several(), "mae"])
    logs = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert list(logs) == ["loss", "a", "b", "mae"]
    np.testing.assert_allclose([logs["a"], logs["b"]], [Y.mean(), model.predict(X, verbose=0).mean()], rtol=1e-6)


class Guide(dp.Sequential):
    """The loop of Keras' guide on `fit`, with sample weights."""

    def train_step(self, data):
        x, y, sample_weight = data
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        loss.backward()
        self.optimizer.apply([weight.value.grad for weight in self.trainable_weights], self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
def test_only_weighted_metrics_are_weighted_in_a_step_of_ones_own(options):
    model = Guide([Dense(2, input_shape=(4,))], seed=1)
    compiled(model, metrics=["mae"], weighted_metrics=["mae", "mse"], **options)
    model.build()
    predicted = X @ model.get_weights()[0]
    history = model.fit(X, Y, batch_size=21, sample_weight=WEIGHTS, verbose=0).history
    assert [metric.name for metric in model.metrics] == ["loss", "compile_metrics"]
    absolute, squares = np.abs(predicted - Y).mean(1), ((predicted - Y) ** 2).mean(1)
    expected = {
        "loss": (squares * WEIGHTS).mean(),
        "mae": absolute.mean(),
        "weighted_mae": (absolute * WEIGHTS).sum() / WEIGHTS.sum(),
        "mse": (squares * WEIGHTS).sum() / WEIGHTS.sum(),
    }
    assert list(history) == list(expected)
    np.testing.assert_allclose([value for (value,) in history.values()], list(expected.values()), rtol=1e-6)


def test_a_compute_loss_without_training():
    class Short(dp.Sequential):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return ops.mean(ops.square(y - y_pred)) + 1

    models = [compiled(kind([Dense(2, input_shape=(4,))], seed=1)) for kind in (Short, dp.Sequential)]
    losses = [model.fit(X, Y, batch_size=21, epochs=2, verbose=0).history["loss"] for model in models]
    np.testing.assert_allclose(losses[0], np.add(losses[1], 1), rtol=1e-12)
    assert models[0].evaluate(X, Y, verbose=0) == pytest.approx(models[1].evaluate(X, Y, verbose=0) + 1)


def test_a_step_with_a_loss_and_metrics_of_its_own():
    """Keras' guide one level lower: only the optimizer is compiled."""

    class Lower(dp.Sequential):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.loss_tracker, self.mae_metric = Mean(name="loss"), dp.metrics.MeanAbsoluteError(name="mae")
            self.loss_fn = dp.losses.MeanSquaredError()

        def train_step(self, data):
            x, y = data
            with dp.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.loss_fn(y, y_pred)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.loss_tracker.update_state(loss)
            self.mae_metric.update_state(y, y_pred)
            return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

        @property
        def metrics(self):
            return [self.loss_tracker, self.mae_metric]

    model = Lower([Dense(2, use_bias=False, input_shape=(4,))], seed=1)
    model.compile(dp.optimizers.SGD(0.1), dtype="float64")
    (kernel,) = model.get_weights()
    history = model.fit(X, Y, batch_size=21, epochs=2, verbose=0).history
    for epoch in range(2):  # totals begin anew
        error = X @ kernel - Y
        np.testing.assert_allclose(history["loss"][epoch], (error**2).mean(), rtol=1e-12)
        np.testing.assert_allclose(history["mae"][epoch], np.abs(error).mean(), rtol=1e-6)
        kernel = kernel - 0.1 * 2 * X.T @ error / error.size
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-12)


class Holder:
    def __init__(self, layer):
        self.layer = layer


@dataclass
class Blocks:
    layers: list[Layer]


class Calling(dp.Model):
    """Calls a layer that it has in a container that nobody looks into."""

    def __init__(self, container, layer_of):
        super().__init__()
        self.container, self.layer_of, self.head = container, layer_of, Dense(2)

    def call(self, inputs):
        return self.head(self.layer_of(self.container)(inputs))


@pytest.mark.parametrize(
    ("make", "layer_of"),
    [
        (Holder, lambda container: container.layer),
        (lambda layer: SimpleNamespace(layer=layer), lambda container: container.layer),
        (lambda layer: [Blocks([layer])], lambda container: container[0].layers[0]),
        (lambda layer: UserList([layer]), lambda container: container[0]),
        (lambda layer: np.array([layer], object), lambda container: container[0]),
        (lambda layer: lambda inputs: layer(inputs), lambda container: container),
    ],
    ids=["object", "namespace", "dataclass", "UserList", "array", "closure"],
)
@pytest.mark.parametrize("is_built", [False, True])
def test_layers_that_no_container_holds_are_said_once(make, layer_of, is_built):
    layer = Dense(4, name="hidden")
    if is_built:
        layer.build((None, 4))
    model = Calling(make(layer), layer_of)
    with pytest.warns(UserWarning, match="layer 'hidden' is called in 'calling', which does not track it: its weights"):
        model(X)
    compiled(model)
    model.fit(X, Y, verbose=0)
    assert len(model.weights) == 2


def test_frozen_layers_and_those_of_losses_may_be_held_elsewhere():
    frozen, features = Dense(4, trainable=False), Dense(4)
    model = Calling(Holder(frozen), lambda container: container.layer)
    model(X)

    def perceptual(y_true, y_pred):
        return ops.mean(ops.square(features(y_true) - features(y_pred)), axis=-1)

    model.compile(dp.optimizers.SGD(0.1), perceptual)
    model.fit(X, Y, verbose=0)


def test_a_model_that_is_traced_first():
    lonely = Dense(4, name="lonely")
    model = compiled(dp.Sequential([dp.layers.Input((4,)), dp.layers.Lambda(lambda x: lonely(x)), Dense(2)]))
    with pytest.warns(UserWarning, match="layer 'lonely' is called in"):
        model.fit(X, Y, verbose=0)


def test_a_layer_that_the_model_holds_elsewhere():
    shared = Dense(4)
    inputs = dp.layers.Input((4,))
    outputs = dp.layers.Lambda(lambda x: shared(x))(shared(inputs))
    compiled(dp.Model(inputs, Dense(2)(outputs))).fit(X, Y, verbose=0)


@pytest.mark.parametrize("inner", [list, tuple, lambda parts: dict(enumerate(parts))], ids=["list", "tuple", "dict"])
@pytest.mark.parametrize("outer", [list, tuple, lambda parts: dict(enumerate(parts))], ids=["list", "tuple", "dict"])
def test_layers_are_found_in_nests_of_any_size_beside_whatever_else(outer, inner):
    for size in (1, 2, 63, 64, 65, 200):
        for position in {0, size // 2, size - 1}:
            layer, holder = Dense(1), Layer()
            for others in (
                [["a"]] * size,
                [inner([])] * size,
                [inner([1, "b"])] * size,
                [None] * size,
                ["c", []] * size,
            ):
                members = [*others[:position], inner([Dense(2), [layer]]), *others[position + 1 : size]]
                holder.kept = outer(members)
                assert layer in holder._flatten_layers(), (size, position, others[:2])
                holder.kept = [outer(members)] * 2
                assert layer in holder._flatten_layers(), (size, position, others[:2])


class Making(Layer):
    """Makes state in its `call`: each time, or only in the first."""

    def __init__(self, make, is_guarded):
        super().__init__(name="making")
        self.make, self.is_guarded, self.state = make, is_guarded, None

    def call(self, x):
        if self.state is None or not self.is_guarded:
            self.state = self.make(self)
        return x + self.state(x) if callable(self.state) else x + self.state


class Passing(Layer):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x)


STATES = {
    "weight": lambda layer: layer.add_weight((4,), name="w"),
    "layer": lambda layer: Dense(4),
    "frozen layer": lambda layer: Dense(4, trainable=False),
    "model": lambda layer: dp.Sequential([Dense(4)]),
    "layer in a list": lambda layer: Blocks([Dense(4)]).layers[0],
}


def eagerly(layer):
    layer(X)
    layer(X)


def in_fit(layer):
    model = dp.Sequential([layer, Dense(4)])
    model.compile("sgd", "mse")
    model.fit(X, X, verbose=0)


def in_a_functional_model(layer):
    inputs = dp.Input((4,))
    model = dp.Model(inputs, Passing(layer)(inputs))
    model.predict(X, verbose=0)


@pytest.mark.parametrize("use", [eagerly, in_fit, in_a_functional_model])
@pytest.mark.parametrize("name", STATES)
def test_state_that_each_call_makes_is_refused(name, use):
    """Each trace would have other weights, and training would lose them."""
    with pytest.raises(ConfigError, match=r"`call` makes a new weight each time\. You cannot add new elements of "):
        use(Making(STATES[name], is_guarded=False))
    use(Making(STATES[name], is_guarded=True))


def test_layers_without_weights_may_be_made_in_each_call():
    def call(layer):
        return lambda x: dp.layers.ReLU()(dp.layers.Dropout(0.5)(x))

    in_fit(Making(call, is_guarded=False))


def test_weights_may_be_added_between_calls():
    layer = Passing(Dense(4))
    layer(X)
    layer.layer = Dense(4)
    layer.extra = layer.add_weight((4,))
    layer(X)
    assert len(layer.weights) == 3
