"""Signals end compiled loops that never do."""

import os
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.ops.indexing import take_rows
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, ReferenceExecutable
from dptrain.program.program import ROWS, trace
from dptrain.program.tensor import Variable
from dptrain.runtime import signals

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


@pytest.mark.parametrize("endless", [0, 1, 3])
@pytest.mark.parametrize("by_python", [False, True])
@pytest.mark.parametrize("kind", [ReferenceExecutable, CompiledExecutable])
def test_steps_before_one_that_is_abandoned_are_counted_as_they_are_in_the_state(kind, by_python, endless):
    """Several steps of one call, of which one never ends."""
    count, total = Variable(np.array(0), "count"), Variable(np.array(0.0), "total")

    def step(x, rows):
        most = ops.max(take_rows(x, rows))
        most = ops.det(ops.reshape(most, (1, 1))) if by_python else most
        start = ops.convert_to_tensor(0), ops.stop_gradient(most)
        steps, _ = ops.while_loop(lambda n, most: (n < 3) | (most > 100), lambda n, most: (n + 1, most), start)
        count.assign_add(1)
        total.assign_add(most + 0 * ops.cast(steps, "float64"))
        return {"most": most}

    x = np.arange(1.0, 9)
    x[2 * endless + 1] = 1000
    program = trace(step, {"x": ((8,), np.float64), ROWS: ((Dim.rows(2),), np.int64)})
    executable = kind(program, HostMemory(), {"x": x, ROWS: np.arange(8)})
    with signals.catching():
        signals.note(signal.SIGTERM)
        timer = threading.Timer(0.2, signals.abandon_step, (signal.SIGTERM,))
        timer.start()
        with pytest.raises(signals.EndlessStepError) as raised:
            executable.run([0, 2, 4, 6])
        timer.join()
    assert raised.value.finished == int(count) == endless
    assert float(total) == sum(x[1 : 2 * endless : 2])
