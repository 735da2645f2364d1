"""Batches that the user's own code makes are trained on as the same batches of arrays."""

import collections
import gc
import json
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dptrain as dp
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.batches import workers
from dptrain.batches.adapters import PyDatasetSource
from dptrain.batches.inputs import Expected, Stream, as_array, source_of, stream_batches
from dptrain.batches.workers import Workers
from dptrain.comm import SoloCommunicator
from dptrain.errors import ConfigError, DataError
from dptrain.layers import Dense, Dropout
from dptrain.losses import MeanSquaredError
from tests.sample import examples, sample

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (60, 5), dtype=np.uint8), RNG.standard_normal((60, 2))
RAN_OUT = "Your input ran out of data; interrupting training"
SHUFFLED = "`shuffle=True` was passed, but will be ignored"


def build(*, input_shape: tuple[int, ...] | None = (5,), **options) -> dp.Sequential:
    first = {} if input_shape is None else {"input_shape": input_shape}
    stack = [dp.layers.Rescaling(1 / 255, **first), Dense(7, "tanh"), Dropout(0.3), Dense(2)]
    model = dp.Sequential(stack, seed=5)
    model.compile(dp.optimizers.Adam(0.01), "mse", dtype="float64", **options)
    return model


def bits(model: dp.Sequential) -> bytes:
    return b"".join(weight.tobytes() for weight in model.get_weights())


def pieces(rows: int, size: int):
    return [
        (X[begin : begin + size][: rows - begin], Y[begin : begin + size][: rows - begin])
        for begin in range(0, rows, size)
    ]


class Batches(dp.utils.PyDataset):
    def __init__(self, batches, **options):
        super().__init__(**options)
        self.batches, self.seen, self.threads = batches, [], set()

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        self.seen.append(index)
        self.threads.add(threading.current_thread().name)
        return self.batches[index]


class Loader:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def forever(batches):
    while True:
        yield from batches


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dptrain-")]


