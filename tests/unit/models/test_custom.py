"""Steps, losses, metrics, layers and optimizers of a user's own: ordinary Python in ops."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.callbacks import Callback
from dptrain.errors import ConfigError, DataError, DivergenceError
from dptrain.layers import Dense, Dropout, Flatten, Rescaling


def toy(rows: int = 53) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (rows, 2, 3), dtype=np.uint8)
    return x, (x[:, 0, 0] // 86).astype(np.uint8)


def values(rows: int = 21) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((rows, 4)), rng.standard_normal((rows, 2))


def stack() -> list[dp.layers.Layer]:
    return [Rescaling(1 / 255, input_shape=(2, 3)), Flatten(), Dense(8, "tanh"), Dropout(0.3), Dense(3, "softmax")]


# Steps that compute what the built-in one does


class Backward(dp.Sequential):
    """As Keras' guide for PyTorch."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        loss.backward()
        trainable_weights = list(self.trainable_weights)
        gradients = [v.value.grad for v in trainable_weights]
        self.optimizer.apply(gradients, trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class Tape(dp.Sequential):
    """As Keras' guide for TensorFlow."""

    def train_step(self, data):
        x, y = data
        with dp.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.metrics[0].update_state(loss, sample_weight=x.shape[0])
        return self.compute_metrics(x, y, y_pred)


class Unpacked(dp.Sequential):
    def train_step(self, data):
        assert isinstance(data, tuple)
        x, y, weights = dp.utils.unpack_x_y_sample_weight(data)
        assert x is data[0]
        assert y is data[1]
        assert (weights is None) == (len(data) == 2)
        return super().train_step(data)


class OwnTestStep(dp.Sequential):
    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.metrics[0].update_state(self.compute_loss(x, y, y_pred, training=False), sample_weight=x.shape[0])
        return self.compute_metrics(x, y, y_pred)


class OwnLoss(dp.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return dp.losses.SparseCategoricalCrossentropy()(y, y_pred, sample_weight)


class OwnMetrics(dp.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return dict(super().compute_metrics(x, y, y_pred, sample_weight))


def trained(kind: type[dp.Sequential], **options) -> tuple[dp.Sequential, dict[str, list[float]]]:
    x, y = toy()
    model = kind(stack(), seed=1)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], dtype="float64", **options)
    history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, validation_split=0.2)
    return model, history.history


@pytest.mark.parametrize("kind", [Backward, Tape, OwnTestStep, OwnLoss, OwnMetrics, Unpacked])
def test_the_built_in_step_bit_for_bit(kind):
    """Dropout and a last batch that is not full are in it."""
    x, y = toy()
    (model, history), (custom, own_history) = trained(dp.Sequential), trained(kind)
    assert own_history == history
    for mine, other in zip(custom.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(custom.predict(x), model.predict(x))
    assert custom.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)
    assert custom.train_on_batch(x, y) == model.train_on_batch(x, y)
    assert custom.test_on_batch(x[:7], y[:7]) == model.test_on_batch(x[:7], y[:7])


def test_weights_are_the_third_of_the_data():
    x, y = toy()
    weights = np.linspace(0.5, 1.5, len(x))
    batch_weights = []
    for kind in (dp.Sequential, Unpacked):
        model = kind(stack(), seed=1)
        model.compile("adam", "sparse_categorical_crossentropy", dtype="float64")
        batch_weights.append(model.fit(x, y, batch_size=16, verbose=0, sample_weight=weights).history)
    assert batch_weights[0] == batch_weights[1]


