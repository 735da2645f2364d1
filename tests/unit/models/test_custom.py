"""Steps that a subclass writes itself: the built-in step's numbers, and what only they can do."""

import numpy as np
import pytest
from dptrain.train.explicit import normal

import dptrain as dp
from dptrain.backend.base import RowSum
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.callbacks import Callback
from dptrain.errors import ConfigError, DataError
from dptrain.layers import Dense, Dropout, Flatten, Rescaling


def toy(rows: int = 53) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (rows, 2, 3), dtype=np.uint8)
    return x, (x[:, 0, 0] // 86).astype(np.uint8)


def stack() -> list[dp.layers.Layer]:
    return [Rescaling(1 / 255, input_shape=(2, 3)), Flatten(), Dense(8, "tanh"), Dropout(0.3), Dense(3, "softmax")]


class OwnTrainStep(dp.Sequential):
    def train_step(self, data):
        x, y = data
        y_pred = self.forward(x, training=True)
        loss, dy = self.compute_loss(x, y, y_pred)
        self.loss_tracker.update_state(loss, data.rows)
        self.backward(dy)
        self.apply_gradients()
        return self.compute_metrics(x, y, y_pred)


class Unpacked(dp.Sequential):
    """Takes `data` apart as Keras' guides do."""

    def train_step(self, data):
        assert isinstance(data, tuple)
        assert len(data) == (2 if data.sample_weight is None else 3)
        x, y, weights = (*data, None)[:3]
        assert (x is data.x, y is data.y, weights is data.sample_weight) == (True, True, True)
        assert (data[0] is x, data[1] is y, data[-1] is (y if weights is None else weights)) == (True, True, True)
        return super().train_step(data)


class OwnTestStep(dp.Sequential):
    def test_step(self, data):
        y_pred = self.forward(data.x)
        loss, dy = self.compute_loss(data.x, data.y, y_pred, training=False)
        assert dy is None
        self.loss_tracker.update_state(loss, data.rows)
        return self.compute_metrics(data.x, data.y, y_pred)


class OwnLoss(dp.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        total, dy = self.buffer("own loss", (1,)), self.buffer("own dy", y_pred.shape)
        self.ops.fill(total, 0)
        if len(y_pred):
            values = self.buffer("own values", (len(y_pred),))
            self.ops.softmax_cross_entropy(y_pred, y, None, None, dy, values, None)
            self.ops.sum_rows(RowSum(values, None, total))
        return total, dy


class OwnMetrics(dp.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return dict(super().compute_metrics(x, y, y_pred, sample_weight))


def trained(kind: type[dp.Sequential], **options) -> tuple[dp.Sequential, dict[str, list[float]]]:
    x, y = toy()
    model = kind(stack(), seed=1)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], dtype="float64", **options)
    history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, validation_split=0.2)
    return model, history.history


@pytest.mark.parametrize("kind", [OwnTrainStep, OwnTestStep, OwnLoss, OwnMetrics, Unpacked])
def test_the_built_in_step_bit_for_bit(kind):
    """Dropout, a last batch that is not full and layers that the batch op would absorb are all in it."""
    x, y = toy()
    (model, history), (own, own_history) = trained(dp.Sequential), trained(kind)
    assert own_history == history
    for mine, other in zip(own.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(own.predict(x), model.predict(x))
    assert own.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)
    for one in (own, model):
        one.reset_metrics()
    assert own.train_on_batch(x, y) == model.train_on_batch(x, y)
    assert own.test_on_batch(x[:7], y[:7]) == model.test_on_batch(x[:7], y[:7])


def test_weights_are_the_third_of_the_data():
    x, y = toy()
    weights = np.linspace(0.5, 1.5, len(x))
    found = []
    for kind in (dp.Sequential, Unpacked):
        model = kind(stack(), seed=1)
        model.compile("adam", "sparse_categorical_crossentropy", dtype="float64")
        found.append(model.fit(x, y, batch_size=16, verbose=0, sample_weight=weights).history)
    assert found[0] == found[1]


