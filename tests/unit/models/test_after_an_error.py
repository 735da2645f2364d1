"""What comes after an error: the next training of a model has the bits of one that never failed."""

import sys
import threading
from contextvars import ContextVar

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import DptrainError
from tests.sample import sample

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = (np.arange(12) % 3).astype(np.int32)
HOOKS = (
    "train_begin",
    "epoch_begin",
    "train_batch_begin",
    "train_batch_end",
    "test_batch_end",
    "epoch_end",
    "train_end",
)


class BoomError(Exception):
    pass


class Fragile(layers.Layer):
    """Passes on what it gets, in a type of its own, until it `fails`."""

    fails = False

    def call(self, x):
        if self.fails:
            raise BoomError
        return ops.multiply(x, 2)


def model():
    dp.utils.set_random_seed(1)
    net = dp.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(5, "tanh", dtype="mixed_bfloat16"),
            layers.BatchNormalization(),
            Fragile(dtype="mixed_bfloat16"),
            layers.Dense(3, "softmax"),
        ]
    )
    net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    net.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    return net


def raising(hook, error=BoomError):
    def raise_it(*_):
        raise error

    callback = dp.callbacks.Callback()
    setattr(callback, f"on_{hook}", raise_it)
    return callback


def fragile(net, **arguments):
    net.layers[2].fails = True
    try:
        net.fit(X, Y, verbose=0, **arguments)
    finally:
        net.layers[2].fails = False


def batches():
    yield X[:5], Y[:5]
    raise BoomError


def not_finite(net):
    net.fit(np.where(np.arange(4) == 1, np.nan, X), Y, batch_size=5, verbose=0)


FAILURES = {
    **{
        f"a callback: {hook}": lambda net, hook=hook: net.fit(
            X, Y, validation_data=(X, Y), verbose=0, callbacks=[raising(hook)]
        )
        for hook in HOOKS
    },
    "Ctrl-C": lambda net: net.fit(X, Y, verbose=0, callbacks=[raising("train_batch_end", KeyboardInterrupt)]),
    "a callback, with steps skipped": lambda net: net.fit(
        X, Y, verbose=0, on_nonfinite="skip", skip_outliers=3.0, callbacks=[raising("epoch_end")]
    ),
    "a generator": lambda net: net.fit(batches(), steps_per_epoch=2, shuffle=False, verbose=0),
    "a layer": fragile,
    "a layer, with steps skipped": lambda net: fragile(net, on_nonfinite="skip"),
    "targets": lambda net: net.fit(X, np.ones((12, 7)), verbose=0),
    "NaN": not_finite,
    "an evaluation": lambda net: net.evaluate(X, Y, verbose=0, callbacks=[raising("test_batch_end")]),
    "a prediction": lambda net: net.predict(X, verbose=0, callbacks=[raising("predict_batch_end")]),
}


def contexts():
    """Return what each context variable of dptrain holds."""
    return {
        f"{module}.{name}": value.get(None)
        for module in [name for name in sys.modules if name.startswith("dptrain")]
        for name, value in vars(sys.modules[module]).items()
        if isinstance(value, ContextVar)
    }


def state(net):
    return [np.asarray(variable.numpy()) for variable in (*net.variables, *net.optimizer.variables)]


def trained(net, start):
    """Return the losses and the state of a training from a state."""
    for variable, value in zip((*net.variables, *net.optimizer.variables), start, strict=True):
        variable.assign(value)
    logs = net.fit(X, Y, batch_size=5, epochs=2, shuffle=False, validation_data=(X, Y), verbose=0).history
    return logs, [array.tobytes() for array in state(net)]


@pytest.mark.parametrize("failure", sample(FAILURES, 4))
def test_the_next_training_is_that_of_a_model_that_never_failed(failure):
    net = model()
    start, before = state(net), contexts()
    with pytest.raises((BoomError, KeyboardInterrupt, DptrainError, ValueError)):
        FAILURES[failure](net)
    assert contexts() == before
    assert trained(net, start) == trained(model(), start)


@pytest.mark.parametrize("failure", ["a callback: epoch_end", "a layer", "NaN"])
def test_other_threads_train_after_an_error(failure):
    net = model()
    start = state(net)
    with pytest.raises((BoomError, DptrainError)):
        FAILURES[failure](net)
    results = []
    thread = threading.Thread(target=lambda: results.append(trained(net, start)))
    thread.start()
    thread.join()
    assert results == [trained(model(), start)]
