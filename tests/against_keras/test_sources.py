"""What makes batches itself: steps, warnings, order of events, losses and errors are Keras'."""

import importlib
import itertools
import re
import warnings

import numpy as np
import pytest

import dptrain as dp
from dptrain.batches.inputs import Samples, split_off
from dptrain.errors import ConfigError

# With PyTorch Keras rounds sums of float64 to float32 here and there.
RTOL = 3e-6
# What Keras itself does with PyTorch's tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

EVENTS = [
    f"on_{name}_{edge}"
    for name in ("train", "epoch", "train_batch", "test", "test_batch", "predict", "predict_batch")
    for edge in ("begin", "end")
]
RNG = np.random.default_rng(3)
X, Y = RNG.standard_normal((60, 4)), RNG.standard_normal((60, 2))
KERNEL, BIAS = RNG.standard_normal((4, 2)), RNG.standard_normal(2)
SIZES = [5, 5, 3, 7, 1, 6, 5, 8, 2, 4]


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    begin = sum(SIZES[:number])
    return X[begin : begin + SIZES[number]], Y[begin : begin + SIZES[number]]


def generator(count: int, log: list[str]):
    for number in range(count):
        log.append(f"draw {number}")
        yield batch(number)


def dataset(base: type, count: int | None, log: list[str], **options):
    class Batches(base):
        @property
        def num_batches(self):
            return count

        def __getitem__(self, index):
            log.append(f"get {index}")
            return batch(index % len(SIZES))

        def on_epoch_begin(self):
            log.append("begin")

        def on_epoch_end(self):
            log.append("end")

    return Batches(**options)


def recorder(base: type, events: list):
    """Return a callback that notes every event with its number, and the losses."""

    def hook(name: str):
        def note(self, *arguments, **kwargs):
            logs = kwargs.get("logs", arguments[-1] if arguments else None)
            number = [argument for argument in arguments if isinstance(argument, int)]
            losses = {key: float(logs[key]) for key in ("loss", "val_loss") if logs and key in logs}
            events.append((name, number, losses))

        return note

    return type("Recorder", (base,), {name: hook(name) for name in EVENTS})()


def run(library, keras, method: str, make, **arguments):
    """Return what a library does: result, parameters, warnings, the callbacks' events, the sources' events."""
    batches_read: dict[str, list[str]] = {"x": [], "validation_data": []}
    ours = library is dp
    if ours:
        model = dp.Sequential([dp.layers.Dense(2, input_shape=(4,))])
        model.compile(dp.optimizers.SGD(0.05), "mse", dtype="float64", jit_compile=False, device="cpu")
    else:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    model.set_weights([KERNEL, BIAS])
    events: list = []
    callback = recorder(library.callbacks.Callback, events)
    sources = {
        name: source(library.utils.PyDataset, batches_read[name]) if callable(source) else source
        for name, source in make.items()
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = getattr(model, method)(**sources, **arguments, verbose=0, callbacks=[callback])
    warnings_seen = [
        str(warning.message)
        for warning in caught
        if "shuffle" in str(warning.message) or "ran out" in str(warning.message)
    ]
    if method == "fit":
        result = result.history
    return result, callback.params["steps"], warnings_seen, events, batches_read, model.get_weights()


def generators(count: int):
    return lambda base, log: generator(count, log)


def datasets(count: int | None, **options):
    return lambda base, log: dataset(base, count, log, **options)


def compare(keras, method: str, make, **arguments) -> None:
    ours, theirs = (run(library, keras, method, make, **arguments) for library in (dp, keras))
    assert ours[1:3] == theirs[1:3], "steps and warnings"
    events = theirs[3]
    if keras.backend.backend() == "jax":  # which begins a batch before it knows that there is none
        events = [
            event
            for event, after in zip(events, [*events[1:], (None,)], strict=True)
            if not event[0].endswith("batch_begin") or after[0] == event[0].replace("begin", "end")
        ]
    assert [event[:2] for event in ours[3]] == [event[:2] for event in events]
    for event, their_event in zip(ours[3], events, strict=True):
        assert list(event[2]) == list(their_event[2]), event
        np.testing.assert_allclose(
            list(event[2].values()), list(their_event[2].values()), rtol=RTOL, err_msg=str(event[:2])
        )
    assert ours[4] == theirs[4], "what the sources were asked"
    if method == "fit":
        assert {key: len(values) for key, values in ours[0].items()} == {k: len(v) for k, v in theirs[0].items()}
        for key, values in theirs[0].items():
            np.testing.assert_allclose(ours[0][key], values, rtol=RTOL, atol=1e-6)
    else:
        np.testing.assert_allclose(ours[0], theirs[0], rtol=RTOL, atol=1e-6)
    for value, expected in zip(ours[5], theirs[5], strict=True):
        np.testing.assert_allclose(value, expected, rtol=RTOL, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (3, {}),
        (1, {"epochs": 2}),
        (3, {"epochs": 3}),
        (7, {"epochs": 2, "steps_per_epoch": 3}),
        (5, {"epochs": 3, "steps_per_epoch": 3}),
        (6, {"epochs": 4, "steps_per_epoch": 3}),
        (4, {"epochs": 3, "initial_epoch": 1, "shuffle": False}),
        (10, {"epochs": 1, "steps_per_epoch": 10, "batch_size": 3}),
    ],
)
def test_a_generator(keras, count, arguments):
    if keras.backend.backend() == "jax" and count == 6:
        pytest.skip("Keras on JAX has a loss for an epoch without a batch")
    compare(keras, "fit", {"x": generators(count)}, **arguments)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (3, {"epochs": 2}),
        (3, {"epochs": 2, "steps_per_epoch": 2}),
        (3, {"epochs": 3, "steps_per_epoch": 5}),
        (4, {"epochs": 3, "steps_per_epoch": 2}),
        (None, {"epochs": 3, "steps_per_epoch": 4}),
        (None, {"epochs": 2, "steps_per_epoch": 3, "shuffle": True}),
    ],
)
def test_a_pydataset(keras, count, arguments, workers):
    compare(keras, "fit", {"x": datasets(count, workers=workers)}, **{"shuffle": False, **arguments})


