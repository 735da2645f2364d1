"""Callbacks are called when, and with what, Keras 3 calls them, and decide as Keras' do."""

import warnings
from typing import Any

import numpy as np
import pytest

import dptrain as dp

# Keras' own, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def data(rows: int = 50, features: int = 6, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, features))
    return x, rng.integers(0, classes, rows)


@pytest.fixture
def models(keras):
    """Return a function that makes a Keras model and the same in dptrain."""

    def make(rate: float = 0.5) -> tuple[Any, dp.Sequential]:
        theirs = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        theirs.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
        ours = dp.Sequential(
            [dp.layers.Dense(8, activation="tanh", input_shape=(6,)), dp.layers.Dense(3, activation="softmax")]
        )
        ours.compile(
            dp.optimizers.SGD(rate),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            dtype="float64",
            jit_compile=False,
        )
        ours.build((None, 6))
        rng = np.random.default_rng(1)
        weights = [0.5 * rng.standard_normal(weight.shape) for weight in theirs.get_weights()]
        theirs.set_weights(weights)
        ours.set_weights(weights)
        return theirs, ours

    return make


HOOKS = [
    *(f"on_{mode}_{edge}" for mode in ("train", "test", "predict") for edge in ("begin", "end")),
    *(f"on_{mode}_batch_{edge}" for mode in ("train", "test", "predict") for edge in ("begin", "end")),
    "on_epoch_begin",
    "on_epoch_end",
]


def recorder(base: type, events: list[Any], stop: tuple[str, int] | None = None) -> Any:
    """Return a callback that notes every hook with its number, its params and its log keys.

    Args:
        base: Keras' Callback or dptrain's.
        events: to which notes are added.
        stop: hook and number of its call (from 0) that sets `stop_training`.
    """
    calls = dict.fromkeys(HOOKS, 0)

    def hook(name: str):
        def note(self, *arguments, **kwargs):
            logs = kwargs.get("logs", arguments[-1])
            number = arguments[0] if isinstance(arguments[0], int) else None
            events.append((name, number, sorted(logs), dict(self.params)))
            if stop == (name, calls[name]):
                self.model.stop_training = True
            calls[name] += 1

        return note

    return type("Recorder", (base,), {name: hook(name) for name in HOOKS})()


FITS: dict[str, tuple[dict[str, Any], tuple[str, int] | None]] = {
    "plain": ({}, None),
    "validation": ({"validation_data": True}, None),
    "validation_split": ({"validation_split": 0.2}, None),
    "validation_steps": ({"validation_data": True, "validation_steps": 2, "validation_batch_size": 5}, None),
    "validation_freq": ({"validation_data": True, "validation_freq": 2}, None),
    "validation_freq of a list": ({"validation_data": True, "validation_freq": [1, 3]}, None),
    "steps_per_epoch": ({"steps_per_epoch": 3}, None),
    "steps_per_epoch that the data does not give": ({"steps_per_epoch": 4, "epochs": 2}, None),
    "initial_epoch": ({"initial_epoch": 2, "epochs": 4}, None),
    "no epoch": ({"initial_epoch": 3}, None),
    "stop in a step": ({"validation_data": True}, ("on_train_batch_end", 7)),
    "stop before a step": ({}, ("on_train_batch_begin", 2)),
    "stop in an epoch's end": ({"validation_data": True}, ("on_epoch_end", 1)),
    "stop in an epoch's begin": ({"validation_data": True}, ("on_epoch_begin", 1)),
    "stop in validation": ({"validation_data": True}, ("on_test_batch_end", 3)),
    "stop before training": ({}, ("on_train_begin", 0)),
}