def everything() -> list[dp.layers.Layer]:
    """Layers that sum over the batch, that are not trained, with penalties."""
    return [
        Dense(6, "tanh", input_shape=(4,), trainable=False),
        dp.layers.BatchNormalization(),
        Dense(5, "relu", kernel_regularizer=dp.regularizers.L2(0.01)),
        Dropout(0.2),
        Dense(1, "sigmoid", bias_regularizer="l1"),
    ]


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}])
def test_other_executions_of_a_step(options):
    """Weights, penalties, states, clipping: eagerly the bits of the NumPy executor, compiled what it computes."""
    x, _ = values(37)
    y = (x[:, :1] > 0).astype(np.float64)
    weights = np.random.default_rng(5).uniform(0.5, 2, len(x))
    runs = []
    for settings in ({}, options):
        model = dp.Sequential(everything(), seed=1)
        model.compile(
            dp.optimizers.Adam(0.01, clipnorm=1.0, weight_decay=0.01),
            "binary_crossentropy",
            metrics=["accuracy", "mae", dp.metrics.Precision(name="precision")],
            weighted_metrics=["accuracy", dp.metrics.Recall(name="recall")],
            dtype="float64",
            **({"jit_compile": False} | settings),
        )
        history = model.fit(
            x, y, batch_size=8, epochs=3, sample_weight=weights, validation_data=(x[:9], y[:9]), verbose=0
        )
        runs.append((history.history, model.get_weights(), model.evaluate(x, y, verbose=0, sample_weight=weights)))
    (history, parameters, score), (own_history, own_parameters, own_score) = runs
    assert list(own_history) == list(history)
    assert "weighted_accuracy" in history
    exact = "run_eagerly" in options
    for key, other in history.items():  # metrics compute in float32, as Keras'
        rtol = 0 if exact else 1e-12 if key.endswith("loss") else 1e-6
        np.testing.assert_allclose(own_history[key], other, rtol=rtol, err_msg=key)
    np.testing.assert_allclose(own_score, score, rtol=0 if exact else 1e-6)
    for parameter, other in zip(own_parameters, parameters, strict=True):
        np.testing.assert_allclose(parameter, other, rtol=0 if exact else 1e-11, atol=0 if exact else 1e-14)


# What only steps of one's own can do


class Regression(dp.Sequential):
    """Notes the mean of the targets, and may take its step in two halves."""

    def __init__(self, layers, halves=False):
        super().__init__(layers, seed=2)
        self.halves = halves
        self.target = dp.metrics.Mean("target")

    def train_step(self, data):
        x, y = data
        self.target.update_state(y)
        self.zero_grad()
        if self.halves:  # gradients add up until they are forgotten
            for weight in (0.25, 0.75):
                (weight * self.compute_loss(y=y, y_pred=self(x, training=True))).backward()
        else:
            self.compute_loss(y=y, y_pred=self(x, training=True)).backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return {"target": self.target.result(), "largest": ops.max(ops.abs(y))}


def regression(**options) -> Regression:
    model = Regression([Dense(5, "tanh", input_shape=(4,)), Dense(2)], **options)
    model.compile(dp.optimizers.SGD(0.1), "mse", dtype="float64")
    return model


def test_gradients_of_several_passes_add_up():
    x, y = values()
    full, halves = regression(), regression(halves=True)
    for model in (full, halves):
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    for mine, other in zip(halves.get_weights(), full.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12)


def test_logs_are_means_of_metrics_and_values_of_the_last_batch():
    x, y = values()
    history = regression().fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["target"], [y.mean()] * 2, rtol=1e-13)
    np.testing.assert_allclose(history["largest"], [np.abs(y[16:]).max()] * 2, rtol=1e-13)


def test_no_step_waits_for_the_device_unless_somebody_looks(monkeypatch):
    x, y = values(64)
    reads = []
    real = dp.program.execute.HostMemory.read
    monkeypatch.setattr(
        dp.program.execute.HostMemory, "read", lambda self, memory: (reads.append(1), real(self, memory))[1]
    )

    def count(batch_size: int, *callbacks: Callback) -> int:
        model = regression()
        reads.clear()
        model.fit(x, y, batch_size=batch_size, verbose=0, callbacks=list(callbacks))
        return len(reads)

    class Looks(Callback):
        seen: list[float] = []  # noqa: RUF012

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(logs["target"])

    assert count(64) == count(4)
    assert count(4, Looks()) > count(4)
    np.testing.assert_allclose(Looks.seen[-1], y.mean(), rtol=1e-12)  # of the epoch so far, as Keras
    assert len(Looks.seen) == 16