@pytest.mark.parametrize("steps", [None, 2, 3])
@pytest.mark.parametrize("validation", [generators(3), generators(9), datasets(3)])
def test_validation(keras, validation, steps):
    make = {"x": generators(9), "validation_data": validation}
    compare(keras, "fit", make, epochs=3, steps_per_epoch=3, validation_steps=steps)


def test_validation_of_arrays_by_a_generator_and_the_other_way_round(keras):
    compare(keras, "fit", {"x": generators(4), "validation_data": (X[:9], Y[:9])}, epochs=2, steps_per_epoch=2)
    make = {"x": X, "y": Y, "validation_data": datasets(3)}
    compare(keras, "fit", make, epochs=2, shuffle=False, validation_freq=2)


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("steps", [2, 4])
def test_steps_of_arrays(keras, steps, batch_size):
    """Without a batch size Keras takes batches that go through the arrays; every validation starts anew."""
    make = {"x": X, "y": Y, "validation_data": (X[:29], Y[:29])}
    arguments = {"epochs": 3, "steps_per_epoch": steps, "validation_steps": steps, "shuffle": False}
    compare(keras, "fit", make, **arguments, batch_size=batch_size)
    compare(keras, "evaluate", {"x": X, "y": Y}, steps=steps, batch_size=batch_size)
    compare(keras, "predict", {"x": X}, steps=steps, batch_size=batch_size)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("steps", [None, 2, 5])
@pytest.mark.parametrize("make", [generators(4), datasets(3)])
def test_evaluate_and_predict(keras, method, make, steps):
    compare(keras, method, {"x": make}, steps=steps)


def test_a_second_training_looks_at_no_batch(keras):
    results = []
    for library in (dp, keras):
        log: list[str] = []
        if library is dp:
            model = dp.Sequential([dp.layers.Dense(2, input_shape=(4,))])
        else:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        data = dataset(library.utils.PyDataset, 2, log)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.evaluate(data, verbose=0)
            model.fit(data, shuffle=False, verbose=0)
            model.predict(data, verbose=0)
            model.fit(data, shuffle=False, verbose=0)
        results.append(log)
    assert results[0] == results[1]


def test_workers_give_the_batches_in_order(keras):
    ours = run(dp, keras, "fit", {"x": datasets(6, workers=3, max_queue_size=2)}, epochs=2, shuffle=False)
    theirs = run(keras, keras, "fit", {"x": datasets(6)}, epochs=2, shuffle=False)
    np.testing.assert_allclose(ours[0]["loss"], theirs[0]["loss"], rtol=RTOL, atol=1e-6)
    assert sorted(ours[4]["x"]) == sorted(theirs[4]["x"])