def test_a_model_without_steps_of_its_own_runs_the_fused_step():
    model, _ = trained(dp.Sequential)
    assert not model.has_own_steps
    assert type(model._replica).__name__ == "Replica"
    assert type(trained(OwnTestStep)[0]._replica).__name__ == "ExplicitReplica"


class Regression(dp.Sequential):
    """Notes the mean of the targets, and may take its step in two halves."""

    def __init__(self, layers, halves=False):
        super().__init__(layers, seed=2)
        self.halves = halves
        self.target = dp.metrics.MeanTracker("target")

    def train_step(self, data):
        self.target.update_state(data.y)
        middle = data.rows // 2
        parts = [(0, middle), (middle, data.rows)] if self.halves else [(0, data.rows)]
        for start, stop in parts:
            y = data.y[start:stop]
            loss, dy = self.compute_loss(None, y, self.forward(data.x[start:stop], training=True))
            self.loss_tracker.update_state(loss, stop - start)
            self.backward(dy)
        self.apply_gradients(rows=data.rows)
        return {"loss": self.loss_tracker.result(), "target": self.target.result()}


def values(rows: int = 21) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((rows, 4)), rng.standard_normal((rows, 2))


def regression(**options) -> Regression:
    model = Regression([Dense(5, "tanh", input_shape=(4,)), Dense(2)], **options)
    model.compile(dp.optimizers.SGD(0.1), "mse", dtype="float64", jit_compile=False)
    return model


def test_gradients_of_several_passes_add_up():
    x, y = values()
    whole, halves = regression(), regression(halves=True)
    a, b = (model.fit(x, y, batch_size=8, epochs=2, verbose=0).history for model in (whole, halves))
    np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-13)
    for mine, other in zip(halves.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12)


def test_a_mean_is_over_all_samples_of_the_epoch():
    x, y = values()
    history = regression().fit(x, y, batch_size=8, epochs=2, verbose=0).history
    np.testing.assert_allclose(history["target"], [y.mean()] * 2, rtol=1e-13)


def test_no_step_waits_for_the_device_unless_somebody_looks(monkeypatch):
    x, y = values(64)
    downloads = []
    real = NumpyBackend.download
    monkeypatch.setattr(NumpyBackend, "download", lambda self, buffer: (downloads.append(1), real(self, buffer))[1])

    def count(batch_size: int, *callbacks: Callback) -> int:
        model = regression()
        downloads.clear()
        model.fit(x, y, batch_size=batch_size, verbose=0, callbacks=list(callbacks))
        return len(downloads)

    class Looks(Callback):
        seen: list[float] = []  # noqa: RUF012

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(logs["target"])

    assert count(64) == count(4)
    assert count(4, Looks()) > count(4)
    # The mean of the epoch so far, as Keras.
    np.testing.assert_allclose(Looks.seen[-1], y.mean(), rtol=1e-12)
    assert len(Looks.seen) == 16


def explicit() -> tuple[dp.Sequential, np.ndarray, np.ndarray]:
    """A model that nobody fits, inputs, and a gradient in the outputs."""
    model = dp.Sequential([Flatten(input_shape=(2, 2)), Dense(5, "tanh"), Rescaling(2.0, 0.1), Dense(3)], seed=1)
    model.compile(dp.optimizers.SGD(1.0), dtype="float64", jit_compile=False)
    rng = np.random.default_rng(4)
    return model, rng.standard_normal((6, 2, 2)), rng.standard_normal((6, 3))


def test_the_gradient_in_the_input():
    model, x, dy = explicit()
    model.forward(x, training=True)
    dx = model.backward(dy, input_gradient=True).copy()
    assert dx.shape == x.shape
    for index in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[index] = 1e-6
        plus, minus = (float((dy * model.forward(x + sign * moved)).sum()) for sign in (1, -1))
        np.testing.assert_allclose(dx[index], (plus - minus) / 2e-6, rtol=1e-6, atol=1e-8)


