"""The replica, the loop and the Keras face, in one process."""

import io
import math
import random
from contextlib import redirect_stdout
from itertools import pairwise

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.batches.base import ArrayBatches
from dptrain.batches.feed import StreamedFeed, make_feed
from dptrain.batches.inputs import Samples
from dptrain.batches.sampling import GlobalSampler, LocalSampler, Sampler, Shard
from dptrain.callbacks import Callback, CallbackList, EpochRecorder, History
from dptrain.comm import current
from dptrain.errors import ConfigError, DataError
from dptrain.layers import Dense, Dropout, Flatten, Rescaling
from dptrain.metrics import SparseCategoricalAccuracy
from dptrain.optimizers import SGD, Adam
from dptrain.program.execute import ReferenceExecutable as NumpyExecutable
from dptrain.train.trainer import run_to_end
from tests.sample import sample


def toy(rows: int = 50, features: int = 6, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (rows, features), dtype=np.uint8)
    return x, (x[:, 0] // 86).astype(np.uint8)


def build(dtype: str = "float64", **options) -> dp.Sequential:
    model = dp.Sequential(
        [Rescaling(1 / 255, input_shape=(6,)), Dense(8, activation="tanh"), Dense(3, activation="softmax")], seed=1
    )
    options = {"optimizer": Adam(0.01), "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]} | options
    model.compile(**options, dtype=dtype)
    return model


def trained_in(shards: list[Shard], dropout: float = 0.0) -> dp.Sequential:
    """Return a model after a step on rows 10 to 40 of the reversed samples, in these shards."""
    x, y = toy()
    stack = [Rescaling(1 / 255, input_shape=(6,)), Dense(8, "tanh"), Dropout(dropout), Dense(3, "softmax")]
    model = dp.Sequential(stack, seed=1)
    model.compile(SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"], dtype="float64")
    batches = ArrayBatches(*Samples(x, y, dtype="float64").stored(), OneStep(shards))
    trainer = model._open_trainer(current())
    run_to_end(trainer.training(batches, CallbackList([History()], model), epochs=1))
    return model


class OneStep(Sampler):
    """A step of given shards."""

    def __init__(self, shards: list[Shard]) -> None:
        self.steps, self.capacity, self._shards = 1, max(shard.rows for shard in shards), shards

    def order(self, epoch: int) -> np.ndarray:
        return np.arange(50)[::-1].copy()

    def shards(self, step: int) -> list[Shard]:
        return self._shards


def cut_into(parts: int) -> list[Shard]:
    """Rows 10 to 40 in some number of shards, some of them empty."""
    bounds = [10 + 30 * part // parts for part in range(parts + 1)]
    of = parts if parts > 1 else None
    return [Shard(a, b, a - 10, 30, number, of) for number, (a, b) in enumerate(pairwise(bounds))]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("parts", sample([2, 3, 4, 5, 7, 8, 40], 3))
def test_any_cut_into_shards_gives_the_whole_batch(parts, dropout):
    full, cut = trained_in(cut_into(1), dropout), trained_in(cut_into(parts), dropout)
    for weight, other in zip(cut.get_weights(), full.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-12, atol=1e-14)
    logs, expected = cut.get_metrics_result(), full.get_metrics_result()
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(float(logs[name]), float(expected[name]), rtol=1e-12)


def test_shards_of_a_model_that_needs_the_whole_batch():
    x, y = toy()
    model = dp.Sequential([dp.layers.BatchNormalization(input_shape=(6,)), Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", dtype="float64")
    batches = ArrayBatches(*Samples(x, y, dtype="float64").stored(), GlobalSampler(50, 10, shards_per_batch=2))
    with pytest.raises(ConfigError, match="the whole batch at once: a fixed number of shards is not"):
        run_to_end(model._open_trainer(current()).training(batches, CallbackList([], model), epochs=1))


@pytest.mark.parametrize("shards", [None, 4])
def test_programs_are_prepared_once(monkeypatch, shards):
    """A new epoch, and another step of the same size, trace and prepare nothing."""
    traced, prepared = [], []
    x, y = toy(53)
    model = build()
    step, make = model.train_step, CpuBackend.executable
    monkeypatch.setattr(model, "train_step", lambda data: (traced.append(1), step(data))[1])
    monkeypatch.setattr(
        CpuBackend, "executable", lambda *arguments, **keywords: (prepared.append(1), make(*arguments, **keywords))[1]
    )
    batches = ArrayBatches(*Samples(x, y, dtype="float64").stored(), GlobalSampler(53, 8, shards_per_batch=shards))
    trainer = model._open_trainer(current())
    run_to_end(trainer.training(batches, CallbackList([], model), epochs=3))
    assert trainer.timing.samples == 53
    assert int(model.optimizer.iterations) == 21
    assert len(traced) == 1  # for batches of 8 and of 5
    assert len(prepared) == {None: 2, 4: 2 * (4 + 1)}[shards]  # fixed shards: each, and what follows from their sums


@pytest.mark.parametrize("jit_compile", sample([False, True], 2, first=1))
def test_a_step_allocates_no_arrays(jit_compile):
    """After the first step of each size, steps leave memory as it was and peak far below one activation."""
    import tracemalloc

    rng = np.random.default_rng(0)
    model = dp.Sequential([Rescaling(1 / 255, input_shape=(784,)), Dense(512, "relu"), Dense(10, "softmax")], seed=1)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=jit_compile)
    x, y = rng.integers(0, 256, (600, 784), np.uint8), rng.integers(0, 10, 600)
    batches = ArrayBatches(*Samples(x, y).stored(), GlobalSampler(600, 256))
    trainer = model._open_trainer(current())
    steps = trainer.training(batches, CallbackList([], model), epochs=9)
    seen = [next(steps) for _ in range(6)]
    assert len(seen) == 6  # two epochs' or more, after which the state is looked at
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for _ in range(3):
        next(steps)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    steps.close()
    assert after - before < 20_000
    # NumPy casts through buffers of its own of 8192 elements, 64 KiB; an activation here has 512 KiB.
    assert peak - before < 300_000


def test_fit_learns_and_history_has_keras_keys():
    x, y = toy(400)
    model = build("float32")
    history = model.fit(x, y, batch_size=32, epochs=40, validation_data=(x[:50], y[:50]), verbose=0)
    assert list(history.history) == ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert history.epoch == list(range(40))
    assert history.history["accuracy"][-1] > 0.9
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_loss_and_accuracy_are_means_over_samples_with_an_uneven_last_batch():
    x, y = toy(50)
    model = build(optimizer=SGD(1e-300))
    history = model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    p = model.predict(x)
    expected = -np.log(p[np.arange(50), y]).mean()
    np.testing.assert_allclose(history.history["loss"], [expected], rtol=1e-12)
    np.testing.assert_allclose(history.history["accuracy"], [(p.argmax(1) == y).mean()], rtol=1e-12)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose([loss, accuracy], [expected, (p.argmax(1) == y).mean()], rtol=1e-12)
    assert model.evaluate(x, y, verbose=0, return_dict=True) == {"loss": loss, "accuracy": accuracy}


def test_one_step_of_sgd_by_hand():
    x, y = np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([0, 1])
    model = dp.Sequential([Dense(2, activation="softmax", input_shape=(2,))])
    model.compile(SGD(0.1), "sparse_categorical_crossentropy", dtype="float64")
    kernel, bias = np.array([[0.1, -0.2], [0.3, 0.4]]), np.array([0.0, 0.1])
    model.set_weights([kernel, bias])
    model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    z = x @ kernel + bias
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    dz = (p - np.eye(2)) / 2
    np.testing.assert_allclose(model.get_weights()[0], kernel - 0.1 * x.T @ dz, rtol=1e-12)
    np.testing.assert_allclose(model.get_weights()[1], bias - 0.1 * dz.sum(0), rtol=1e-12)


def test_weights_survive_compile_and_come_back_as_set():
    model = build("float32")
    before = model.get_weights()
    assert [w.shape for w in before] == [(6, 8), (8,), (8, 3), (3,)]
    model.set_weights([w + 1 for w in before])
    model.compile("sgd", "sparse_categorical_crossentropy")
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(new, old + 1)
    assert list(model._named_weights()) == ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"]
    assert model.count_params() == 6 * 8 + 8 + 8 * 3 + 3


def test_seed_fixes_everything():
    x, y = toy(100)

    def weights(seed: int) -> bytes:
        model = dp.Sequential([Dense(8, "relu", input_shape=(6,)), Dropout(0.5), Dense(3, "softmax")], seed=seed)
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        return b"".join(w.tobytes() for w in model.get_weights())

    assert weights(4) == weights(4)
    assert weights(4) != weights(5)


def test_set_random_seed():
    dp.utils.set_random_seed(9)
    try:
        assert dp.Sequential([Dense(2, input_shape=(2,))]).seed == 9
        numbers = np.random.rand(3).tolist(), random.random()
        dp.utils.set_random_seed(9)
        assert (np.random.rand(3).tolist(), random.random()) == numbers
        dp.utils.set_random_seed(2**62)
        assert (np.random.rand(3).tolist(), random.random()) != numbers
    finally:
        dp.utils.set_random_seed(0)
    with pytest.raises(ConfigError, match="seed = -1"):
        dp.utils.set_random_seed(-1)


def test_rescaling_first_is_what_rescaling_anywhere_computes():
    x, y = toy(64)

    def train(stack: list[dp.layers.Layer], data: np.ndarray) -> list[np.ndarray]:
        model = dp.Sequential(stack, seed=2)
        model.compile(SGD(0.1), "sparse_categorical_crossentropy", dtype="float64")
        model.fit(data, y, batch_size=16, verbose=0)
        return [*model.get_weights(), model.predict(data)]

    absorbed = train([Flatten(input_shape=(2, 3)), Rescaling(1 / 255, -0.5), Dense(3, "softmax")], x.reshape(64, 2, 3))
    layer = train([Dropout(0.0, input_shape=(6,)), Rescaling(1 / 255, -0.5), Dense(3, "softmax")], x)
    by_hand = train([Dense(3, "softmax", input_shape=(6,))], x / 255 - 0.5)
    for a, b, c in zip(absorbed, layer, by_hand, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        np.testing.assert_allclose(a, c, rtol=1e-10)


def test_raw_pixels_are_not_scaled_behind_the_users_back():
    x = np.array([[10, 200]], np.uint8)
    model = dp.Sequential([Dense(1, input_shape=(2,))])
    model.set_weights([np.array([[1.0], [1.0]]), np.zeros(1)])
    assert model.predict(x).tolist() == [[210.0]]


def test_dropout_is_off_in_evaluation():
    x, _ = toy(20)
    model = dp.Sequential([Dropout(0.9, input_shape=(6,))])
    np.testing.assert_array_equal(model.predict(x), x.astype(np.float32))


def test_regression_with_mse_and_mae():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 4))
    target = x @ np.array([1.0, -2.0, 0.5, 3.0]) + 0.25
    model = dp.Sequential([Dense(1, input_shape=(4,))])
    model.compile(SGD(0.1), "mse", metrics=["mae"], dtype="float64")
    history = model.fit(x, target, batch_size=50, epochs=60, verbose=0)
    assert list(history.history) == ["loss", "mae"]
    np.testing.assert_allclose(model.get_weights()[0].ravel(), [1.0, -2.0, 0.5, 3.0], atol=1e-3)
    np.testing.assert_allclose(model.get_weights()[1], [0.25], atol=1e-3)


def test_batches_larger_than_reserved_grow_the_buffers():
    x, y = toy(300)
    model = build()
    model.fit(x, y, batch_size=4, steps_per_epoch=2, verbose=0)
    small = model.predict(x[:3])
    np.testing.assert_allclose(model.predict(x)[:3], small, rtol=1e-12)
    model.fit(x, y, batch_size=300, verbose=0)


def test_the_learning_rate_is_set_between_batches():
    """A callback halves it before every batch; the optimizer counts on."""

    class Halve(Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            seen.append((int(optimizer.iterations), float(optimizer.learning_rate)))
            optimizer.learning_rate = optimizer.learning_rate / 2

    seen, optimizer = [], SGD(0.5)
    x, y = toy(6)
    model = build(optimizer=optimizer)
    model.fit(x, y, batch_size=2, epochs=1, shuffle=False, verbose=0, callbacks=[Halve()])
    by_callback = model.get_weights()
    assert seen == [(1, 0.5), (2, 0.25), (3, 0.125)]
    model = build(optimizer=SGD(dp.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)))
    model.fit(x, y, batch_size=2, epochs=1, shuffle=False, verbose=0)
    for a, b in zip(by_callback, model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_an_optimizer_that_is_given_again_goes_on():
    model = build()
    model.fit(*toy(), batch_size=50, verbose=0)
    momentum = model.optimizer.variables[2].numpy()
    model.compile(model.optimizer, "sparse_categorical_crossentropy")
    assert int(model.optimizer.iterations.numpy()) == 1
    np.testing.assert_array_equal(model.optimizer.variables[2].numpy(), momentum)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("leave", ["compile", "_put_on", "_release_device"])
def test_what_was_prepared_for_a_device_is_closed_with_it(monkeypatch, leave, shards):
    created, closed = [], []
    for kind in (NumpyExecutable, CompiledExecutable):
        monkeypatch.setattr(kind, "close", lambda self: closed.append(self))
    real = CpuBackend.executable
    monkeypatch.setattr(
        CpuBackend, "executable", lambda *arguments, **more: created.append(real(*arguments, **more)) or created[-1]
    )
    model = trained_in(cut_into(shards))
    assert len(created) == (1 if shards == 1 else 1 + len({shard.first_row for shard in cut_into(shards)}))
    assert not closed
    arguments = {"compile": ["sgd", "mse"], "_put_on": [CpuBackend(np.float64)], "_release_device": []}
    getattr(model, leave)(*arguments[leave])
    assert set(map(id, closed)) == set(map(id, created))


def test_another_optimizer_of_the_same_kind_begins_afresh():
    x, y = toy(40)
    model = build(optimizer=Adam(0.1))
    start = model.get_weights()
    model.fit(x, y, batch_size=40, verbose=0)
    first_weights = model.get_weights()
    model.compile(Adam(0.1), "sparse_categorical_crossentropy", dtype="float64")
    model.set_weights(start)
    model.fit(x, y, batch_size=40, verbose=0)
    for a, b in zip(model.get_weights(), first_weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, y: dp.Sequential([Dense(2)]).fit(x, y),
            ValueError,
            r"You must call `compile\(\)` before calling `fit",
        ),
        (lambda x, y: dp.Sequential([Dense(2)]).evaluate(x, y), ValueError, r"before calling `evaluate"),
        (lambda x, y: build().fit(x[:, :5], y), DataError, "model expects 6 features of shape .*, data has 5"),
        (lambda x, y: build().fit(x, y[:-1]), DataError, "x has 50 samples, y has 49"),
        (lambda x, y: build().fit(x, y + 1), DataError, "3 classes allow 0-2"),
        (lambda x, y: build().fit(x, y + 0.5), DataError, "labels must be integers"),
        (lambda x, y: build().fit(x.astype("U3"), y), DataError, "expected real numbers"),
        (lambda x, y: build().fit(x, y, batch_size=0), ConfigError, "batch_size = 0"),
        (lambda x, y: build().fit(x, y, epochs=-1), ConfigError, "epochs = -1"),
        (lambda x, y: build().fit(x, y, batch_size=64, drop_last=True), ConfigError, "at most 50"),
        (lambda x, y: build(loss=None).fit(x, y), ConfigError, "No loss to compute"),
        (lambda x, y: build(loss="cross"), ConfigError, "unknown loss"),
        (lambda x, y: build(metrics=["mae"]), ConfigError, "expects targets that are values"),
        (lambda x, y: build().set_weights([np.zeros((6, 8))]), ValueError, "expecting 4 weights"),
        (
            lambda x, y: build().set_weights([np.zeros(1)] * 4),
            ValueError,
            "is not compatible with provided weight shape",
        ),
        (lambda x, y: build(loss="mse", metrics=[]).fit(x, y), DataError, "expected targets of shape"),
        (lambda x, y: dp.Sequential([Dense(2)], seed=-1), ConfigError, "seed = -1"),
        (lambda x, y: dp.Sequential([Dense(2)]).build(), ConfigError, "needs input_shape"),
    ],
)
def test_wrong_use_is_a_clear_error(call, error, message):
    x, y = toy()
    with pytest.raises(error, match=message):
        call(x, y)


@pytest.mark.parametrize("wrong", [3, "dense", Dense, None, dp.Sequential])
def test_only_layers_can_be_added(wrong):
    message = r"Only instances of `dptrain.layers.Layer` can be added to a Sequential model. Received: .* \(of type "
    with pytest.raises(ConfigError, match=message):
        dp.Sequential([Dense(2), wrong])
    model = dp.Sequential([Dense(2)])
    with pytest.raises(ValueError, match=message):
        model.add(wrong)
    assert len(model.layers) == 1


def test_input_shape_is_taken_from_the_data():
    x, y = toy()
    model = dp.Sequential()
    model.add(Dense(3, activation="softmax"))
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y, verbose=0)
    assert model.get_weights()[0].shape == (6, 3)


def test_column_labels_are_labels():
    x, y = toy()
    a, b = build(), build()
    a.fit(x, y, verbose=0)
    b.fit(x, y[:, None], verbose=0)
    assert a.get_weights()[0].tobytes() == b.get_weights()[0].tobytes()


def test_each_validation_sees_the_same_first_batches():
    x, y = toy(50)
    arguments = {"validation_data": (x[:25], y[:25]), "validation_batch_size": 5, "validation_steps": 2}
    values = build(optimizer=SGD(1e-300)).fit(x, y, epochs=4, verbose=0, **arguments).history["val_loss"]
    expected = build().evaluate(x[:10], y[:10], verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(values, [expected] * 4, rtol=1e-12)


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[object] = []

    def on_train_begin(self, logs=None) -> None:
        self.events.append(("begin", self.params["epochs"], self.params["steps"]))

    def on_train_end(self, logs=None) -> None:
        self.events.append("end")

    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        self.events.append(("epoch", epoch))

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        self.events.append(("epoch end", epoch, sorted(logs)))

    def on_train_batch_end(self, batch: int, logs=None) -> None:
        self.events.append(("batch", batch, math.isfinite(logs["loss"])))


def test_callbacks_are_called_in_keras_order():
    x, y = toy(20)
    recorder = Recorder()
    build().fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=[recorder])
    batches = [("batch", 0, True), ("batch", 1, True)]
    assert recorder.events == [
        ("begin", 2, 2),
        ("epoch", 0),
        *batches,
        ("epoch end", 0, ["accuracy", "loss"]),
        ("epoch", 1),
        *batches,
        ("epoch end", 1, ["accuracy", "loss"]),
        "end",
    ]


def test_epoch_recorder_counts_samples():
    x, y = toy(50)
    logs: list[dict[str, float]] = []
    build().fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[EpochRecorder(logs.append)])
    assert [log["epoch"] for log in logs] == [1, 2]
    assert list(logs[0]) == ["epoch", "loss", "accuracy", "seconds", "samples_per_second"]
    assert logs[1]["samples_per_second"] == pytest.approx(50 / logs[1]["seconds"], rel=0.05)
    assert logs[0]["samples_per_second"] > 50 / logs[0]["seconds"]  # as steps are traced and compiled in the first


@pytest.mark.parametrize("names", [["accuracy"], ["acc"], [], ["accuracy", "sparse_categorical_accuracy"]])
def test_names_of_accuracy(names):
    x, y = toy(50)
    model = build(metrics=names, optimizer=SGD(1e-300))
    history = model.fit(x, y, batch_size=50, verbose=0).history
    expected = (model.predict(x).argmax(1) == y).mean()
    assert list(history) == ["loss", *names]
    for name in names:
        np.testing.assert_allclose(history[name], [expected], rtol=1e-12)


def test_a_metric_of_the_users_own_is_asked_itself():
    class Twice(SparseCategoricalAccuracy):
        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(y_true, y_pred, sample_weight)
            super().update_state(y_true, y_pred, sample_weight)

        def result(self):
            return 2 * super().result()

    x, y = toy(50)
    history = build(metrics=[Twice("twice"), "accuracy"]).fit(x, y, batch_size=50, verbose=0).history
    assert history["twice"] == [2 * history["accuracy"][0]]


def test_summary_is_printed():
    text = io.StringIO()
    with redirect_stdout(text):
        build().summary()
    assert 'Model: "sequential"' in text.getvalue()
    assert "Total params: 83" in text.getvalue()


def test_trainer_with_nothing_to_evaluate():
    x, y = toy()
    model = build()
    batches = ArrayBatches(*Samples(x, y, dtype="float64").stored(), LocalSampler(0, 0, 10))
    assert model._open_trainer(current()).evaluate(batches, CallbackList([], model)) == {}


WAYS = {
    "fit": lambda model, x, y: model.fit(x, y, batch_size=50, verbose=0),
    "validation": lambda model, x, y: model.fit(x[:1], y[:1], validation_data=(x, y), verbose=0),
    "evaluate": lambda model, x, y: model.evaluate(x, y, verbose=0),
    "predict": lambda model, x, y: model.predict(x, verbose=0),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x, y),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
}