def test_a_torch_loader(keras):
    if keras.backend.backend() == "jax":
        pytest.skip("Keras on JAX cannot take this loader's tensors, which have gradients")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def loader(base, log):
        return DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=7)

    compare(keras, "fit", {"x": loader}, epochs=2)
    compare(keras, "fit", {"x": loader}, epochs=2, shuffle=False, steps_per_epoch=4)
    compare(keras, "fit", {"x": torch.tensor(X, requires_grad=True), "y": torch.tensor(Y)}, shuffle=False)


def nothing(base, log):
    return generator(0, log)


BAD = [
    ({"x": generators(3), "y": Y}, {}),
    ({"x": generators(3), "sample_weight": Y[:, 0]}, {}),
    ({"x": generators(3)}, {"class_weight": {0: 1.0}}),
    ({"x": generators(3)}, {"validation_split": 0.5}),
    ({"x": datasets(3), "y": Y}, {}),
    ({"x": datasets(3), "sample_weight": Y[:, 0]}, {}),
    ({"x": datasets(3)}, {"validation_split": 0.5}),
    ({"x": nothing}, {}),
    ({"x": lambda base, log: (batch for batch in [[X, Y]])}, {}),
    ({"x": lambda base, log: (batch for batch in [X])}, {}),
    ({"x": lambda base, log: (batch for batch in [{"a": X}])}, {}),
    ({"x": lambda base, log: (batch for batch in [(X, Y, Y, Y)])}, {}),
    ({"x": X.tolist(), "y": Y}, {}),
    ({"x": X, "y": Y[:5]}, {}),
    ({"x": "abc"}, {}),
    ({"x": 3}, {}),
    ({"x": lambda base, log: len}, {}),
    ({"x": X, "y": Y[:, 0], "sample_weight": Y[:, 0]}, {"class_weight": {0: 1.0}}),
    ({"x": X, "y": Y, "validation_data": (X, Y, Y[:, 0], Y)}, {}),
    ({"x": X, "y": Y, "validation_data": (X, Y)}, {"validation_freq": 1.5}),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_is_refused(keras, case):
    make, arguments = BAD[case]
    messages = []
    for library in (dp, keras):
        with pytest.raises(ValueError, match=r".") as caught:
            run(library, keras, "fit", make, shuffle=False, **arguments)
        messages.append(" ".join(str(caught.value).split()))
    # What was found is shown by each library in its own way.
    beginning = re.split(r"Received: |found: |x=|'x' sizes|Found incompatible|, found", messages[1])[0].strip()
    assert len(beginning) > 20
    assert beginning in messages[0].replace("  ", " ")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # by Keras, where there is none
def test_nothing_to_evaluate(keras):
    if keras.backend.backend() == "jax":
        pytest.skip("Keras on JAX ends in a TypeError of its own")
    for library in (dp, keras):
        model = library.Sequential([library.layers.Input((4,)), library.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        assert model.evaluate(X[:0], Y[:0], verbose=0) == []
        assert model.evaluate(X[:0], Y[:0], verbose=0, return_dict=True) == {}
        assert list(model.fit(X, Y, validation_data=(X[:0], Y[:0]), verbose=0).history) == ["loss"]


def test_what_is_no_layer(keras):
    for library in (dp, keras):
        with pytest.raises(ValueError, match=r"Only instances of .*Layer` can be added to .* Received: 3 \(of type "):
            library.Sequential([3])


def test_validation_split_cuts_where_keras_does(keras):
    """For all fractions and lengths: they are not numbers of binary digits, and 0.9 times 10 is below 9."""
    slicing = importlib.import_module("keras.src.trainers.data_adapters.array_slicing")
    for rows, percent in itertools.product([2, 3, 7, 10, 20, 41, 100], range(1, 100)):
        x = np.arange(rows)
        try:
            (expected,), (held_out,) = slicing.train_validation_split((x,), percent / 100)
        except ValueError:
            with pytest.raises(ConfigError, match="not sufficient to split it"):
                split_off(Samples(x), percent / 100)
            continue
        first, last = split_off(Samples(x), percent / 100)
        assert (len(first), len(last)) == (len(expected), len(held_out)), (rows, percent)