def test_a_frozen_pass_leaves_no_gradient():
    model, x, dy = explicit()
    model.forward(x, training=True)
    assert model.backward(dy) is None
    kept = {name: one.copy() for name, one in model.gradients.items()}
    assert all(np.abs(one).max() > 0 for one in kept.values())
    model.forward(2 * x, training=True)
    model.backward(-3 * dy, input_gradient=True, frozen=True)
    for name, one in model.gradients.items():
        np.testing.assert_array_equal(one, kept[name])
    before = model.named_weights()
    model.apply_gradients()
    for name, one in model.named_weights().items():
        np.testing.assert_allclose(one, before[name] - kept[name] / 6, rtol=1e-14)  # 6 rows, learning rate 1
    for one in model.gradients.values():  # a new step begins
        np.testing.assert_array_equal(one, 0)


def test_what_is_added_to_a_gradient_takes_part_in_the_update():
    model, x, dy = explicit()
    before = model.named_weights()
    model.forward(x, training=True)
    model.backward(0 * dy)
    for name, gradient in model.gradients.items():
        decay = model.buffer(name, gradient.shape)
        model.ops.affine(model.parameters[name], 0.1 * len(x), 0.0, decay)
        model.ops.add(decay, gradient)
    model.apply_gradients()
    for name, one in model.named_weights().items():
        np.testing.assert_allclose(one, 0.9 * before[name], rtol=1e-14)


class Pair(dp.Sequential):
    """Trains itself on odd steps, and its part, which gives it its inputs, in every step."""

    def __init__(self, part):
        super().__init__([Dense(2, input_shape=(3,))], seed=4)
        self.part, self.calls = part, 0

    def train_step(self, data):
        noise = self.random_normal("noise", data.rows, 4, data.first_row)
        made = self.part.forward(noise, training=True)
        loss, dy = self.compute_loss(None, data.y, self.forward(made, training=True))
        self.loss_tracker.update_state(loss, data.rows)
        self.part.loss_tracker.update_state(loss, data.rows)
        self.calls += 1
        frozen = self.calls % 2 == 0
        self.part.backward(self.backward(dy, input_gradient=True, frozen=frozen))
        if not frozen:
            self.apply_gradients()
        self.part.apply_gradients()
        return {"loss": self.loss_tracker.result(), "part": self.part.loss_tracker.result()}


def test_a_part_keeps_its_weights_and_optimizer_wherever_it_is_trained():
    x, y = values(20)
    part = dp.Sequential([Dense(3, input_shape=(4,))], seed=3)
    part.compile("adam", "mse", dtype="float64")
    part.fit(x, x[:, :3], batch_size=10, epochs=3, verbose=0)
    alone, steps = part.get_weights(), part._replica.iterations
    assert steps == 6
    pair = Pair(part)
    pair.compile("adam", "mse", dtype="float64")
    np.testing.assert_array_equal(part.get_weights()[0], alone[0])
    history = pair.fit(x[:, :3], y, batch_size=5, epochs=2, verbose=0).history
    assert history["loss"] == history["part"]
    assert part._replica.iterations == steps + 8
    assert pair._replica.iterations == 4
    assert np.abs(part.get_weights()[0] - alone[0]).max() > 0
    # And alone again, with its own means.
    loss = part.fit(x, x[:, :3], batch_size=10, verbose=0).history["loss"]
    assert np.isfinite(loss[0])
    assert part.evaluate(x, x[:, :3], verbose=0) < loss[0]
    assert pair.fit(x[:, :3], y, batch_size=5, verbose=0).history["loss"][0] < history["loss"][0]


def test_normal_numbers_do_not_depend_on_how_rows_are_cut():
    whole = normal(5, (0, 3), 1000, 7, 0)
    np.testing.assert_array_equal(normal(5, (0, 3), 10, 7, 33), whole[33:43])
    assert np.abs(normal(5, (0, 4), 1000, 7, 0) - whole).max() > 1
    assert abs(whole.mean()) < 0.05
    assert abs(whole.std() - 1) < 0.05
    assert abs(float((whole**4).mean()) - 3) < 0.3