def eager() -> tuple[dp.Sequential, np.ndarray, np.ndarray]:
    """A model that nobody fits, inputs, and a gradient in the outputs."""
    model = dp.Sequential([Flatten(input_shape=(2, 2)), Dense(5, "tanh"), Rescaling(2.0, 0.1), Dense(3)], seed=1)
    model.compile(dp.optimizers.SGD(1.0), dtype="float64")
    rng = np.random.default_rng(4)
    return model, rng.standard_normal((6, 2, 2)), rng.standard_normal((6, 3))


def test_a_model_is_called_on_arrays_and_updated_outside_of_fit():
    model, x, dy = eager()
    np.testing.assert_allclose(model(x).numpy(), model.predict(x), rtol=1e-12)  # BLAS, and compiled code
    before = model._named_weights()
    ops.sum(model(x, training=True) * dy).backward()
    gradients = {weight._path: weight.value.grad.numpy() for weight in model.trainable_weights}
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())
    model.optimizer.apply([weight.value.grad for weight in model.trainable_weights], model.trainable_weights)
    for name, weight in model._named_weights().items():
        np.testing.assert_allclose(weight, before[name] - gradients[name], rtol=1e-14)
    model.zero_grad()
    assert [weight.value.grad for weight in model.weights] == [None] * 4


def test_the_gradient_in_the_input():
    model, x, dy = eager()
    inputs = ops.convert_to_tensor(x)
    with dp.GradientTape() as tape:
        tape.watch(inputs)
        total = ops.sum(model(inputs, training=True) * dy)
    (dx,) = tape.gradient(total, [inputs])
    assert dx.shape == x.shape
    for index in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[index] = 1e-6
        plus, minus = (float((dy * model(x + sign * moved).numpy()).sum()) for sign in (1, -1))
        np.testing.assert_allclose(dx.numpy()[index], (plus - minus) / 2e-6, rtol=1e-6, atol=1e-8)


# Tapes


def test_what_a_tape_gives():
    a = dp.program.tensor.Variable(np.array([1.0, 2.0]), "a")
    frozen = dp.program.tensor.Variable(np.array([3.0, 4.0]), "frozen", trainable=False)
    other = dp.program.tensor.Variable(np.array(1.0), "other")
    with dp.GradientTape(persistent=True) as tape:
        y = a * a * frozen
        z = ops.sum(y)
    grads = tape.gradient(z, {"a": a, "rest": [frozen, other]})
    np.testing.assert_array_equal(grads["a"].numpy(), [6, 16])
    assert grads["rest"] == [None, None]
    np.testing.assert_array_equal(tape.gradient([y, z], a, output_gradients=[np.array([1.0, 0.0]), 2.0]), [18, 32])
    np.testing.assert_array_equal(tape.gradient(z, other, unconnected_gradients="zero"), 0)
    tape.watch(frozen)
    np.testing.assert_array_equal(tape.gradient(z, frozen), [1, 4])
    with dp.GradientTape() as single:
        z = ops.sum(a * a)
    single.gradient(z, a)
    with pytest.raises(ConfigError, match="A non-persistent GradientTape can only be used to compute one set"):
        single.gradient(z, a)
    with pytest.raises(ConfigError, match=r"Passed in object .* of type 'ndarray', not tensor or variable"):
        single.watch(np.zeros(2))
    with dp.GradientTape(watch_accessed_variables=False) as blind:
        z = ops.sum(a * a)
    assert blind.gradient(z, a) is None