@pytest.mark.parametrize("case", FITS)
def test_events_of_fit(keras, models, case):
    options, stop = FITS[case]
    x, y = data()
    arguments = {"batch_size": 10, "epochs": 3, "verbose": 0, "shuffle": False} | options
    if "validation_data" in options:
        arguments["validation_data"] = (x[:25], y[:25])
    expected, events = [], []
    theirs, ours = models()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        theirs.fit(x, y, **arguments, callbacks=[recorder(keras.callbacks.Callback, expected, stop)])
        ours.fit(x, y, **arguments, callbacks=[recorder(dp.callbacks.Callback, events, stop)])
    assert events == expected
    assert len(expected) > 1


@pytest.mark.parametrize("verbose", [0, 2])
@pytest.mark.parametrize("steps", [None, 2])
def test_events_of_evaluate_and_predict(keras, models, steps, verbose, capsys):
    x, y = data()
    expected, actual = [], []
    theirs, ours = models()
    for model, base, events in ((theirs, keras.callbacks.Callback, expected), (ours, dp.callbacks.Callback, actual)):
        for size in (None, 15):
            model.evaluate(x, y, size, verbose=verbose, steps=steps, callbacks=[recorder(base, events)])
            model.predict(x, size, verbose=verbose, steps=steps, callbacks=[recorder(base, events)])
    assert actual == expected


def agree(theirs: Any, ours: dp.Sequential, expected: Any, actual: Any) -> None:
    assert actual.epoch == expected.epoch
    assert sorted(actual.history) == sorted(expected.history)
    for key, values in expected.history.items():
        # Keras computes losses and metrics in float32 even where weights are float64.
        np.testing.assert_allclose(actual.history[key], values, rtol=1e-5, err_msg=key)
    for mine, reference in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-5, atol=2e-7)


CASES: dict[str, Any] = {
    "early stopping": lambda k: [k.EarlyStopping(patience=3)],
    "best weights": lambda k: [k.EarlyStopping(patience=4, restore_best_weights=True)],
    "best accuracy": lambda k: [k.EarlyStopping("val_accuracy", patience=3, restore_best_weights=True)],
    "baseline and start": lambda k: [k.EarlyStopping(baseline=0.5, patience=2, start_from_epoch=3, min_delta=0.001)],
    "plateau": lambda k: [k.ReduceLROnPlateau(factor=0.3, patience=1, cooldown=2, min_lr=0.01)],
    "schedule": lambda k: [k.LearningRateScheduler(lambda epoch, rate: rate * 0.9 if epoch else 0.8)],
    "all": lambda k: [
        k.LearningRateScheduler(lambda epoch, rate: rate * 0.95),
        k.ReduceLROnPlateau(factor=0.5, patience=2, min_delta=0.01),
        k.EarlyStopping(patience=8, restore_best_weights=True),
    ],
    "all the other way round": lambda k: [
        k.EarlyStopping("loss", patience=2, min_delta=0.01),
        k.ReduceLROnPlateau("val_accuracy", factor=0.5, patience=1),
        k.LearningRateScheduler(lambda epoch, rate: float(rate)),
    ],
}


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_trainings_take_the_same_decisions(keras, models, case, rate):
    x, y = data()
    theirs, ours = models(rate)
    arguments = {
        "batch_size": 10,
        "epochs": 25,
        "verbose": 0,
        "shuffle": False,
        "validation_data": data(30),
    }
    expected = theirs.fit(x, y, **arguments, callbacks=CASES[case](keras.callbacks))
    history = ours.fit(x, y, **arguments, callbacks=CASES[case](dp.callbacks))
    agree(theirs, ours, expected, history)
    assert float(ours.optimizer.learning_rate) == pytest.approx(float(theirs.optimizer.learning_rate), rel=1e-9)