class Free(dp.Sequential):
    """Targets of any shape."""

    def train_step(self, data):
        self.seen = data
        self.forward(data.x, training=True)
        self.backward(self.buffer("dy", (data.rows, 2)))
        self.apply_gradients()
        return {"rows": data.rows}


@pytest.mark.parametrize(("y", "dtype"), [(np.zeros((8, 3, 5)), "float32"), (np.arange(8), "int64"), (None, None)])
def test_without_a_loss_targets_are_what_they_are(y, dtype):
    model = Free([Dense(2, input_shape=(4,))])
    model.compile("sgd")
    weights = np.arange(8.0)
    model.fit(np.zeros((8, 4)), y, batch_size=8, shuffle=False, sample_weight=weights, verbose=0)
    if y is None:
        assert model.seen.y is None
    else:
        assert model.seen.y.dtype == dtype
        np.testing.assert_array_equal(model.seen.y, y)
    np.testing.assert_array_equal(model.seen.sample_weight, weights)
    assert len(list(model.seen)) == 3


class Broken(dp.Sequential):
    returns = None
    wrong = staticmethod(lambda model, data: None)

    def train_step(self, data):
        self.wrong(self, data)
        return self.returns


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda model, data: None, "train_step: expected a dictionary of logs to be returned, found NoneType"),
        (lambda model, data: model.backward(data.x), r"backward\(\) needs a forward\(x, training=True\) before it"),
        (lambda model, data: model.forward(data.y), r"expected inputs of shape \(rows, 4\), found \(8, 2\)"),
        (
            lambda model, data: (model.forward(data.x, training=True), model.backward(data.x)),
            r"expected the gradient in the output, \(8, 2\), found \(8, 4\)",
        ),
        (
            lambda model, data: dp.metrics.MeanTracker("mine").update_state(data.x),
            "MeanTracker 'mine' belongs to no model",
        ),
        (lambda model, data: model.compute_loss(None, None, data.y), "`y` is missing"),
        (lambda model, data: model.backward(None), "the gradient is None"),
    ],
)
def test_wrong_steps_are_a_clear_error(wrong, message):
    x, y = values(8)
    model = Broken([Dense(2, input_shape=(4,))])
    model.wrong = wrong
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=message):
        model.fit(x, y, batch_size=8, verbose=0)