def test_a_gradient_of_a_gradient():
    """As in Keras' WGAN-GP: a penalty on the length of the gradient in the inputs."""

    class Penalized(dp.Sequential):
        def train_step(self, data):
            x, y = data
            with dp.GradientTape() as tape:
                with dp.GradientTape() as inner:
                    inner.watch(x)
                    score = self(x, training=True)
                norm = ops.sqrt(ops.sum(ops.square(inner.gradient(score, [x])[0]), axis=1))
                loss = self.compute_loss(y=y, y_pred=score) + 10.0 * ops.mean(ops.square(norm - 1.0))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    x, y = values(8)
    model = Penalized([Dense(5, "tanh", input_shape=(4,)), Dense(1)], seed=1)
    model.compile(dp.optimizers.SGD(0.1), "mse", dtype="float64")
    model.build()
    before = model.get_weights()
    model.train_on_batch(x, y[:, :1])

    def loss(weights: list[np.ndarray]) -> float:
        kernel, bias, last, last_bias = weights
        hidden = np.tanh(x @ kernel + bias)
        slope = ((1 - hidden**2) * last[:, 0]) @ kernel.T
        penalty = 10 * ((np.sqrt((slope**2).sum(1)) - 1) ** 2).mean()
        return float(((hidden @ last + last_bias - y[:, :1]) ** 2).mean() + penalty)

    for number, (old, new) in enumerate(zip(before, model.get_weights(), strict=True)):
        for index in np.ndindex(old.shape):
            moved = [[array.copy() for array in before] for _ in range(2)]
            moved[0][number][index] += 1e-6
            moved[1][number][index] -= 1e-6
            slope = (loss(moved[0]) - loss(moved[1])) / 2e-6
            np.testing.assert_allclose((old - new)[index], 0.1 * slope, rtol=1e-5, atol=1e-8)


# Data of one's own


class Free(dp.Sequential):
    """Targets of any shape."""

    def train_step(self, data):
        self.seen = [(leaf.shape[1:], leaf.dtype.name) for leaf in dp.program.tree.leaves(data)]
        x = data[0] if isinstance(data, tuple) else data
        ops.sum(self(x, training=True)).backward()
        return {"rows": ops.cast(x.shape[0], "float32")}


@pytest.mark.parametrize(
    ("y", "seen"), [(np.zeros((8, 3, 5)), [((3, 5), "float32")]), (np.arange(8), [((), "int64")]), (None, [])]
)
def test_without_a_loss_targets_are_what_they_are(y, seen):
    model = Free([Dense(2, input_shape=(4,))])
    model.compile("sgd")
    history = model.fit(np.zeros((8, 4)), y, batch_size=8, shuffle=False, verbose=0).history
    assert model.seen == [((4,), "float32"), *seen]
    assert history["rows"] == [8]
    if y is not None:
        weights = np.arange(8.0)
        model.fit(np.zeros((8, 4)), y, batch_size=8, shuffle=False, sample_weight=weights, verbose=0)
        assert model.seen == [((4,), "float32"), *seen, ((), "float32")]


@pytest.mark.parametrize("returns", ["one tensor", "a dictionary"])
def test_a_loss_of_a_part_of_the_outputs(returns):
    class PartialLoss(dp.Model):
        def __init__(self):
            super().__init__()
            self.dense = Dense(3)

        def call(self, x):
            y = self.dense(x)
            return y if returns == "one tensor" else {"first": y[:, :2], "last": y[:, 2:]}

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            if returns == "one tensor":
                return super().compute_loss(x, y, y_pred[:, :2], sample_weight)
            return ops.mean(ops.square(y - y_pred["first"]))

    x, y = values()
    model = PartialLoss()
    model.compile("sgd", "mse")
    loss = model.fit(x, y, batch_size=21, verbose=0).history["loss"]
    assert loss[0] > model.evaluate(x, y, verbose=0, return_dict=True)["loss"] > 0


def test_outputs_in_another_number_than_outside_training():
    class Both(dp.Model):
        def __init__(self):
            super().__init__()
            self.dense = Dense(2)

        def call(self, x, training=False):
            return self.dense(x) if training else (self.dense(x), x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, y_pred, sample_weight)

    model = Both()
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"y_pred: 1 tensor\(s\) where the model returns 2 outside training"):
        model.fit(*values(), verbose=0)