@settings(deadline=None, max_examples=examples(25))
@given(st.integers(1, 60), st.integers(1, 25), st.integers(1, 3), st.sampled_from(["generator", "number", "loader"]))
def test_the_bits_of_the_same_batches_from_arrays(rows, size, epochs, kind):
    model, parts = build(), build()
    batches = pieces(rows, size)
    expected = model.fit(X[:rows], Y[:rows], batch_size=size, epochs=epochs, shuffle=False, verbose=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", RAN_OUT)  # a loader without a length is iterated to its end
        if kind == "generator":
            actual = parts.fit(forever(batches), steps_per_epoch=len(batches), epochs=epochs, shuffle=False, verbose=0)
        else:
            source = Batches(batches) if kind == "number" else Loader(batches)
            actual = parts.fit(source, epochs=epochs, shuffle=False, verbose=0)
    assert actual.history == expected.history
    assert bits(parts) == bits(model)
    np.testing.assert_array_equal(parts.predict(Batches(batches)), model.predict(X[:rows], batch_size=size))
    scored = model.evaluate(X[:rows], Y[:rows], batch_size=size, verbose=0)
    assert parts.evaluate(Batches(batches), verbose=0) == scored
    assert running() == []


@settings(deadline=None, max_examples=examples(15))
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_batches_of_any_sizes(sizes):
    ends = np.cumsum(sizes)
    batches = [(X[end - size : end], Y[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    first, other = build(), build()
    for x, y in batches:
        first.train_on_batch(x, y)
    other.fit(Batches(batches), shuffle=False, verbose=0)
    assert bits(first) == bits(other)


Named = collections.namedtuple("Named", "image more")


def torch_tensor(array):
    return pytest.importorskip("torch").from_numpy(array)


def data_frame(array):
    return pytest.importorskip("pandas").DataFrame(array, copy=False)


class ArrayLike:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class OnlyDlpack:
    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: x[:, ::-1],
        lambda x: {"x": x},
        lambda x: (x, x),
        lambda x: Named(x, x),
        lambda x: {"a": x, "b": [x, x]},
        torch_tensor,
        lambda x: [torch_tensor(x)],
        data_frame,
        lambda x: {"x": data_frame(x)},
        ArrayLike,
        OnlyDlpack,
    ],
)
@pytest.mark.parametrize("what", sample(["fit", "evaluate", "predict"], 3))
def test_a_generator_may_fill_the_same_memory_again(wrap, what):
    """What is drawn ahead is a copy, however it is nested."""

    class Net(dp.Model):
        def __init__(self):
            super().__init__(seed=1)
            self.dense = Dense(2)

        def call(self, inputs):
            return self.dense(sum(dp.ops.cast(x, "float32") for x in dp.tree.flatten(inputs)))

    def batches(x, y, weights, *, reuse):
        for number in range(6):
            if not reuse:
                x, y, weights = x.copy(), y.copy(), weights.copy()
            x[:], y[:], weights[:] = number, number % 3, number + 1
            yield wrap(x), y, weights

    def result(*, reuse):
        net = Net()
        net.compile("sgd", "mse")
        batch_iterator = batches(np.empty((4, 3), "f4"), np.empty((4, 2), "f4"), np.empty(4, "f4"), reuse=reuse)
        if what == "fit":
            net.fit(batch_iterator, steps_per_epoch=6, shuffle=False, verbose=0)
            return net.get_weights()[0]
        return (
            net.evaluate(batch_iterator, steps=6, verbose=0)
            if what == "evaluate"
            else net.predict(batch_iterator, steps=6, verbose=0)
        )

    np.testing.assert_array_equal(result(reuse=True), result(reuse=False))


def test_dtypes_and_memory_may_change_from_batch_to_batch():
    x, y = np.empty((6, 5)), np.empty((6, 2))

    def same_memory():
        for begin in (0, 6, 12, 18, 24):
            x[:], y[:] = X[begin : begin + 6], Y[begin : begin + 6]
            yield x, y

    first, other, third = build(), build(), build()
    first.fit(X[:30], Y[:30], batch_size=6, shuffle=False, verbose=0)
    other.fit(same_memory(), steps_per_epoch=5, shuffle=False, verbose=0)
    assert bits(first) == bits(other)
    mixed = [(a.astype(kind), b.tolist()) for (a, b), kind in zip(pieces(30, 6), "BhidB", strict=True)]
    third.fit(Batches([(a, np.array(b)) for a, b in mixed]), shuffle=False, verbose=0)
    assert bits(first) == bits(third)


def test_validation_by_batches():
    model, parts = build(), build()
    expected = model.fit(X, Y, epochs=2, shuffle=False, verbose=0, validation_data=(X[:20], Y[:20])).history
    actual = parts.fit(X, Y, epochs=2, shuffle=False, verbose=0, validation_data=Batches(pieces(20, 6))).history
    assert actual["loss"] == expected["loss"]
    np.testing.assert_allclose(actual["val_loss"], expected["val_loss"], rtol=1e-12)


def test_a_model_takes_its_input_shape_from_the_first_batch():
    for method in ("fit", "evaluate", "predict"):
        model = build(input_shape=None)
        getattr(model, method)(Batches(pieces(20, 6)), verbose=0)
        assert model.get_weights()[0].shape == (5, 7)


def test_orders_of_batches_are_those_of_the_seed_and_epoch():
    def order(seed: int) -> list[int]:
        data = Batches(pieces(60, 4))
        model = dp.Sequential([Dense(2, input_shape=(5,))], seed=seed)
        model.compile("sgd", "mse")
        model.fit(data, epochs=2, verbose=0, on_nonfinite="ignore")
        assert sorted(data.seen[1:16]) == sorted(data.seen[16:]) == list(range(15))
        return data.seen[1:]  # after the look at the first

    first = order(1)
    assert first == order(1)
    assert first != order(2)
    assert first[:15] not in (first[15:], list(range(15)))


# Epochs, as Keras 3.15 has them (tests/against_keras/test_sources.py asks Keras itself)


class Steps(dp.callbacks.Callback):
    """Counts the steps of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.steps.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.steps[-1] += 1


@pytest.mark.parametrize(
    ("count", "arguments", "steps", "warned", "losses"),
    [
        (3, {}, [3], 1, 1),
        (1, {"epochs": 2}, [1, 1], 2, 2),
        (3, {"epochs": 3}, [3, 2, 2], 3, 3),  # the two batches that were looked at are handed out again
        (7, {"epochs": 2, "steps_per_epoch": 3}, [3, 3], 0, 2),
        (5, {"epochs": 3, "steps_per_epoch": 3}, [3, 2, 2], 2, 3),
        (6, {"epochs": 3, "steps_per_epoch": 3}, [3, 3, 0], 1, 2),  # an epoch without data has no logs
    ],
)
def test_epochs_of_a_generator(count, arguments, steps, warned, losses):
    counter, draws = Steps(), []

    def batches():
        for number, batch in enumerate(pieces(60, 5)[:count]):
            draws.append(number)
            yield batch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = build().fit(batches(), **arguments, verbose=0, callbacks=[counter])
    assert counter.steps == steps
    assert sum(RAN_OUT in str(warning.message) for warning in caught) == warned
    assert sum(SHUFFLED in str(warning.message) for warning in caught) == 1
    assert len(history.history["loss"]) == losses
    assert counter.params["steps"] == arguments.get("steps_per_epoch")
    assert draws == list(range(min(count, sum(steps))))


@pytest.mark.parametrize(
    ("count", "steps_per_epoch", "batches_taken", "warned"),
    [
        (3, None, [[0, 1, 2], [0, 1, 2]], 0),
        (3, 2, [[0, 1], [2]], 1),
        (3, 5, [[0, 1, 2], [0, 1, 2]], 2),
        (4, 2, [[0, 1], [2, 3], [0, 1]], 0),
    ],
)
def test_epochs_of_a_dataset(count, steps_per_epoch, batches_taken, warned):
    class Noted(Batches):
        def on_epoch_begin(self):
            self.seen.append("begin")

        def on_epoch_end(self):
            self.seen.append("end")

    data, validation = Noted(pieces(60, 5)[:count]), Noted(pieces(60, 7)[:2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build().fit(
            data,
            epochs=len(batches_taken),
            steps_per_epoch=steps_per_epoch,
            shuffle=False,
            verbose=0,
            validation_data=validation,
        )
    look = ["begin", 0, "end"]
    assert data.seen == look + [event for epoch in batches_taken for event in ["begin", *epoch, "end"]]
    assert validation.seen == ["end", "begin", 0, 1, "end"] * len(batches_taken)
    assert sum(RAN_OUT in str(warning.message) for warning in caught) == warned


def test_every_validation_begins_with_the_first_batch():
    model = build()
    model.compile(dp.optimizers.SGD(1e-12), "mse", dtype="float64")
    arguments = {"epochs": 3, "verbose": 0, "validation_steps": 2, "validation_batch_size": 4, "shuffle": False}
    arrays = model.fit(X, Y, validation_data=(X, Y), **arguments).history["val_loss"]
    batches = model.fit(X, Y, validation_data=forever(pieces(60, 4)), **arguments).history["val_loss"]
    expected = [model.evaluate(X[:8], Y[:8], verbose=0)] * 3
    np.testing.assert_allclose(arrays, expected, rtol=1e-9)
    np.testing.assert_allclose(batches, expected, rtol=1e-9)


def test_without_a_batch_size_steps_go_through_all_samples():
    counter = Steps()
    first, other = build(), build()
    first.fit(X[:59], Y[:59], steps_per_epoch=3, shuffle=False, verbose=0, callbacks=[counter])
    other.fit(X[:59], Y[:59], batch_size=20, shuffle=False, verbose=0)
    assert counter.steps == [3]
    assert bits(first) == bits(other)
    assert len(first.predict(X[:59], steps=2)) == 59
    assert len(first.predict(X[:59], steps=2, batch_size=7)) == 14
    with pytest.warns(UserWarning, match=RAN_OUT):
        assert len(first.predict(X[:59], steps=10, batch_size=7)) == 59


def test_progress_of_epochs_whose_end_nobody_knows(capsys):
    with pytest.warns(UserWarning, match=RAN_OUT):
        build().fit(iter(pieces(60, 5)), shuffle=False, verbose=1)
    assert "Epoch 1/1 - 12 steps" in capsys.readouterr().out


# Threads


def test_workers_make_batches_at_once_and_they_come_in_order():
    meeting = threading.Barrier(3, timeout=60)

    class Slow(Batches):
        def __getitem__(self, index):
            if index in (0, 1, 2) and self.seen.count(0):  # not at the look, which is alone
                meeting.wait()  # breaks unless three are here at once
                time.sleep(0.02 * (3 - index))
            return super().__getitem__(index)

    data = Slow(pieces(60, 6), workers=3, max_queue_size=4)
    first, other = build(), build()
    first.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    other.fit(data, shuffle=False, verbose=0)
    assert bits(first) == bits(other)
    assert len(data.threads) == 4, "three workers, and the look"
    assert running() == []


@pytest.mark.parametrize(("options", "most"), [({}, 2), ({"workers": 2, "max_queue_size": 3}, 3)])
def test_the_queue_is_bounded(options, most):
    data = Batches(pieces(60, 4), **options)
    ahead = []

    class Watch(dp.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            end = time.monotonic() + 20
            while batch < 3 and len(data.seen) < batch + 3 and time.monotonic() < end:
                time.sleep(0.001)  # a thread draws, as soon as a busy machine lets it
            time.sleep(0.02)
            ahead.append(len(data.seen) - 1 - (batch + 1))  # the look is not counted

    build().fit(data, shuffle=False, verbose=0, callbacks=[Watch()])
    assert max(ahead) <= most
    assert max(ahead) > 0


def test_the_next_batch_is_drawn_while_the_present_one_is_computed():
    finished = threading.Event()

    def batches():
        for number, batch in enumerate(pieces(60, 6)):
            if number == 3:
                finished.set()
            yield batch

    class Wait(dp.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                assert finished.wait(20), "batch 3 is drawn when batch 2 is done"

    build().fit(batches(), steps_per_epoch=10, shuffle=False, verbose=0, callbacks=[Wait()])


@pytest.mark.parametrize("place", ["callback", "generator", "batch"])
def test_the_threads_end_with_the_training(place):
    class Fails(dp.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if place == "callback":
                raise KeyError("user's own")

    def batches():
        yield from pieces(18, 6)
        if place == "generator":
            raise KeyError("user's own")
        yield (X[:6, :3] if place == "batch" else X[:6], Y[:6])

    error, message = (DataError, "batch 4 of epoch 1: model expects 5") if place == "batch" else (KeyError, "own")
    with pytest.raises(error, match=message):
        build().fit(batches(), steps_per_epoch=4, shuffle=False, verbose=0, callbacks=[Fails()])
    gc.collect()
    assert running() == []


def test_stop_training_ends_the_threads():
    class Stop(dp.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    history = build().fit(forever(pieces(60, 6)), shuffle=False, verbose=0, callbacks=[Stop()])
    assert history.epoch == [0]
    assert running() == []


def test_a_thread_that_does_not_come_back_does_not_keep_the_process(monkeypatch):
    monkeypatch.setattr(workers, "_PATIENCE", 0.05)
    started, stuck = threading.Event(), threading.Event()
    pool = Workers(1, "dptrain-test")
    future = pool.submit(lambda: (started.set(), stuck.wait(20)))
    assert started.wait(20)
    left = pool.submit(lambda: 1)
    pool.close()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("dptrain-test"))
    stuck.set()
    assert future.result(60)
    with pytest.raises(CancelledError):
        left.result(60)


# What is passed on and what is refused


def weights_given(source, **options) -> list[list[float] | None]:
    actual = source_of(source, comm=SoloCommunicator(), **options)
    expected = Expected((5,), (2,), MeanSquaredError(), dtype="float64")
    batches = stream_batches(actual, expected, SoloCommunicator(), None)
    arguments = []
    with batches.open(CpuBackend(np.float64), None):
        for step in batches.epoch(0):
            rows = batches.rows([step])
            arrays = dict(zip(batches.spec.names, rows.arrays, strict=True))
            arguments.append(arrays["sample_weight"][: step[0].rows].tolist() if "sample_weight" in arrays else None)
    return arguments


def test_weights_in_batches_and_of_classes():
    y = np.eye(2)[[0, 1, 1]]
    data = [(X[:3], y, np.array([1, 2, 3])), (X[:3], y), (X[:3], y, np.array([[4.0], [5], [6]]))]
    assert weights_given(Batches(data)) == [[1, 2, 3], None, [4, 5, 6]]
    assert weights_given(Batches([(X[:3], y)]), class_weight={1: 0.5}) == [[1, 0.5, 0.5]]
    with pytest.raises(ConfigError, match="`class_weight` and `sample_weight` at the same time"):
        weights_given(Batches(data), class_weight={1: 0.5})
    with pytest.raises(DataError, match=r"batch 1 of epoch 1: sample_weight: 1 values are not finite"):
        weights_given(Batches([(X[:3], y, np.array([1, np.nan, 1]))]))


def test_class_weights_of_numpy_are_compared_like_others():
    weights = dict.fromkeys(np.arange(3), np.float32(0.5))
    facts = [
        Stream(PyDatasetSource(Batches([(X, Y)]), class_weight=class_weights)).facts
        for class_weights in (weights, dict.fromkeys(range(3), 0.5))
    ]
    assert json.dumps(facts[0]) == json.dumps(facts[1])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X[:4, :3], Y[:4]), r"batch 2 of epoch 1: model expects 5 features of shape \(5,\), data has 3"),
        ((X[:4], Y[:3]), "batch 2 of epoch 1: Data cardinality is ambiguous. .* x has 4 samples, y has 3"),
        ((X[:4], Y[:4], Y[:3, 0]), r"batch 2 of epoch 1: sample_weight: expected \(4,\) real numbers"),
        ((X[:4],), "batch 2 of epoch 1: y is missing"),
        ((X[:0], Y[:0]), "batch 2 of epoch 1: it has no samples"),
        (({"a": X[:4]}, Y[:4]), "batch 2 of epoch 1: x: The structure of `inputs` .* dictionary with .'a'"),
        (((X[:4], X[:4]), Y[:4]), "batch 2 of epoch 1: x: The structure of `inputs` .* Received: 2 arrays"),
        ((X[:4].tolist(), Y[:4]), "batch 2 of epoch 1: Unrecognized data type: x=.*convert it to an array"),
        ((np.float64(1), np.float64(2)), "batch 2 of epoch 1: Unrecognized data type: x="),
        ((X[:4].astype(str), Y[:4]), "batch 2 of epoch 1: x has dtype"),
        ((X[:4], Y[:4], None, None), r"batch 2 of epoch 1: PyDataset.__getitem__\(\) must return a tuple"),
        ("abc", r"batch 2 of epoch 1: PyDataset.__getitem__\(\) must return a tuple"),
    ],
)
def test_a_bad_batch_is_named(batch, message):
    with pytest.raises(ValueError, match=message):
        build().fit(Batches([(X[:4], Y[:4]), batch]), shuffle=False, verbose=0)


def test_labels_out_of_range_in_a_batch():
    model = dp.Sequential([Dense(3, "softmax", input_shape=(5,))])
    model.compile("sgd", "sparse_categorical_crossentropy")
    data = Batches([(X[:4], np.array([0, 1, 2, 0])), (X[:4], np.array([0, 1, 3, 0]))])
    with pytest.raises(DataError, match=r"batch 2 of epoch 1: y: label 3 at index 2; 3 classes allow 0-2"):
        model.fit(data, shuffle=False, verbose=0)
    with pytest.raises(DataError, match=r"batch 2 of the evaluation: y: label 3 at index 2"):
        model.evaluate(data, verbose=0)


def endless(data: dp.utils.PyDataset) -> dp.utils.PyDataset:
    data.__class__ = type("Endless", (Batches,), {"num_batches": None})
    return data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": Batches(pieces(9, 3), workers=2, use_multiprocessing=True)}, "not supported: use_multiprocessing=True"),
        ({"x": Batches([])}, "The PyDataset has length 0"),
        ({"x": Loader(pieces(9, 3)), "y": Y}, "When providing `x` as a Loader, `y` should not be passed"),
        ({"x": Loader(pieces(9, 3)), "class_weight": {1: 2.0}}, "`class_weight` is not supported for Loader inputs"),
        ({"x": Loader([])}, "the Loader returns no batch"),
        ({"x": None}, "x is missing"),
        ({"x": {"a": X}, "y": Y}, "x: The structure of `inputs` doesn't match"),
        ({"x": [X, X], "y": Y}, "Received: 2 arrays"),
        ({"x": pieces(9, 3)}, "Unrecognized data type: x="),
        ({"x": X, "y": Y.tolist()}, "Unrecognized data type: y="),
        ({"x": SimpleNamespace(tocoo=1), "y": Y}, "Unrecognized data type: x="),
        ({"x": lambda: pieces(9, 3)}, "Unrecognized data type: x="),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build().fit(**arguments, shuffle=False, verbose=0)


def test_warnings_of_shuffle():
    model = build()
    for source, words in [
        (iter(pieces(9, 3)), "a generator. The generator is expected to yield already-shuffled data"),
        (Loader(pieces(9, 3)), "a Loader. The Loader is expected to already be shuffled"),
        (endless(Batches(pieces(60, 3))), "an infinite PyDataset. The PyDataset is expected"),
    ]:
        with pytest.warns(UserWarning, match=f"{SHUFFLED} since the data `x` was provided as {words}"):
            model.fit(source, steps_per_epoch=2, verbose=0)


def test_a_dataset_of_another_class_and_one_that_forgets_its_base():
    class Other:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return pieces(9, 3)[index]

    class Forgetful(dp.utils.Sequence, Other):
        def __init__(self):
            pass

        __getitem__ = Other.__getitem__

    first, other, third = build(), build(), build()
    first.fit(X[:9], Y[:9], batch_size=3, shuffle=False, verbose=0)
    other.fit(Other(), shuffle=False, verbose=0)
    with pytest.warns(UserWarning, match=r"should call `super\(\).__init__\(\*\*kwargs\)` in its constructor"):
        third.fit(Forgetful(), shuffle=False, verbose=0)
    assert bits(first) == bits(other) == bits(third)
    assert [len(batch[0]) for batch in Forgetful()] == [3, 3, 3]
    with pytest.raises(NotImplementedError, match="You need to implement the `num_batches` property"):
        PyDatasetSource(dp.utils.PyDataset())


# Arrays of other libraries


class Table:
    def __array__(self, dtype=None, copy=None):
        return X.astype(np.float32)


class Exported:
    """Only what the DLPack protocol asks for."""

    def __init__(self) -> None:
        self.array = X.astype(np.float32)

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Tensor:
    """A tensor that wants gradients and is on a GPU, as PyTorch has them."""

    def __init__(self, ready: int = 0) -> None:
        self.ready = ready

    def detach(self):
        return Tensor(self.ready + 1)

    def cpu(self):
        return Tensor(self.ready + 1)

    def __array__(self, dtype=None, copy=None):
        if self.ready < 2:
            raise TypeError("can't convert a device tensor that requires grad")
        return X.astype(np.float32)


@pytest.mark.parametrize("make", [Table, Exported, Tensor, lambda: [X], lambda: (X,)])
def test_arrays_of_other_libraries(make):
    np.testing.assert_array_equal(as_array(make(), "x"), X)
    first, other = build(), build()
    first.fit(X, Y, verbose=0)
    other.fit(make(), Y, verbose=0)
    assert bits(first) == bits(other)


def test_what_cannot_be_read_as_an_array():
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("it is elsewhere")

    with pytest.raises(DataError, match=r"x: .*Broken.* cannot be read as a NumPy array: it is elsewhere"):
        as_array(Broken(), "x")


MAPPED = """
import resource, sys
import numpy as np
import dptrain as dp

path, device_mb = sys.argv[1], float(sys.argv[2]) or None
rows = 300_000
np.memmap(path, np.uint8, "w+", shape=(rows, 784)).flush()
x, y = np.memmap(path, np.uint8, "r", shape=(rows, 784)), np.zeros(rows, np.int64)
x_small, y_small = np.zeros((64, 784), np.uint8), np.zeros(64, np.int64)
model = dp.Sequential([dp.layers.Rescaling(1 / 255, input_shape=(784,)), dp.layers.Dense(2, "softmax")])
model.compile("sgd", "sparse_categorical_crossentropy", device_mb=device_mb)
model.fit(x_small, y_small, verbose=0)
status = dict(line.split(":") for line in open("/proc/self/status"))
used = int(status["VmData"].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (100 << 20),) * 2)  # a map of a file for reading is not counted
try:
    np.ones(150 << 20, np.uint8)
except MemoryError:
    print("limited")
history = model.fit(x, y, batch_size=64, steps_per_epoch=100, validation_split=0.1, validation_steps=20, verbose=0)
model.evaluate(x, y, batch_size=64, steps=20, verbose=0)
print(len(history.history["val_loss"]), model.predict(x, batch_size=64, steps=20, verbose=0).shape)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="limits and measures memory as Linux does")
@pytest.mark.parametrize("device_mb", sample([0, 1], 2))
def test_a_memory_map_is_never_copied_whole(tmp_path, device_mb):
    """235 MB of samples, 100 MB of memory besides what the program has before."""
    command = [sys.executable, "-c", MAPPED, str(tmp_path / "x"), str(device_mb)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.stdout == "limited\n1 (1280, 2)\n", process.stderr