def test_other_wrong_uses():
    x, y = values(8)

    class NoTuple(dp.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return self.buffer("loss", (1,))

    model = NoTuple([Dense(2, input_shape=(4,))])
    model.compile("sgd")
    with pytest.raises(ConfigError, match=r"expected \(loss, gradient\) to be returned.*found ndarray"):
        model.fit(x, y, verbose=0)
    with pytest.raises(DataError, match="one row for each of 8 samples"):
        model.fit(x, y[:-1], verbose=0)
    plain = dp.Sequential([Dense(2, input_shape=(4,))])
    plain.forward(x.astype(np.float32), training=True)
    with pytest.raises(ConfigError, match=r"You must call `compile\(\)` before calling `backward"):
        plain.backward(y.astype(np.float32))


class RandomTestStep(OwnTrainStep):
    """Draws in its test steps, of which each rank may have another number."""

    def test_step(self, data):
        self.forward(data.x, training=True)
        self.random_normal("noise", data.rows, 2)
        return super().test_step(data)


def test_what_a_test_step_draws_does_not_move_the_training():
    (_, history), (_, other) = trained(OwnTrainStep), trained(RandomTestStep)
    assert other["loss"] == history["loss"]
    assert len(set(history["loss"])) == 3


def everything() -> list[dp.layers.Layer]:
    """Layers that sum over the ranks, that are not trained, with penalties."""
    return [
        Dense(6, "tanh", input_shape=(4,), trainable=False),
        dp.layers.BatchNormalization(),
        Dense(5, "relu", kernel_regularizer=dp.regularizers.L2(0.01)),
        Dropout(0.2),
        Dense(1, "sigmoid", bias_regularizer="l1"),
    ]


class Plain(dp.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class AlsoTests(OwnMetrics):
    def test_step(self, data):
        y_pred = self.forward(data.x)
        loss, _ = self.compute_loss(data.x, data.y, y_pred, data.sample_weight, training=False)
        self.loss_tracker.update_state(loss, data.rows)
        return self.compute_metrics(data.x, data.y, y_pred, data.sample_weight)


@pytest.mark.parametrize("kind", [Plain, AlsoTests])
def test_weights_penalties_and_states(kind):
    """Sample weights, weighted metrics, metrics with more state and of outputs that the loss takes as logits."""
    x, _ = values(37)
    y = (x[:, :1] > 0).astype(np.float64)
    weights = np.random.default_rng(5).uniform(0.5, 2, len(x))
    found = []
    for one in (dp.Sequential, kind):
        model = one(everything(), seed=1)
        model.compile(
            dp.optimizers.Adam(0.01, clipnorm=1.0, weight_decay=0.01),
            "binary_crossentropy",
            metrics=["accuracy", "mae", dp.metrics.Precision(name="precision")],
            weighted_metrics=["accuracy", dp.metrics.Recall(name="recall")],
            dtype="float64",
            jit_compile=False,
        )
        history = model.fit(
            x, y, batch_size=8, epochs=3, sample_weight=weights, validation_data=(x[:9], y[:9]), verbose=0
        )
        found.append((history.history, model.get_weights(), model.evaluate(x, y, verbose=0, sample_weight=weights)))
    (history, parameters, score), (own_history, own_parameters, own_score) = found
    assert list(own_history) == list(history)
    assert "weighted_accuracy" in history
    for key, other in history.items():
        np.testing.assert_allclose(own_history[key], other, rtol=1e-12, err_msg=key)
    np.testing.assert_allclose(own_score, score, rtol=1e-12)
    for one, other in zip(own_parameters, parameters, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-14)


def test_batches_of_a_generator_and_no_loss():
    x, y = values(24)

    def batches():
        for start in range(0, 24, 8):
            yield x[start : start + 8], y[start : start + 8]

    histories = []
    for kind in (dp.Sequential, Plain):
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
    assert free.seen.y.dtype == "int64"
    free.fit(((x[:8],) for _ in range(3)), steps_per_epoch=3, shuffle=False, verbose=0)
    assert free.seen.y is None


@pytest.mark.parametrize(
    "loss",
    [
        dp.losses.MeanSquaredError(reduction="sum"),
        dp.losses.SparseCategoricalCrossentropy(ignore_class=1),
    ],
)
def test_a_loss_that_is_not_divided_by_samples_is_refused(loss):
    x, y = values(8)
    model = Plain([Dense(2, input_shape=(4,))])
    model.compile("sgd", loss)
    with pytest.raises(ConfigError, match=f"not supported: steps of your own with loss {loss.name!r}"):
        model.fit(x, np.zeros(8, int) if loss.takes_labels else y, verbose=0)


def test_without_a_loss_metrics_say_what_targets_are():
    x, _ = values(8)
    model = Free([Dense(2, input_shape=(4,))])
    model.compile("sgd", metrics=["accuracy", dp.metrics.SparseCategoricalAccuracy(name="same")])
    model.train_step = lambda data: model.compute_metrics(data.x, data.y, model.forward(data.x), data.sample_weight)
    history = model.fit(x, np.arange(8) % 2, batch_size=4, verbose=0).history
    labels = model.predict(x, verbose=0).argmax(axis=1)
    np.testing.assert_allclose(history["accuracy"], [(labels == np.arange(8) % 2).mean()])
    assert history["same"] == history["accuracy"]
    assert '"compile_config": {}' in model.to_json()


def test_layers_that_sum_over_the_ranks_do_not_train_in_a_test_step():
    class Testing(dp.Sequential):
        def test_step(self, data):
            self.forward(data.x, training=True)
            return {}

    x, y = values(8)
    model = Testing([dp.layers.BatchNormalization(input_shape=(4,)), Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"not supported: forward\(x, training=True\) in a test_step"):
        model.evaluate(x, y, verbose=0)