@pytest.mark.parametrize("way", sample(WAYS, 3))
def test_samples_leave_room_for_what_the_step_needs(monkeypatch, way):
    """A device on which the samples fit, but not beside the results of a step on them, streams them."""
    (x, y), feeds = toy(), []
    free = max(x.nbytes + 8 * len(y), 400) + 100
    monkeypatch.setattr(CpuBackend, "room_for_data", lambda self: free)
    monkeypatch.setattr(
        "dptrain.batches.base.make_feed", lambda *arguments: feeds.append(make_feed(*arguments)) or feeds[-1]
    )
    WAYS[way](build(), x, y)
    assert isinstance(feeds[-1], StreamedFeed)
    free = 10_000_000
    WAYS[way](build(), x, y)
    assert not isinstance(feeds[-1], StreamedFeed)


def test_steps_that_run_eagerly_reserve_nothing(monkeypatch):
    """They are not traced where there is one rank, so that Python may look at values."""

    class Looking(dp.Sequential):
        def train_step(self, data):
            assert float(np.asarray(data[0]).max()) > 0
            return super().train_step(data)

    x, y = toy()
    monkeypatch.setattr(CpuBackend, "room_for_data", lambda self: 10_000)
    model = Looking([Dense(3, "softmax", input_shape=(6,))])
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    assert model.fit(x, y, verbose=0).history["loss"]


def test_evaluation_makes_no_room_for_training(monkeypatch):
    monkeypatch.setattr(CpuBackend, "room_for_data", lambda self: 10_000_000)
    model = build()
    model.evaluate(*toy(), verbose=0)
    assert len(model.optimizer.variables) == 2, "iterations and learning rate, no slots"
