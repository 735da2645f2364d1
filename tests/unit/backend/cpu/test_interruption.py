"""Signals end compiled loops that never do."""

import os
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops

X = np.arange(1, 9, dtype=np.float32).reshape(8, 1)


class Halved(layers.Layer):
    """Halves its inputs until they are at most `limit`, which a layer's weight is."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.nested = nested
        self.limit = self.add_weight((), "ones", trainable=False)

    def call(self, inputs):
        def halved(x):
            return ops.while_loop(lambda x: ops.max(x) > self.limit, lambda x: x / 2, (x,))[0]

        if self.nested:
            return ops.stop_gradient(ops.scan(lambda x, _: (halved(x), None), inputs, length=3)[0])
        return ops.stop_gradient(halved(inputs))


class ComesError(Exception):
    """What the handler raises."""


def raise_error(*_):
    raise ComesError


@contextmanager
def signalled():
    """Send this process a signal, whose handler raises, while the block runs."""
    before = signal.signal(signal.SIGUSR2, raise_error)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    signal.alarm(60)  # ends the process of a loop that goes on
    try:
        with pytest.raises(ComesError):
            yield
    finally:
        timer.join()
        signal.alarm(0)
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("nested", [False, True])
def test_a_signal_ends_a_loop_that_never_does(nested):
    layer = Halved(nested)
    model = dp.Sequential([layers.Input((1,)), layer])
    expected = model.predict(X, verbose=0)
    np.testing.assert_array_equal(expected, X / 8)
    for _ in range(2):
        layer.limit.assign(-1.0)  # zero is as small as it gets
        with signalled():
            model.predict(X, verbose=0)
        layer.limit.assign(1.0)
        np.testing.assert_array_equal(model.predict(X, verbose=0), expected)


@pytest.mark.parametrize("needs_python", [False, True])
def test_a_step_that_is_ended_changes_no_weights(needs_python):
    layer = Halved(False)
    by_lapack = [layers.Lambda(lambda x: x * ops.det(ops.ones((1, 1)) + 0 * ops.mean(x)))] if needs_python else []
    model = dp.Sequential([layers.Input((1,)), *by_lapack, layer, *by_lapack, layers.Dense(1)], seed=1)
    model.compile(dp.optimizers.SGD(0.1), "mse")
    model.train_on_batch(X, X)
    layer.limit.assign(-1.0)
    before = model.get_weights()
    with signalled():
        model.train_on_batch(X, X)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