@pytest.mark.parametrize("validated", [False, True])
def test_csv_files_are_the_same(keras, models, tmp_path, validated):
    x, y = data()
    validation = {"validation_data": (x[:20], y[:20]), "validation_freq": 2} if validated else {}
    tables = []
    for name, model, callbacks in zip(("a", "b"), models(), (keras.callbacks, dp.callbacks), strict=True):
        path = tmp_path / name
        path.write_text("before\r\n")
        for append in (True, False):
            logger = callbacks.CSVLogger(str(path), ";", append)
            model.fit(x, y, batch_size=10, epochs=3, verbose=0, shuffle=False, callbacks=[logger], **validation)
            tables.append([line.split(";") for line in path.read_bytes().decode().split("\r\n")])
    for theirs, ours in ((tables[0], tables[2]), (tables[1], tables[3])):
        assert len(ours) == len(theirs)
        for mine, expected_row in zip(ours, theirs, strict=True):
            assert len(mine) == len(expected_row)
            for value, expected in zip(mine, expected_row, strict=True):
                assert value == expected or float(value) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "by_batch"),
    [
        ({"save_best_only": True}, False),
        ({"save_best_only": True, "monitor": "val_accuracy"}, False),
        ({"save_best_only": True, "mode": "max", "initial_value_threshold": 1.1}, False),
        ({}, False),
        ({"save_freq": 7}, True),
        ({"save_freq": 2, "save_best_only": True, "monitor": "loss", "mode": "min"}, False),
    ],
)
def test_checkpoints_are_saved_when_keras_saves_them(keras, models, monkeypatch, tmp_path, options, by_batch, capsys):
    x, y = data()
    name = "{epoch:02d}-{batch:03d}.keras" if by_batch else "{epoch:02d}-{loss:.4f}.keras"
    saved, printed = [], []
    for model, callbacks in zip(models(1.0), (keras.callbacks, dp.callbacks), strict=True):
        calls: list[str] = []
        monkeypatch.setattr(
            type(model), "save", lambda self, path, overwrite=True, calls=calls: calls.append(path), raising=False
        )
        checkpoint = callbacks.ModelCheckpoint(str(tmp_path / name), verbose=1, **options)
        if options.get("save_freq") == 2:
            checkpoint.on_epoch_end(0, {})  # Keras finds the direction there alone, and fails where a step is first
        capsys.readouterr()
        arguments = {"batch_size": 10, "epochs": 6, "verbose": 0, "shuffle": False, "validation_data": data(30)}
        model.fit(x, y, **arguments, callbacks=[checkpoint])
        saved.append(calls)
        printed.append(capsys.readouterr().out)
    assert saved[1] == saved[0]
    assert saved[0]
    assert printed[1] == printed[0]


@pytest.mark.parametrize("raise_error", [False, True])
def test_nan_ends_training_at_the_same_step(keras, models, raise_error, capsys):
    x, y = data()
    x[33] = np.nan
    expected, actual = [], []
    messages = []
    for model, callbacks, events in zip(models(), (keras.callbacks, dp.callbacks), (expected, actual), strict=True):
        hooks = [callbacks.TerminateOnNaN(raise_error), recorder(callbacks.Callback, events)]
        arguments = {"batch_size": 10, "epochs": 2, "verbose": 0, "shuffle": False, "callbacks": hooks}
        capsys.readouterr()
        if raise_error:
            with pytest.raises(RuntimeError) as caught:
                model.fit(x, y, **arguments)
            messages.append(str(caught.value))
        else:
            with np.errstate(all="ignore"):
                model.fit(x, y, **arguments)
            messages.append(capsys.readouterr().out)
    assert actual == expected
    assert messages[1] == messages[0]


@pytest.mark.parametrize(
    "name",
    [
        "CSVLogger",
        "BackupAndRestore",
        "EarlyStopping",
        "History",
        "LambdaCallback",
        "LearningRateScheduler",
        "ModelCheckpoint",
        "ReduceLROnPlateau",
        "TensorBoard",
        "TerminateOnNaN",
    ],
)
def test_constructors_have_keras_arguments_and_defaults(keras, name):
    import inspect

    def arguments(cls):
        parameters = inspect.signature(cls.__init__).parameters.values()
        return [(parameter.name, parameter.default, parameter.kind) for parameter in parameters]

    assert arguments(getattr(dp.callbacks, name)) == arguments(getattr(keras.callbacks, name))