def test_batches_of_a_generator_and_no_loss():
    x, y = values(24)

    def batches():
        for start in range(0, 24, 8):
            yield x[start : start + 8], y[start : start + 8]

    histories = []
    for kind in (dp.Sequential, Tape):
        model = kind([Dense(2, input_shape=(4,))], seed=1)
        model.compile("adam", "mse", metrics=["mae"], dtype="float64")
        histories.append(
            model.fit(batches(), steps_per_epoch=3, shuffle=False, verbose=0, validation_data=(x, y)).history
        )
    assert histories[0] == histories[1]
    free = Free([Dense(2, input_shape=(4,))])
    free.compile("sgd")
    history = free.fit(
        ((x[:8], np.arange(8).reshape(8, 1)) for _ in range(3)), steps_per_epoch=3, shuffle=False, verbose=0
    ).history
    assert history["rows"] == [8]
    assert free.seen[1] == ((1,), "int64")
    free.fit(((x[:8],) for _ in range(3)), steps_per_epoch=3, shuffle=False, verbose=0)
    assert len(free.seen) == 1


def test_without_a_loss_metrics_say_what_targets_are():
    class Scored(dp.Sequential):
        def train_step(self, data):
            x, y = data
            return self.compute_metrics(x, y, self(x))

    x, _ = values(8)
    model = Scored([Dense(2, input_shape=(4,))])
    model.compile("sgd", metrics=["accuracy", dp.metrics.SparseCategoricalAccuracy(name="same")])
    history = model.fit(x, np.arange(8) % 2, batch_size=4, verbose=0).history
    labels = model.predict(x, verbose=0).argmax(axis=1)
    np.testing.assert_allclose(history["accuracy"], [(labels == np.arange(8) % 2).mean()])
    assert history["same"] == history["accuracy"]


# Losses, metrics, layers, optimizers


def test_functions_as_losses_and_metrics():
    x, y = values(37)

    def huber_like(y_true, y_pred):
        error = ops.abs(y_true - y_pred)
        return ops.mean(ops.where(error < 1.0, 0.5 * ops.square(error), error - 0.5), axis=-1)

    def worst(y_true, y_pred):
        return ops.max(ops.abs(y_true - y_pred), axis=-1)

    class Power(dp.losses.Loss):
        def __init__(self, power=3.0, **options):
            super().__init__(**options)
            self.power = power

        def call(self, y_true, y_pred):
            return ops.mean(ops.power(ops.abs(y_true - y_pred), self.power), axis=-1)

    class Largest(dp.metrics.Metric):
        """The largest error so far."""

        def __init__(self, name="largest", **options):
            super().__init__(name=name, **options)
            self.value = self.add_variable((), "zeros", aggregation="none", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(ops.maximum(self.value, ops.cast(ops.max(ops.abs(y_true - y_pred)), "float64")))

        def result(self):
            return self.value

    model = dp.Sequential([Dense(2, input_shape=(4,))], seed=1)
    for loss, expected in (
        (huber_like, lambda e: np.where(e < 1, 0.5 * e**2, e - 0.5).mean()),
        (Power(), lambda e: (e**3).mean()),
        (Power(2.0, name="own"), lambda e: (e**2).mean()),
    ):
        model.compile("sgd", loss, metrics=[worst, Largest()], dtype="float64")
        errors = np.abs(model.predict(x) - y)
        logs = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        np.testing.assert_allclose(logs["loss"], expected(errors), rtol=1e-12)
        np.testing.assert_allclose(logs["worst"], errors.max(1).mean(), rtol=1e-12)
        np.testing.assert_allclose(logs["largest"], errors.max(), rtol=1e-12)
        first = model.fit(x, y, epochs=4, verbose=0).history["loss"]
        assert first[-1] < first[0]


def test_layers_of_ones_own():
    class Linear(dp.layers.Layer):
        def __init__(self, units, **options):
            super().__init__(**options)
            self.units = units

        def build(self, input_shape):
            self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="random_normal", trainable=True)
            self.b = self.add_weight(shape=(self.units,), initializer="zeros")
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

        def call(self, inputs, training=False):
            if training:
                self.calls.assign_add(1.0)
            self.add_loss(0.01 * ops.sum(ops.square(self.w)))
            return ops.matmul(inputs, self.w) + self.b

    x, y = values(24)
    model = dp.Sequential([dp.Input((4,)), Linear(5), dp.layers.ReLU(), Linear(2)], seed=1)
    model.compile(dp.optimizers.SGD(0.1), "mse", dtype="float64")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert [weight._path for weight in model.weights[:3]] == ["linear/variable", "linear/variable_1", "linear/calls"]
    assert [float(layer.calls) for layer in model.layers if isinstance(layer, Linear)] == [6, 6]
    penalty = sum(0.01 * (layer.w.numpy() ** 2).sum() for layer in model.layers if isinstance(layer, Linear))
    mse = ((model.predict(x) - y) ** 2).mean()
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), mse + penalty, rtol=1e-12)


