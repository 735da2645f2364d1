"""Calls with other values of the variables: numbers, gradients, and that the variables keep their own."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.tensor import Variable

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 5)).astype("float32"), RNG.normal(size=(8, 2)).astype("float32")


class Subclassed(dp.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.normalize = layers.Dense(4, "relu"), layers.BatchNormalization()
        self.drop, self.out = layers.Dropout(0.5), layers.Dense(2)
        self.calls = dp.metrics.Sum("calls")

    def call(self, x, training=False):
        self.calls.update_state(1.0)
        return self.out(self.drop(self.normalize(self.hidden(x), training=training), training=training))


def sequential():
    hidden = layers.Dense(4, "tanh", kernel_regularizer="l2", activity_regularizer="l1")
    return dp.Sequential([hidden, layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2)])


def functional():
    x = layers.Input((5,))
    shared = layers.Dense(5, "tanh")
    return dp.Model(x, layers.Dense(2)(layers.Dropout(0.5)(shared(shared(x)))))


def nested():
    x = layers.Input((5,))
    frozen = dp.Sequential([layers.Dense(3), layers.BatchNormalization()])
    frozen.trainable = False
    return dp.Model(x, layers.Dense(2)(frozen(sequential()(x))))


def recurrent():
    return dp.Sequential([layers.Reshape((5, 1)), layers.GRU(3, dropout=0.5, recurrent_dropout=0.5), layers.Dense(2)])


def mixed():
    hidden = layers.Dense(4, "relu", dtype="mixed_bfloat16")
    return dp.Sequential([hidden, layers.BatchNormalization(dtype="mixed_bfloat16"), layers.Dense(2)])


BUILDERS = [
    lambda: layers.Dense(2),
    layers.BatchNormalization,
    lambda: layers.Dropout(0.5),
    sequential,
    functional,
    nested,
    recurrent,
    mixed,
    Subclassed,
]
IDS = ["Dense", "BatchNormalization", "Dropout", *(build.__name__ for build in BUILDERS[3:])]


def made(build):
    """Return a layer with weights, and other values of its variables."""
    layer = build()
    layer(X)
    trained = [ops.convert_to_tensor(1.5 * variable.numpy() + 0.1) for variable in layer.trainable_variables]
    others = [
        variable.numpy() + (0.5 if variable.dtype.kind == "f" else 3) for variable in layer.non_trainable_variables
    ]
    return layer, trained, [ops.cast(value, "int64") if value.dtype.kind == "i" else value for value in others]


def values(variables):
    return [np.array(variable) for variable in variables]


def assign(variables, new):
    for variable, value in zip(variables, new, strict=True):
        variable.assign(value)


def assert_equal(values, expected, **tolerance):
    for value, right in zip(values, expected, strict=True):
        np.testing.assert_allclose(np.array(value), np.array(right), **tolerance)


def assert_unchanged(layer, before):
    for value, variable in zip(before, [*layer.variables, *layer.metrics_variables], strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("build", BUILDERS, ids=IDS)
def test_a_call_computes_what_the_layer_with_these_values_does(build, training):
    layer, trained, others = made(build)
    before = values([*layer.variables, *layer.metrics_variables])
    with dp.GradientTape() as tape:
        tape.watch(trained)
        outputs, state, losses = layer.stateless_call(trained, others, X, training=training, return_losses=True)
        loss = ops.sum(ops.square(ops.cast(outputs, "float32"))) + sum(losses)
    grads = tape.gradient(loss, trained)
    assert_unchanged(layer, before)
    assert len(layer.losses) == len(losses)  # of the call before

    assign(layer.trainable_variables, trained)
    assign(layer.non_trainable_variables, others)
    with dp.GradientTape() as tape:
        expected = layer(X, training=training)
        loss = ops.sum(ops.square(ops.cast(expected, "float32"))) + sum(layer.losses)
    np.testing.assert_array_equal(np.array(outputs), np.array(expected))
    assert_equal(state, layer.non_trainable_variables, rtol=0)
    assert_equal(losses, layer.losses, rtol=0)
    assert_equal(grads, tape.gradient(loss, layer.trainable_variables), rtol=1e-6, atol=1e-6)
    assert [value.dtype for value in state] == [variable.dtype for variable in layer.non_trainable_variables]


@pytest.mark.parametrize("build", BUILDERS, ids=IDS)
def test_a_traced_call_changes_no_variable(build):
    layer, trained, others = made(build)
    expected, state, losses = layer.stateless_call(trained, others, X, training=True, return_losses=True)

    def step(x, *trained):
        outputs, state, losses = layer.stateless_call(list(trained), others, x, training=True, return_losses=True)
        numbers = {f"state {number}": value for number, value in enumerate(state)}
        return {"outputs": outputs, "losses": sum(losses, ops.sum(0.0 * outputs)), **numbers}

    arguments = {"x": X} | {f"trained {number}": value.numpy() for number, value in enumerate(trained)}
    program = trace(step, {name: (value.shape, value.dtype) for name, value in arguments.items()})
    assert not program.updates
    assert set(program.state) <= set(layer.metrics_variables), "nothing reads the layer's own values"
    results = evaluate(program, arguments)[0]
    np.testing.assert_allclose(np.array(results["outputs"]), np.array(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results["losses"], float(sum(losses, ops.sum(0.0 * expected))), rtol=1e-5)
    for number, value in enumerate(state):
        np.testing.assert_allclose(results[f"state {number}"], value, rtol=1e-5)


class OfFunctions(dp.Sequential):
    """A step of functions of all values, as Keras' trainer on JAX has it."""

    def train_step(self, data):
        x, y = data
        trained = [variable.value for variable in self.trainable_variables]
        others = [variable.value for variable in self.non_trainable_variables]
        totals = [variable.value for variable in self.metrics_variables]
        self.optimizer.build(self.trainable_variables)
        slots = [variable.value for variable in self.optimizer.variables]
        with dp.GradientTape() as tape:
            y_pred, others, _ = self.stateless_call(trained, others, x, training=True, return_losses=True)
            loss, (_, others, totals) = self.stateless_compute_loss(trained, others, totals, x=x, y=y, y_pred=y_pred)
        trained, slots = self.optimizer.stateless_apply(slots, tape.gradient(loss, trained), trained)
        assign(self.metrics_variables, totals)
        assign(self.trainable_variables, trained)
        assign(self.non_trainable_variables, others)
        assign(self.optimizer.variables, slots)
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
        return self.compute_metrics(x, y, y_pred)


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}, {}], ids=str)
def test_a_training_step_of_functions(options):
    results = []
    x, y = RNG.normal(size=(30, 5)).astype("float32"), RNG.normal(size=(30, 2)).astype("float32")
    for kind in (dp.Sequential, OfFunctions):
        hidden = layers.Dense(4, "tanh", kernel_regularizer="l2")
        stack = [layers.Input((5,)), hidden, layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(2)]
        model = kind(stack, seed=1)
        model.compile(dp.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        results.append([*history.history.values(), *values([*model.variables, *model.optimizer.variables])])
    assert_equal(*results, rtol=1e-5, atol=1e-7)


def test_a_loop_of_functions():
    """Without any state but that in the values: the model keeps its weights."""
    model, like = (dp.Sequential([layers.Input((5,)), layers.Dense(2)], seed=3) for _ in range(2))
    optimizer, other = dp.optimizers.Adam(0.01), dp.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    # Variables are values, too.
    state = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    for _ in range(3):
        trained, others, slots = state
        with dp.GradientTape() as tape:
            tape.watch(trained)
            y_pred, others = model.stateless_call(trained, others, X)
            loss = ops.mean(ops.square(y_pred - Y))
        trained, slots = optimizer.stateless_apply(slots, tape.gradient(loss, trained), trained)
        state = trained, others, slots
        assert all(value.op is None for value in trained), "the new values do not hold those before"

        with dp.GradientTape() as tape:
            loss = ops.mean(ops.square(like(X) - Y))
        other.apply(tape.gradient(loss, like.trainable_variables), like.trainable_variables)
    assert_equal(state[0], like.trainable_variables, rtol=1e-6)
    assert_equal(state[2], other.variables, rtol=1e-6)
    assert int(optimizer.iterations) == 0
    assert all(weight.is_initial for weight in model.weights)


def test_random_numbers_follow_from_the_state():
    layer = layers.Dropout(0.5)
    layer(X)
    (state,) = layer.non_trainable_variables
    first, (after,) = layer.stateless_call([], [state], X, training=True)
    same, _ = layer.stateless_call([], [state], X, training=True)
    second, _ = layer.stateless_call([], [after], X, training=True)
    np.testing.assert_array_equal(np.array(first), np.array(same))
    assert not np.array_equal(np.array(first), np.array(second))
    np.testing.assert_array_equal(np.array(first), np.array(layer(X, training=True)))
    assert int(after) == int(state) == 1


def test_a_variable_that_is_returned_has_the_given_value():
    class Total(layers.Layer):
        def __init__(self):
            super().__init__()
            self.total = self.add_weight((5,), "zeros", trainable=False)

        def call(self, x):
            self.total.assign_add(ops.sum(x, 0))
            return {"total": self.total}

    class Count(dp.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.count = self.add_variable((), "zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.count.assign_add(1.0)

        def result(self):
            return self.count

    layer = Total()
    layer(X)
    outputs, _ = layer.stateless_call([], [np.ones(5)], X)
    np.testing.assert_allclose(np.array(outputs["total"]), 1 + X.sum(0), rtol=1e-5)
    metric = Count()
    assert float(metric.stateless_result(metric.stateless_update_state([4.0], Y, Y))) == 5


@pytest.mark.parametrize("step", ["train", "test", "predict"])
def test_a_step_of_the_state_is_refused(step):
    class OfState(dp.Sequential):
        pass

    def of_state(self, state, data):
        return {}, state

    of_state.__name__ = f"{step}_step"
    setattr(OfState, f"{step}_step", of_state)
    model = OfState([layers.Input((5,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    call = {"train": lambda: model.fit(X, Y), "test": lambda: model.evaluate(X, Y), "predict": lambda: model.predict(X)}
    with pytest.raises(ConfigError, match=rf"^{step}_step\(self, state, data\) is Keras' on JAX; expected {step}_step"):
        call[step]()


def test_calls_within_a_call():
    """The outer layer reads the inner one's variables, and collects its own losses."""

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner, self.plain = layers.Dense(5, activity_regularizer="l2"), layers.Dense(5)
            self.scale = Variable(np.float32(1.0))

        def call(self, x):
            self.add_loss(ops.sum(x))
            if not self.inner.built:
                self.inner(x)
            doubled = [2 * value for value in self.inner.trainable_variables]
            outputs, _, losses = self.inner.stateless_call(doubled, [], self.plain(x), return_losses=True)
            self.scale.assign(3.0)
            return outputs * self.scale + losses[0]

    layer = Outer()
    layer(X)
    twice = [2 * variable for variable in layer.trainable_variables]
    outputs, _, losses = layer.stateless_call(twice, [], X, return_losses=True)
    assert len(losses) == 1
    kernel, bias = (np.array(2 * value) for value in layer.inner.trainable_variables)
    hidden = X @ np.array(2 * layer.plain.kernel) @ (2 * kernel) + 2 * bias
    expected = 3 * hidden + 0.01 * np.sum(hidden**2) / len(X)
    np.testing.assert_allclose(np.array(outputs), expected, rtol=1e-5, atol=1e-5)
    assert float(layer.scale) == 3.0, "of the first call"


def test_a_variable_assigned_in_a_loop_or_a_branch():
    class Counting(layers.Layer):
        def build(self, input_shape):
            self.count = self.add_weight((), "zeros", trainable=False)

        def call(self, x):
            def add(i, y):
                self.count.assign_add(1.0)
                return y + self.count

            y = ops.fori_loop(0, 3, add, x)
            return ops.cond(ops.sum(x) > 0, lambda: y + self.count.assign_add(10.0), lambda: y)

    layer = Counting()
    layer(X)
    for step in (lambda x: layer.stateless_call([], [5.0], x), None):
        function = step or (lambda x: evaluated(lambda x: layer.stateless_call([], [5.0], x), x))
        for x in (np.abs(X), -np.abs(X)):
            outputs, (count,) = function(x)
            branch = 18.0 if x[0, 0] > 0 else 0.0
            np.testing.assert_allclose(np.array(outputs), x + 6 + 7 + 8 + branch, rtol=1e-6)
            assert float(count) == (18.0 if branch else 8.0)


def evaluated(function, x):
    """Return outputs and state of a traced call."""

    def step(x):
        outputs, state = function(x)
        return {"outputs": outputs} | {str(number): value for number, value in enumerate(state)}

    outputs, *state = evaluate(trace(step, {"x": (x.shape, x.dtype)}), {"x": x})[0].values()
    return outputs, state


def test_losses_and_metrics_of_a_model_that_has_only_been_called():
    model = Subclassed()
    y_pred = model(X)
    model.compile("sgd", "mse", metrics=["mae"])
    assert float(model.compute_loss(X, Y, y_pred)) == pytest.approx(np.mean((np.array(y_pred) - Y) ** 2), rel=1e-6)
    assert float(model.compute_metrics(X, Y, y_pred)["mae"]) == pytest.approx(np.mean(abs(np.array(y_pred) - Y)), 1e-6)


def dense():
    layer = layers.Dense(2)
    layer(X)
    return layer


KERNEL, BIAS = np.zeros((5, 2)), np.zeros(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layers.Dense(2).stateless_call([], [], X), "To call stateless_call, Dense must be built"),
        (
            lambda: dense().stateless_call([KERNEL], [], X),
            r"Argument `trainable_variables` must be a list of tensors corresponding 1:1 to Dense\(\)"
            r".trainable_variables. Received list with length 1, but expected 2 variables.$",
        ),
        (
            lambda: dense().stateless_call([KERNEL, BIAS], [BIAS], X),
            r"Argument `non_trainable_variables` .* Received list with length 1, but expected 0 variables.$",
        ),
        (
            lambda: dense().stateless_call(KERNEL, [], X),
            "Received a ndarray, but expected 2 variables",
        ),
        (
            lambda: dense().stateless_call([BIAS, KERNEL], [], X),
            r"^`trainable_variables\[0\]`, the value of variable 'dense/kernel', has shape \(2,\); expected \(5, 2\)$",
        ),
        (
            lambda: dense().stateless_call([None, BIAS], [], X),
            r"^`trainable_variables\[0\]`, the value of variable 'dense/kernel': .*$",
        ),
        (
            lambda: dp.GradientTape().gradient(ops.sum(X), [KERNEL]),
            "a gradient in array.* of type .ndarray",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
