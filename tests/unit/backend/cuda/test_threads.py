"""Models on a GPU, which is the thread's that opened it; and models there that share layers."""

import sys

import pytest

from tests.emulated import emulated, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")


@pytest.mark.long
def test_other_threads_are_refused_and_leave_no_trace():
    code = """
import threading
import numpy as np
import dptrain as dp
from dptrain import layers

x, y = np.random.default_rng(0).random((20, 4), np.float32), np.zeros((20, 2), np.float32)
model = dp.Sequential([layers.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2)], seed=1)
model.compile("sgd", "mse", device="cuda")
before = model.predict(x, verbose=0)
calls = [
    lambda: model.predict(x, verbose=0), lambda: model.predict(x[:3], verbose=0), lambda: model(x), model.get_weights,
    lambda: model.evaluate(x, y, verbose=0), lambda: model.train_on_batch(x, y), lambda: model.fit(x, y, verbose=0),
]
told = []

def work():
    for call in calls:
        try:
            call()
        except dp.errors.DeviceError as error:
            told.append(str(error))

thread = threading.Thread(target=work, name="server")
thread.start()
thread.join(60)
print(len(told), *set(told))
print(np.array_equal(model.predict(x, verbose=0), before), np.allclose(model(x), before, atol=1e-5))
loss = model.evaluate(x, y, verbose=0)
model.train_on_batch(x, y)
print(model.evaluate(x, y, verbose=0) < loss)
"""
    process = emulated(sys.executable, "-W", "error", "-c", code)
    assert (process.code, process.err) == (0, "")
    message = "the GPU belongs to thread 'MainThread', which opened it: use it from there, not from 'server'"
    assert process.out.splitlines() == [f"7 {message}", "True True", "True"]


def test_models_that_share_layers():
    code = """
import numpy as np
import dptrain as dp
from dptrain import layers

x, y = np.random.default_rng(0).random((20, 4), np.float32), np.zeros((20, 2), np.float32)
inputs = layers.Input((4,))
code = layers.Dense(3, "tanh")(inputs)
encoder, whole = dp.Model(inputs, code, seed=1), dp.Model(inputs, layers.Dense(2)(code), seed=1)
encoder.compile("sgd", "mse", device="cuda")
whole.compile("sgd", "mse", device="cuda")
found = [encoder.predict(x, verbose=0)]
for _ in range(3):
    whole.train_on_batch(x, y)
    found.append(encoder.predict(x, verbose=0))
    print(np.allclose(found[-1], encoder(x), atol=1e-5), np.allclose(found[-1], found[-2], atol=1e-6))
"""
    process = emulated(sys.executable, "-W", "error", "-c", code)
    assert (process.code, process.err) == (0, "")
    assert process.out.splitlines() == ["True False"] * 3