def test_an_optimizer_of_ones_own():
    class SignSGD(dp.optimizers.Optimizer):
        def __init__(self, learning_rate=0.01, **options):
            super().__init__(learning_rate=learning_rate, **options)

        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, ops.sign(gradient) * ops.cast(learning_rate, variable.dtype))

    x, y = values(8)
    model = dp.Sequential([Dense(2, input_shape=(4,))], seed=1)
    model.compile(SignSGD(0.1), "mse", dtype="float64")
    before = model.get_weights()
    model.train_on_batch(x, y)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(np.abs(new - old), 0.1, rtol=1e-12)


# Errors


class Broken(dp.Sequential):
    wrong = staticmethod(lambda model, x, y: None)

    def train_step(self, data):
        return self.wrong(self, *data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda model, x, y: None, "train_step: expected a dictionary of logs to be returned, found NoneType"),
        (lambda model, x, y: {"a": 1.0} if ops.sum(x) > 0 else {}, "is not known while a step is traced.*run_eagerly"),
        (lambda model, x, y: {"a": float(ops.sum(x))}, "is not known while a step is traced.*run_eagerly=True"),
        (lambda model, x, y: {"a": np.sum(np.asarray(x))}, "is not known while a step is traced.*run_eagerly=True"),
        (lambda model, x, y: {"x": x}, "train_step: log 'x' has shape .* expected a single number"),
    ],
)
def test_wrong_steps_are_a_clear_error(wrong, message):
    x, y = values(8)
    model = Broken([Dense(2, input_shape=(4,))])
    model.wrong = wrong
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=message):
        model.fit(x, y, batch_size=8, verbose=0)


def test_eagerly_a_step_may_look_at_values():
    class Looking(dp.Sequential):
        def train_step(self, data):
            x, _ = data
            self.signs.append("plus" if ops.sum(x) > 0 else "minus")
            return {"sum": float(ops.sum(x)), "numpy": np.asarray(x).sum()}

    x, y = values(16)
    model = Looking([Dense(2, input_shape=(4,))])
    model.signs = []
    model.compile("sgd", "mse", run_eagerly=True, dtype="float64")
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    assert model.signs == ["plus" if part.sum() > 0 else "minus" for part in (x[:8], x[8:])]
    np.testing.assert_allclose(history["sum"], [x[8:].sum()], rtol=1e-12)
    assert history["numpy"] == history["sum"]


class Unsafe(dp.layers.Layer):
    def call(self, inputs):
        return ops.log(inputs)


def test_eagerly_the_first_nan_is_named():
    x, y = values(8)
    model = dp.Sequential([Dense(2, input_shape=(4,)), Unsafe(name="unsafe"), Dense(2)])
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(
        DivergenceError, match=r"op 'log' of layer 'unsafe' is the first to produce a NaN, at \[\d, \d\]"
    ):
        model.fit(x, y, verbose=0)


def test_other_wrong_uses():
    x, y = values(8)
    model = Tape([Dense(2, input_shape=(4,))])
    model.compile("sgd")
    with pytest.raises(ConfigError, match=r"No loss to compute. Provide a `loss` argument in `compile\(\)`"):
        model.fit(x, y, verbose=0)
    with pytest.raises(DataError, match="one row for each of 8 samples"):
        model.fit(x, y[:-1], verbose=0)


# Executions of several steps


@pytest.mark.parametrize("steps", ["auto", 1, 3, 100])
def test_steps_per_execution(steps):
    class Batches(Callback):
        def __init__(self):
            super().__init__()
            self.seen, self.losses = [], []

        def on_train_batch_begin(self, batch, logs=None):
            self.seen.append(f"begin {batch}")

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(f"end {batch}")
            self.losses.append(logs["loss"])

    x, y = values(61)
    batches = Batches()

    def fit(**options) -> tuple[dict, bytes]:
        model = dp.Sequential([Dense(5, "tanh", input_shape=(4,)), Dropout(0.2), Dense(2)], seed=1)
        model.compile("adam", "mse", metrics=["mae"], dtype="float64", steps_per_execution=steps)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y), **options).history
        return history, b"".join(weight.tobytes() for weight in model.get_weights())

    expected = {
        "auto": [f"{phase} {n}" for n in range(8) for phase in ("begin", "end")],
        1: [f"{phase} {n}" for n in range(8) for phase in ("begin", "end")],
        3: ["begin 0", "end 2", "begin 3", "end 5", "begin 6", "end 6", "begin 7", "end 7"],
        100: ["begin 0", "end 6", "begin 7", "end 7"],  # the last batch is a smaller one
    }[steps]
    actual = fit(callbacks=[batches])
    assert batches.seen == expected * 2
    assert batches.losses[-1] == actual[0]["loss"][-1]
    assert fit() == actual
    model = dp.Sequential([Dense(5, "tanh", input_shape=(4,)), Dropout(0.2), Dense(2)], seed=1)
    model.compile("adam", "mse", metrics=["mae"], dtype="float64", steps_per_execution=1)
    assert model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y)).history == actual[0]


# Random numbers


class Noisy(dp.Sequential):
    """Adds noise in its steps; in test steps as well, if it is told to."""

    def __init__(self, layers, seed=None, tests=False):
        super().__init__(layers, seed=seed)
        self.noise, self.tests = dp.random.SeedGenerator(11), tests

    def train_step(self, data):
        x, y = data
        return super().train_step((x + 0.1 * dp.random.normal(x.shape, seed=self.noise), y))

    def test_step(self, data):
        if self.tests:
            dp.random.uniform((3,), seed=self.noise)
        return super().test_step(data)


def test_noise_of_a_step_is_new_at_every_step_and_a_function_of_the_seed():
    x, y = values(16)

    def losses(**options) -> list[float]:
        model = Noisy([Dense(2, input_shape=(4,))], seed=1, **options)
        model.compile(dp.optimizers.SGD(1e-300), "mse", dtype="float64")
        return model.fit(x, y, batch_size=16, epochs=3, verbose=0, validation_data=(x, y)).history["loss"]

    assert len(set(losses())) == 3
    assert losses() == losses()
    assert losses(tests=True) != losses()  # its draws are counted, as Keras counts them


def test_seeds_of_random_functions():
    a, b = (dp.random.normal((2, 3), seed=5).numpy() for _ in range(2))
    np.testing.assert_array_equal(a, b)  # a number gives the same numbers, as in Keras
    assert not np.array_equal(a, dp.random.normal((2, 3), seed=6).numpy())
    try:
        dp.utils.set_random_seed(3)
        first = [dp.random.uniform((2, 3)).numpy() for _ in range(2)]
        dp.utils.set_random_seed(3)
        values = [dp.random.uniform((2, 3)).numpy() for _ in range(2)]
    finally:
        dp.utils.set_random_seed(0)
    np.testing.assert_array_equal(first, values)
    assert not np.array_equal(first[0], first[1])
    numbers = dp.random.randint((1000,), -2, 3, seed=1).numpy()
    assert numbers.dtype == np.int32
    assert sorted(set(numbers.tolist())) == [-2, -1, 0, 1, 2]
    dropped = dp.random.dropout(np.ones((100, 100)), 0.25, seed=dp.random.SeedGenerator(4)).numpy()
    assert abs((dropped == 0).mean() - 0.25) < 0.02
    with pytest.raises(AttributeError, match=r"not supported: random\.norml; did you mean 'normal'"):
        dp.random.norml  # noqa: B018
